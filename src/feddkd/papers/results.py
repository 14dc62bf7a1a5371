"""Reads runs from two places: the compact results that are committed, and run folders.

Of two runs of one experiment the longer counts. A line of results/*.jsonl.gz is a run: {"manifest",
"seconds", "rounds"}; with many clients its rounds omit the accuracies of single clients.
"""

import gzip
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from feddkd.errors import InputError
from feddkd.experiment import Experiment
from feddkd.papers.definitions import Paper
from feddkd.rounds.loop import Row
from feddkd.runs.files import put
from feddkd.runs.record import find

FEW = 10  # clients whose accuracies are kept one by one
PLACES = ("--data", "--out", "--runs", "--papers")  # options that name a folder


@dataclass(frozen=True)
class RecordedRun:
    """The record of a run: its manifest, its seconds and its rows."""

    manifest: Mapping[str, Any]
    seconds: float
    rounds: list[Row]

    @cached_property
    def experiment(self) -> Experiment:
        return Experiment(**self.manifest["experiment"])

    @property
    def broke_off(self) -> bool:
        """True if the run ended early (for example by numbers that are not finite).

        It would end at the same round again.
        """
        return "ended" in self.manifest

    def reaches(self, rounds: int) -> bool:
        """Return True if the first `rounds` rounds are complete, or the run ended early."""
        return self.broke_off or len(self.rounds) >= rounds

    @property
    def worth(self) -> tuple[int, bool]:
        """The value that decides which of two runs of one experiment is kept: the longer one, then
        the one with diagnostics.
        """
        return len(self.rounds), all("diagnostics" in row for row in self.rounds)

    @property
    def line(self) -> str:
        """The run as a line of a results file."""
        content = {"manifest": self.manifest, "seconds": self.seconds, "rounds": self.rounds}
        return json.dumps(content) + "\n"


# keys: the experiments' digests, computed by this version, not read from folder names
Runs = dict[str, RecordedRun]


def recorded(paper: Paper, folder: Path | None = None) -> Runs:
    """Return the runs that are committed with the paper, and those in a folder, if one is given."""
    committed = [run for file in sorted(_results(paper).glob("*.jsonl.gz")) for run in _read(file)]
    return _longest([*committed, *_found(folder)])


def collect(paper: Paper, folder: Path) -> dict[str, tuple[int, int]]:
    """Add the runs of a folder to the results.

    Return for each results file how many runs it has now, and how many of them are new or longer.
    An experiment that stands in several files (calibrations have the experiments that they are
    compared with) is kept in the first file's results.
    """
    found, in_earlier_files, written = _longest(_found(folder)), set[str](), {}
    for name, experiments in paper.experiments.items():
        digests = {experiment.digest for experiment in experiments} - in_earlier_files
        in_earlier_files |= digests
        file = _results(paper) / f"{Path(name).stem}.jsonl.gz"
        before = _longest(_read(file)) if file.exists() else {}
        added = [run for digest, run in found.items() if digest in digests]
        after = _longest([*before.values(), *added])
        changed = sum(after[digest] is not before.get(digest) for digest in after)
        if changed:
            order = [experiment.digest for experiment in experiments if experiment.digest in after]
            _write(file, [after[digest] for digest in dict.fromkeys([*order, *after])])
        written[file.name] = len(after), changed
    return written


def foreign_runs(paper: Paper, folder: Path) -> int:
    """Return the number of runs in a folder that belong to none of the paper's files."""
    known = {
        experiment.digest
        for experiments in paper.experiments.values()
        for experiment in experiments
    }
    return len(_longest(_found(folder)).keys() - known)


def _results(paper: Paper) -> Path:
    return paper.folder / "results"


def _longest(runs: Iterable[RecordedRun]) -> Runs:
    kept: Runs = {}
    for run in runs:
        digest = run.experiment.digest
        if digest not in kept or run.worth > kept[digest].worth:
            kept[digest] = run
    return kept


def _found(folder: Path | None) -> list[RecordedRun]:
    if folder is None or not any(folder.rglob("manifest.json")):
        return []
    records = [record for record in find(folder, begun=True) if record.history]
    return [
        RecordedRun(
            _published(record.manifest),
            round(record.seconds, 3),
            [_compact(row) for row in record.history],
        )
        for record in records
    ]


def _published(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return a manifest without private facts: the folders on its command line, and the name of
    the machine's system.
    """
    bare = dict(manifest)
    if "command" in bare:
        bare["command"] = _command(bare["command"])
    if "hardware" in bare:
        bare["hardware"] = {
            key: value for key, value in bare["hardware"].items() if key != "system"
        }
    if "resumed" in bare:
        bare["resumed"] = [_published(turn) for turn in bare["resumed"]]
    return bare


def _command(words: Sequence[str]) -> list[str]:
    """Return a command line with DIR for folders, and only the names of files outside."""
    return ["feddkd", *(_argument(before, argument) for before, argument in pairwise(words))]


def _argument(before: str, argument: str) -> str:
    option, equals, _ = argument.partition("=")
    if before in PLACES or (equals and option in PLACES):
        return "DIR" if before in PLACES else f"{option}=DIR"
    return Path(argument).name if argument.startswith(("/", "..", "~")) else argument


def _compact(row: Row) -> Row:
    return {
        key: value
        for key, value in row.items()
        if not (key.endswith("client_accuracy") and len(value) > FEW)
    }


def _read(file: Path) -> list[RecordedRun]:
    try:
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            runs = [RecordedRun(**json.loads(line)) for line in lines]
        for run in runs:
            run.experiment  # noqa: B018  # an error here names the file
        return runs
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"the results in {file} cannot be read: {error}") from None


def _write(file: Path, runs: Iterable[RecordedRun]) -> None:
    """Write runs to a file; the same runs give the same bytes, without a time or a name."""
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", fileobj=packed, mode="wb", mtime=0) as out:
        for run in runs:
            out.write(run.line.encode())
    file.parent.mkdir(parents=True, exist_ok=True)
    put(file, packed.getvalue())
