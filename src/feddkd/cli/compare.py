"""feddkd compare: the difference of two experiments, and of their results."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from feddkd.cli.console import AsJson, console, plain_table
from feddkd.errors import InputError
from feddkd.reports.columns import TableColumn, metric_columns
from feddkd.reports.compare import against, differences
from feddkd.reports.families import families, headline_of, labels
from feddkd.reports.statistics import Paired
from feddkd.reports.tables import mean_in_json, paired_cells
from feddkd.reports.text_differences import UnclearError, text_differences
from feddkd.runs.record import Record, find

if TYPE_CHECKING:
    from feddkd.experiment import Experiment

SIDE = "A run, a folder of seeds of one experiment, or a FILE.toml."


@dataclass(frozen=True)
class Side:
    """One experiment, with any seeds, and its runs: read from a TOML file or from records."""

    written: "Experiment | None"
    records: list[Record]

    @property
    def experiment(self) -> "Experiment":
        return self.records[0].experiment if self.written is None else self.written

    @property
    def manifest(self) -> Mapping[str, Any]:
        if self.written is None:
            return self.records[0].manifest
        return {"experiment": self.written.as_dict(), "canonical": self.written.canonical}


def compare(
    a: Annotated[Path, typer.Argument(metavar="A", help=SIDE)],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    as_json: AsJson = False,
) -> None:
    """Compare two experiments key by key, down to the options of their methods; then compare their
    results, seed by seed.
    """
    one, other = _side(a), _side(b)
    differs = _differences(one, other)
    both = one.records and other.records
    sides = (one.records, other.records) if both else ()
    columns = metric_columns([*one.records, *other.records]) if both else []
    tests = against(one.records, other.records) if both else {}
    screen = console(stderr=as_json)
    screen.print(_keys(differs) if differs else "the same experiment, but for the seed")
    if columns:
        screen.print(_results(headline_of(one.records).title, columns, sides, tests))
    if as_json:
        compared = {name: asdict(test) if test else None for name, test in tests.items()}
        results = [
            {column.name: mean_in_json(column.values(records)) for column in columns}
            for records in sides
        ]
        print(json.dumps({"differs": differs, "results": results, "difference": compared}))


def _differences(one: Side, other: Side) -> dict[str, tuple[Any, Any]]:
    """Return the keys that differ. The manifests tell most differences without loading torch."""
    try:
        return text_differences(one.manifest, other.manifest)
    except UnclearError:
        return differences(one.experiment, other.experiment)


def _side(path: Path) -> Side:
    """Return the experiment and the runs of a path; raise an InputError if it holds several."""
    if path.is_file():
        from feddkd.experiment import load

        experiments = load(path)
        _check_single(path, {e.family: e.method for e in experiments})
        return Side(experiments[0], [])
    records = find(path)
    groups = families(records)
    names = [group[0].manifest["family"] for group in groups]
    _check_single(path, dict(zip(names, labels(groups), strict=True)))
    return Side(None, records)


def _check_single(path: Path, names: Mapping[str, str]) -> None:
    """Raise an InputError if there are several families; `names` has a label for each."""
    if len(names) > 1:
        raise InputError(
            f"{path} holds several experiments, and one is compared with one:"
            f" {'; '.join(dict.fromkeys(names.values()))}"
        )


def _keys(differs: Mapping[str, tuple[Any, Any]]) -> Table:
    page = plain_table("key", "A", "B")
    for key, values in differs.items():
        page.add_row(key, *("-" if value is None else str(value) for value in values))
    return page


def _results(
    title: str,
    columns: Sequence[TableColumn],
    sides: Sequence[Sequence[Record]],
    tests: Mapping[str, Paired | None],
) -> Table:
    page = plain_table(
        title, "A", "B", "B less A", "95 % interval", "higher in", "p (t)", "p (Wilcoxon)"
    )
    for column in (column for column in columns if column.name in tests):
        test, means = tests[column.name], [column.show(column.values(side)) for side in sides]
        cells = paired_cells(test, column.digits) if test else ["-"] * 5
        page.add_row(column.name, *means, *cells)
    return page
