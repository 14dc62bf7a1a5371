"""feddkd resume: continue runs that were cut short."""

from pathlib import Path
from typing import Annotated

import typer

from feddkd.cli.console import skipped
from feddkd.cli.run_options import RunOptions, with_options
from feddkd.cli.start_runs import run_all
from feddkd.errors import InputError
from feddkd.experiment import Experiment
from feddkd.runs.record import Record, folder_name, survey


@with_options(RunOptions)
def resume(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Folders of runs, or folders that hold such."),
    ],
    options: RunOptions,
) -> None:
    """Continue the runs under some folders that were cut short, each from its last checkpoint."""
    found = [survey(folder, begun=True) for folder in folders]
    records = [record for one in found for record in one.records]
    # `simulate` ends or continues its records itself
    records = [record for record in records if not (record.in_memory and record.over)]
    experiments = [_checked(record) for record in records]
    if experiments:
        run_all(experiments, [record.folder.parent for record in records], options)
    skipped([error for one in found for error in one.errors])


def _checked(record: Record) -> Experiment:
    """Return the experiment of a record; raise an InputError if the run cannot be continued."""
    experiment = record.experiment
    if experiment.digest != record.manifest["digest"]:
        raise InputError(
            f"cannot resume {record.folder}: a file that its experiment names has changed"
        )
    if record.folder.resolve().name != (name := folder_name(experiment)):
        raise InputError(f"cannot resume {record.folder}: rename the folder to {name}")
    return experiment
