"""feddkd check: compare the files of runs with the digests in their seals."""

import json
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from feddkd.cli.console import AsJson, console
from feddkd.runs.repair import CheckedRun, check_runs, repaired


def check(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="DIR...", help="Folders of runs; runs/ by default."),
    ] = None,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Repair what can be repaired: from a checkpoint and the rows before it.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Check every file of the runs under some folders against the digests that were written with
    it, and say which runs are damaged and what can be repaired.

    Runs of versions that wrote no digests are reported as unchecked. The exit status is 1 if a run
    is damaged.
    """
    screen = console(stderr=as_json)
    found = []
    for folder in folders or [Path("runs")]:
        for before in check_runs(folder):
            after = repaired(before) if repair else before
            if before.flaws:
                screen.print(_line(before, mended=after.state == "whole"), soft_wrap=True)
            found.append(after)
    counts = Counter(run.state for run in found)
    screen.print(
        ", ".join(f"{counts[state]} {state}" for state in ("whole", "unchecked", "damaged"))
    )
    if as_json:
        print(json.dumps({"runs": [_in_json(run) for run in found]}))
    raise typer.Exit(1 if counts["damaged"] else 0)


def _line(run: CheckedRun, *, mended: bool) -> str:
    """Return a line about a damaged run."""
    remedy = run.remedy.what if run.remedy else ""
    end = "; repaired" if mended else ""
    return f"{run.folder}: {'; '.join(run.flaws)}; {remedy}{end}"


def _in_json(run: CheckedRun) -> dict[str, object]:
    remedy = run.remedy.what if run.remedy else None
    facts = {"state": run.state, "flaws": run.flaws, "remedy": remedy}
    return {"folder": str(run.folder), **facts}
