"""feddkd controls: write the controls of an experiment with DKD as a file of experiments."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from feddkd.cli.console import AsJson, DataDir, File, Settings, console, plain_table
from feddkd.errors import InputError
from feddkd.experiment import Experiment, load, write
from feddkd.runs.controls import Control, controls, has_dkd


def controls_command(
    file: File,
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The file of experiments to write.")
    ] = Path("controls.toml"),
    set_: Settings = None,
    data: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Write the controls of an experiment with DKD, and show what each costs.

    They are: the method without dkd() with as many rounds, communications, bytes, local steps and
    floating-point operations (compute) as the experiment, and with as many communications and local
    steps at once; and dkd() with labels in the teachers' place, with shuffled teachers, and with
    the average as teacher. The rate's decay is such that it falls as far over the longer run.

    Costs are those of the first seed's split. Run the file with `feddkd run`, and compare with
    `feddkd report`. docs/when-dkd-helps.md has results.
    """
    experiments = _with_dkd(file, load(file, set_ or ()))
    found = controls(experiments[0], data)
    variants = [control.experiment for control in found]
    write(out, variants, [one.seed for one in experiments])
    console(stderr=as_json).print(_table(found))
    console(stderr=as_json).print(f"written to {out}", soft_wrap=True)
    if as_json:
        lines = [{**control.experiment.as_dict(), **asdict(control.costs)} for control in found]
        print(json.dumps({"file": str(out), "controls": lines}))


def _with_dkd(file: Path, experiments: list[Experiment]) -> list[Experiment]:
    """Return the experiments of a file with DKD: they must differ in their seeds alone."""
    found = [one for one in experiments if has_dkd(one)]
    if not found:
        raise InputError(f"{file} has no method with dkd() after another, as in fedavg() | dkd()")
    if len({(one.family, one.split_seed) for one in found}) > 1:
        raise InputError(
            f"{file} has several experiments with dkd() that differ in more than their seeds:"
            " choose one with --set"
        )
    return found


def _table(found: list[Control]) -> Table:
    page = plain_table("run", "rounds", "comms", "steps", "GFLOP", "MB")
    for control in found:
        page.add_row(*_cells(control))
    return page


def _cells(control: Control) -> list[str]:
    costs = control.costs
    numbers: list[Any] = [control.experiment.rounds, costs.communications, costs.steps]
    amounts = [costs.operations / 1e9, costs.bytes / 1e6]
    return [
        str(control.experiment.name),
        *(f"{number:,.0f}" for number in numbers),
        *(f"{amount:,.4g}" for amount in amounts),
    ]
