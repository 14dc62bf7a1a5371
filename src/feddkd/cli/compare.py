"""feddkd compare: the difference of two experiments, and of what came out of them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.table import Table

from feddkd.cli.console import AsJson, console
from feddkd.errors import InputError
from feddkd.experiment import Experiment, load
from feddkd.reports.compare import against, differences
from feddkd.reports.statistics import Paired
from feddkd.reports.tables import (
    TableColumn,
    families,
    headline_of,
    labels,
    mean_in_json,
    metric_columns,
    paired_cells,
)
from feddkd.runs.record import Record, find

Side = tuple[Experiment, list[Record]]
WHAT = "A run, a folder of seeds of one experiment, or a FILE.toml."


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help=WHAT)],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    as_json: AsJson = False,
) -> None:
    """Two experiments key by key, down to the options of their methods; then their results, seed by
    seed.
    """
    (one, ours), (other, theirs) = _side(a), _side(b)
    differs = differences(one, other)
    columns = metric_columns([*ours, *theirs]) if ours and theirs else []
    tests = against(ours, theirs) if columns else {}
    screen = console(stderr=as_json)
    screen.print(_keys(differs) if differs else "the same experiment, but for the seed")
    if columns:
        title = headline_of(ours).title
        screen.print(_results(title, columns, (ours, theirs), tests))
    if as_json:
        said = {name: asdict(test) if test else None for name, test in tests.items()}
        results = [
            {column.name: mean_in_json(column.values(records)) for column in columns}
            for records in ((ours, theirs) if columns else ())
        ]
        print(json.dumps({"differs": differs, "results": results, "difference": said}))


def _side(path: Path) -> Side:
    """One experiment, whatever its seeds, and its runs."""
    records = [] if path.is_file() else find(path)
    experiments = load(path) if path.is_file() else [record.experiment for record in records]
    if len({experiment.family for experiment in experiments}) > 1:
        names = (
            labels(families(records))
            if records
            else [experiment.method for experiment in experiments]
        )
        raise InputError(
            f"{path} holds several experiments, and one is compared with one:"
            f" {'; '.join(dict.fromkeys(names))}"
        )
    return experiments[0], records


def _keys(differs: Mapping[str, tuple[Any, Any]]) -> Table:
    page = _table("key", "A", "B")
    for key, values in differs.items():
        page.add_row(key, *("-" if value is None else str(value) for value in values))
    return page


def _results(
    title: str,
    columns: Sequence[TableColumn],
    sides: Sequence[Sequence[Record]],
    tests: Mapping[str, Paired | None],
) -> Table:
    page = _table(
        title, "A", "B", "B less A", "95 % interval", "higher in", "p (t)", "p (Wilcoxon)"
    )
    for column in (column for column in columns if column.name in tests):
        test, means = tests[column.name], [column.show(column.values(side)) for side in sides]
        cells = paired_cells(test, column.digits) if test else ["-"] * 5
        page.add_row(column.name, *means, *cells)
    return page


def _table(*headings: str) -> Table:
    page = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    for at, heading in enumerate(headings):
        page.add_column(heading, overflow="fold", justify="right" if at else "left")
    return page
