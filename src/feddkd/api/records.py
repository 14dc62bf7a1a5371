"""`load`: runs on disk, as values to look at from Python."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

from feddkd.api import tables
from feddkd.errors import InputError
from feddkd.runs.damage import check_contents, contents, raise_if_damaged
from feddkd.runs.record import Record, find, read_record, stored_summary
from feddkd.runs.summary import summarise

if TYPE_CHECKING:
    from feddkd.experiment import Experiment


@dataclass(frozen=True, repr=False)
class LoadedRun:
    """A run that was read from its folder."""

    record: Record

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return self.record.folder

    @property
    def manifest(self) -> dict[str, Any]:
        """The content of manifest.json: the experiment, digests, versions and hardware."""
        return self.record.manifest

    @property
    def history(self) -> list[dict[str, Any]]:
        """One row of numbers for each round."""
        return self.record.history

    @property
    def method(self) -> str:
        """The method's text."""
        return str(self.manifest["experiment"]["method"])

    @cached_property
    def experiment(self) -> "Experiment | None":
        """The experiment; None if `simulate` made the record."""
        return None if self.record.in_memory else self.record.experiment

    @property
    def target(self) -> float | str | None:
        """The value of a metric on the test set whose cost is reported, if there is one."""
        target: float | str | None = self.manifest["experiment"].get("target")
        return target

    @cached_property
    def summary(self) -> dict[str, Any]:
        """The numbers that people quote; of an unfinished run those of its rounds so far."""
        return stored_summary(self.folder) or summarise(self.history, self.target)

    def state_dict(self) -> dict[str, Any]:
        """Return the final global tensors on the CPU, for the network's `load_state_dict`.

        Tensors that clients keep are not among them.
        """
        path = self.folder / "final.safetensors"
        if not path.exists():
            raise InputError(f"the run in {self.folder} is not finished: it has no final tensors")
        from safetensors.torch import load

        content = path.read_bytes()
        checked = check_contents(self.folder, {**contents(self.folder), path.name: content})
        raise_if_damaged(self.folder, checked)
        return dict(load(content))

    def to_frame(self) -> Any:
        """Return the rows as a pandas DataFrame."""
        return _frame(self.history)

    def __repr__(self) -> str:
        return tables.as_text(*_table([self]))

    def _repr_html_(self) -> str:
        return tables.as_html(*_table([self]))


class LoadedRuns(Sequence[LoadedRun]):
    """Runs that were read from their folders. It prints as a table."""

    def __init__(self, runs: Sequence[LoadedRun]) -> None:
        self._runs = list(runs)

    @overload
    def __getitem__(self, index: int) -> LoadedRun: ...

    @overload
    def __getitem__(self, index: slice) -> "LoadedRuns": ...

    def __getitem__(self, index: int | slice) -> "LoadedRun | LoadedRuns":
        if isinstance(index, slice):
            return LoadedRuns(self._runs[index])
        return self._runs[index]

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[LoadedRun]:
        return iter(self._runs)

    def to_frame(self) -> Any:
        """Return the rows of all runs as a pandas DataFrame, with columns run, method and seed."""
        rows = []
        for run in self:
            seed = run.manifest["canonical"]["seed"]
            facts = {"run": run.folder.name, "method": run.method, "seed": seed}
            rows += [{**facts, **row} for row in run.history]
        return _frame(rows)

    def __repr__(self) -> str:
        return tables.as_text(*_table(self._runs))

    def _repr_html_(self) -> str:
        return tables.as_html(*_table(self._runs))


def load(folder: str | Path) -> LoadedRuns:
    """Return the runs under a folder that have played a round, in the order of their names.

    `folder` is the folder of a run, or one that holds such folders.
    """
    return LoadedRuns([LoadedRun(record) for record in find(Path(folder))])


def load_folders(folders: Sequence[Path]) -> LoadedRuns:
    """Return the runs in some folders, in this order."""
    return LoadedRuns([LoadedRun(read_record(folder)) for folder in folders])


def _table(runs: Sequence[LoadedRun]) -> tuple[list[str], list[list[str]], str]:
    target = next((run.target for run in runs if run.target is not None), None)
    lines = []
    for run in runs:
        seed = str(run.manifest["canonical"]["seed"])
        method, *numbers = tables.cells(run.method, run.history, target)
        lines.append([method, seed, *numbers])
    history = runs[0].history if runs else []
    method, *others = tables.headings(target, tables.metric_of(history))
    note = tables.caption(history) if runs else ""
    return [method, "seed", *others], lines, note


def _frame(rows: Sequence[dict[str, Any]]) -> Any:
    """Return rows as a DataFrame. Quantities of the theory become columns `diagnostics/NAME`."""
    try:
        import pandas
    except ModuleNotFoundError as error:
        if error.name != "pandas":
            raise
        raise InputError("to_frame() needs pandas: pip install pandas") from None
    flat = []
    for row in rows:
        theory = row.get("diagnostics", {})
        plain = {key: value for key, value in row.items() if key != "diagnostics"}
        flat.append({**plain, **{f"diagnostics/{key}": value for key, value in theory.items()}})
    return pandas.DataFrame(flat)
