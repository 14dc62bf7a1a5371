"""feddkd paper verify, feddkd paper new: commands about the folder of any paper."""

import json
from pathlib import Path
from typing import Annotated

import typer

from feddkd.cli.console import AsJson, DataDir
from feddkd.errors import InputError
from feddkd.papers.definitions import Paper, read
from feddkd.papers.results import RecordedRun, recorded
from feddkd.papers.skeleton import write_skeleton
from feddkd.papers.verification import Verified, precision_of, some, verify

Papers = Annotated[
    Path,
    typer.Option(
        "--papers", metavar="DIR", help="Folder of the paper: tables.toml, published.csv, results/."
    ),
]


def paper_verify(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Only runs of this table.")
    ] = None,
    papers: Papers = Path("papers/feddkd"),
    runs: Annotated[int, typer.Option(min=1, metavar="N", help="How many runs.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Rounds of each.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Chooses the runs.")] = 0,
    data: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Play the first rounds of a random handful of recorded runs again, on the CPU, and compare.

    Cohorts, costs and the digests of data and division must be equal. Accuracies may differ by
    1e-9 if the record is in fp64, by 0.01 in fp32, and by 0.05 in tf32 and bf16: other processors
    and precisions round differently. Runs whose data are not there are named and left out. The exit
    status is 1 if a run does not come out again.
    """
    paper = read(papers)
    chosen = some(_of_table(paper, name), runs, seed)
    found = [one for run in chosen if (one := _verified(run, rounds, data)) is not None]
    if as_json:
        print(json.dumps({"verified": [_as_json(one) for one in found]}))
    if not found:
        raise InputError("no run could be played again: give the folder of the data with --data")
    if not all(one.holds for one in found):
        raise typer.Exit(1)


def _of_table(paper: Paper, name: str | None) -> list[RecordedRun]:
    known = recorded(paper)
    if name is None:
        return list(known.values())
    digests = {experiment.digest for experiment in paper.wanted(paper.table(name))}
    return [run for digest, run in known.items() if digest in digests]


def _verified(run: RecordedRun, rounds: int, data: Path | None) -> Verified | None:
    """Play a run again and print a line about it; None if its data are not there."""
    title = f"{run.experiment.method}, {run.experiment.data}, seed {run.experiment.seed}"
    try:
        found = verify(run, rounds, data)
    except InputError as error:
        print(f"left out: {title}: {error}")
        return None
    wrong = f"; differs: {', '.join(found.differs)}" if found.differs else ""
    print(
        f"{'the same' if found.holds else 'NOT THE SAME'}: {title}: {found.rounds} rounds,"
        f" largest difference of an accuracy {found.difference:.2g}"
        f" (allowed in {precision_of(run)}: {found.tolerance:g}){wrong}"
    )
    return found


def _as_json(found: Verified) -> dict[str, object]:
    return {
        "digest": found.run.experiment.digest,
        "rounds": found.rounds,
        "precision": precision_of(found.run),
        "difference": found.difference,
        "tolerance": found.tolerance,
        "differs": list(found.differs),
        "holds": found.holds,
    }


def paper_new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the folder.")],
    parent: Annotated[
        Path, typer.Option("--in", metavar="DIR", help="The folder that it is made in.")
    ] = Path("papers"),
) -> None:
    """Make the folder of a paper of your own: a small experiment, a table of it, and an empty list
    of printed cells, for you to change.

    The commands of `feddkd paper` read it with --papers.
    """
    folder = write_skeleton(name, parent)
    print(f"written to {folder}; next: feddkd paper run first --papers {folder}")
