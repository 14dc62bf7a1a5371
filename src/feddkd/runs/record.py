"""The record of a run: a folder with a manifest, a line for each round, and the final tensors.

manifest.json      what was run: experiment, digests of data and partition, protocol, versions,
                   hardware. `engine` is a table (in old records of unfinished runs a text);
                   `made_by` is there if `simulate` made the record
rounds.jsonl       one line for each round, without times: byte by byte the same for two runs on one
                   engine and strategy
timings.jsonl      seconds of each round
partition.json     names of the classes, and how many training examples of each every client has
confusion.json     of the final model: how many test examples of a class (row) were taken for which
                   class (column)
summary.json       the numbers that people quote; there when the run is finished
final.safetensors  the final global tensors
private.safetensors  the tensors that clients keep; `simulate` writes it if there are any
seal.jsonl         the digests of all these files (seal.py); none in records of older versions
checkpoints/       while the run goes on: where it can be continued (checkpoint.py)
lock               while the run goes on: which process writes here
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from feddkd.errors import InputError
from feddkd.rounds.metrics import read_own
from feddkd.runs.damage import (
    TEXTS,
    WEIGHTS,
    check_contents,
    complete_lines,
    contents,
    raise_if_damaged,
)
from feddkd.runs.files import DamagedRunError, content_of, parsed
from feddkd.runs.seal import LINES, SEAL

if TYPE_CHECKING:  # to read records takes no torch
    from feddkd.experiment import Experiment

Row = dict[str, Any]


def folder_name(experiment: "Experiment") -> str:
    """Return the name of the folder of an experiment's run."""
    names = "-".join(call.name for call in experiment.parsed_method.calls)
    return f"{names}-seed{experiment.seed}-{experiment.digest[:12]}"


class Counts(NamedTuple):
    """Numbers of examples. The columns are classes, the rows clients or classes."""

    classes: list[str]
    counts: list[list[int]]


@dataclass(frozen=True)
class Record:
    """A run that was read from its folder."""

    folder: Path
    manifest: dict[str, Any]
    history: list[Row]
    timings: list[float]  # seconds of each round

    @property
    def seconds(self) -> float:
        """Seconds of all rounds."""
        return sum(self.timings)

    @cached_property
    def partition(self) -> Counts | None:
        """Examples by client and class; None in records from before it was kept."""
        return _counts(self.folder / "partition.json")

    @cached_property
    def confusion(self) -> Counts | None:
        """Test examples by class and predicted class; None if the run is not finished, or in
        records from before it was kept.
        """
        return _counts(self.folder / "confusion.json")

    @property
    def label(self) -> str:
        """The name of the run in tables."""
        spelled: dict[str, str] = self.manifest["experiment"]
        return spelled.get("name") or spelled["method"]

    @property
    def in_memory(self) -> bool:
        """True if `simulate` made the record, from data in memory."""
        return self.manifest.get("made_by") == "simulate"

    @property
    def experiment(self) -> "Experiment":
        """The experiment; an InputError if the record has none."""
        if self.in_memory:
            raise InputError(
                f"the run in {self.folder} was made by simulate() from data in memory: call"
                " simulate() again with the same arguments"
            )
        from feddkd.experiment import Experiment

        return Experiment(**self.manifest["experiment"])

    @property
    def finished(self) -> bool:
        """True if all rounds have been played."""
        return len(self.history) == int(self.manifest["canonical"]["rounds"])

    @property
    def over(self) -> bool:
        """True if all rounds have been played, or `on_round` ended the run."""
        return self.finished or "stopped" in self.manifest


def finished_summary(folder: Path, digest: str) -> dict[str, Any] | None:
    """Return the summary of the finished run with this digest; None if it is not in the folder."""
    summary = stored_summary(folder)
    if summary is None or summary.get("digest") != digest:
        return None
    return summary if (folder / "final.safetensors").exists() else None


def stored_summary(folder: Path) -> dict[str, Any] | None:
    """Return the content of summary.json; None if there is none."""
    try:
        return dict(parsed((folder / "summary.json").read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


class Survey(NamedTuple):
    """The runs under a folder: those that can be read, and an error for each that cannot."""

    records: list[Record]
    errors: list[InputError]


def survey(folder: Path, begun: bool = False, weights: bool = False) -> Survey:
    """Return the runs under a folder that have played a round, in the order of their names.

    With `begun`, also runs that have not; with `weights`, the tensors are checked for damage, too.
    Raise an InputError if there is no run at all.
    """
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}")
    chosen, errors = list[Record](), list[InputError]()
    for place in run_folders(folder):
        try:
            record = read_record(place, weights)
        except InputError as error:
            errors.append(error)
            continue
        if begun or record.history:
            chosen.append(record)
    if not chosen and not errors:
        raise InputError(
            f"no runs under {folder}; `feddkd run FILE.toml --out {folder}` makes some"
        )
    return Survey(chosen, errors)


def run_folders(folder: Path) -> list[Path]:
    """Return the folders of runs under a folder; also those that have lost their manifest.

    A run that was killed before it had a manifest has no rows either.
    """
    whole = {path.parent for path in folder.rglob("manifest.json")}
    lost = {path.parent for path in folder.rglob(SEAL)} - whole
    return sorted(whole | {place for place in lost if content_of(place / LINES[0])})


def find(folder: Path, begun: bool = False) -> list[Record]:
    """Return the runs of a survey; raise an InputError if one of them cannot be read."""
    found = survey(folder, begun)
    if found.errors:
        raise found.errors[0]
    return found.records


def read_record(folder: Path, weights: bool = False) -> Record:
    """Return the record in a folder; raise an InputError if it is damaged or cannot be read."""
    try:
        return _read_whole(folder, weights)
    except InputError:
        if not (folder / "lock").exists():
            raise
        return _read_whole(folder, weights)  # its writer replaced a file in between


def _read_whole(folder: Path, weights: bool) -> Record:
    try:
        found = contents(folder, (*TEXTS, *WEIGHTS) if weights else TEXTS)
        raise_if_damaged(folder, check_contents(folder, found))
        if "manifest.json" not in found:
            raise DamagedRunError(f"the run in {folder} is damaged: manifest.json is missing")
        manifest = parsed(found["manifest.json"])
        read_own(manifest.get("own_metrics", ()))
        history, timings = (_rows(found.get(name, b"")) for name in LINES)
        record = Record(folder, manifest, history, [line["seconds"] for line in timings])
        _ = record.label, record.finished, manifest["family"], manifest["protocol"]["test_accuracy"]
        return record
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"the run in {folder} cannot be read: {error!r}") from None


def _counts(path: Path) -> Counts | None:
    try:
        content = parsed(path.read_bytes())
        return Counts(content["classes"], content["counts"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} cannot be read: {error!r}") from None


def _rows(content: bytes) -> list[dict[str, Any]]:
    return [parsed(line) for line in complete_lines(content)]
