"""Forecast experiments, or run and show them, for `run`, `resume` and `paper run`."""

import json
from pathlib import Path

from feddkd.cli.console import clock, console
from feddkd.cli.dry_run import plan, planned, worth_a_forecast
from feddkd.cli.flower_runs import ray_events
from feddkd.cli.run_options import RunOptions
from feddkd.cli.show_runs import show
from feddkd.errors import InputError
from feddkd.experiment import Experiment
from feddkd.runs.runner import play_all

DAY = 24 * 60 * 60


def run_all(
    experiments: list[Experiment],
    places: list[Path],
    options: RunOptions,
    *,
    fresh: bool = False,
    dry: bool = False,
    until: int | None = None,
) -> None:
    """Run experiments with a command's options, each in a folder under its place, and show the
    results.

    With `dry`, only print a forecast. A long sweep gets a forecast too, before it starts; on a GPU,
    where compiling for the trial may take minutes, only a vast one. What takes more than a day
    is refused without `--yes`.
    """
    if options.engine == "flower-sim":
        events = ray_events(experiments, places, options, fresh)
        return show(events, experiments, places, as_json=options.as_json)
    experiments, how = options.how(experiments, fresh=fresh, until=until)
    if dry or worth_a_forecast(experiments, until, options.device):
        forecast = plan(experiments, places, how)
        console(stderr=options.as_json or not dry).print(planned(forecast))
        if dry:
            if options.as_json:
                print(json.dumps(forecast))
            return
        if forecast["seconds"] > DAY and not options.yes:
            raise InputError(
                f"this takes about {clock(forecast['seconds'])} on this machine; say --yes to run"
                " it, or choose fewer rounds, steps or clients"
            )
    events = play_all(experiments, places, how)
    show(
        events,
        experiments,
        places,
        as_json=options.as_json,
        device=how.device,
        log=options.log or (),
        until=until,
    )
