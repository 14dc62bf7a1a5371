"""feddkd resume: continue runs that were cut short."""

from pathlib import Path
from typing import Annotated

import typer

from feddkd.cli.run_options import RunOptions, with_options
from feddkd.cli.start_runs import run_all
from feddkd.errors import InputError
from feddkd.experiment import Experiment
from feddkd.runs.record import Record, find, folder_name


@with_options(RunOptions)
def resume(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Folders of runs, or folders that hold such."),
    ],
    options: RunOptions,
) -> None:
    """Continue the runs under some folders that were cut short, each from its last checkpoint."""
    records = [record for folder in folders for record in find(folder, begun=True)]
    # `simulate` ends or continues its records itself
    records = [record for record in records if not (record.in_memory and record.over)]
    experiments = [_checked(record) for record in records]
    run_all(experiments, [record.folder.parent for record in records], options)


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
