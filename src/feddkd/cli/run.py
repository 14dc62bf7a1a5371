"""feddkd run: run the experiments of a file."""

import os
from pathlib import Path
from typing import Annotated

import typer

from feddkd.cli.console import File, Settings, console
from feddkd.cli.run_options import OnDivergence, RunOptions, with_options
from feddkd.cli.start_runs import run_all
from feddkd.experiment import load
from feddkd.rounds import availability
from feddkd.spec.types import checked


@with_options(RunOptions)
def run(
    file: File,
    options: RunOptions,
    set_: Settings = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where run folders are written.")] = Path(
        "runs"
    ),
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Run again what is finished or was cut short.")
    ] = False,
    on_divergence: OnDivergence = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Say what would run, on which engine, and its time, memory and bytes."
        ),
    ] = False,
) -> None:
    """Run the experiments of a file: one run for each combination of its [sweep].

    A file needs one key, `method`:

        method = "fedavg(epochs=5, lr=0.1) | dkd(steps=10, lr=0.2)"

    The keys that most experiments set, with their defaults:

    - data = "digits", partition = "dirichlet(alpha=0.1)": see `feddkd data list`
    - model = "mlp(hidden='64')"; or a function of your own, "FILE.py:function" (also for data)
    - clients = 10, rounds = 10, seed = 0
    - cohort = 1.0: the active clients of a round, as a share or a number

    docs/experiments.md has all keys. A table [sweep] lists values, as in seed = [0, 1, 2]. Change
    any key by --set rounds=5, --set 'method=fedavg(lr=0.3)', --set 'sweep.seed=[0, 1]'.

    Finished runs in DIR are left alone, and runs that were cut short are continued to the same
    numbers. Ctrl-C ends the round and saves; a second Ctrl-C stops at once.

    A file that names a Python file runs that file: run only files that you trust.
    """
    checked(on_divergence, availability.OnDivergence | None, "--on-divergence")
    divergence = [] if on_divergence is None else [f"on_divergence={on_divergence}"]
    experiments = load(file, [*(set_ or ()), *divergence])
    run_all(experiments, [out] * len(experiments), options, fresh=fresh, dry=dry_run)
    if not options.as_json and not dry_run:
        console().print(f"written to {out}{os.sep}", soft_wrap=True)
