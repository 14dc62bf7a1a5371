"""Runs from two places: the compact results that are committed, and run folders. The longer of two
of one experiment counts.

A line of results/*.jsonl.gz is a run: {"manifest", "seconds", "rounds"}, its rounds without the
accuracies of single clients where there are many.
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
from feddkd.runs import checkpoint
from feddkd.runs.record import find

FEW = 10  # clients whose accuracies are kept one by one
PLACES = ("--data", "--out", "--runs", "--papers")  # options that name a folder


@dataclass(frozen=True)
class RecordedRun:
    """What is left of a run: what it was, how long it took, its rows."""

    manifest: Mapping[str, Any]
    seconds: float
    rounds: list[Row]

    @cached_property
    def experiment(self) -> Experiment:
        return Experiment(**self.manifest["experiment"])

    @property
    def broke_off(self) -> bool:
        """It could not go on (its numbers were no longer finite, say), and would end there again."""
        return "ended" in self.manifest

    def reaches(self, rounds: int) -> bool:
        """There is no more of its first so many rounds to be had."""
        return self.broke_off or len(self.rounds) >= rounds

    @property
    def worth(self) -> tuple[int, bool]:
        """By which one of two runs of one experiment is kept: the longer, and of equally long ones
        that with diagnostics.
        """
        return len(self.rounds), all("diagnostics" in row for row in self.rounds)

    @property
    def line(self) -> str:
        return (
            json.dumps({"manifest": self.manifest, "seconds": self.seconds, "rounds": self.rounds})
            + "\n"
        )


# by the digest of the experiment as it is read today, whatever the folder was called
Runs = dict[str, RecordedRun]


def recorded(paper: Paper, folder: Path | None = None) -> Runs:
    """All runs known of: those committed with the paper, and those in a folder, if there is one."""
    committed = [run for file in sorted(_results(paper).glob("*.jsonl.gz")) for run in _read(file)]
    return _longest([*committed, *_found(folder)])


def collect(paper: Paper, folder: Path) -> dict[str, tuple[int, int]]:
    """Put run folders into the results, beside what is there. By file: runs in it now, and how many
    are new or longer.

    An experiment that several files have, as calibrations have what they are compared with, is kept
    in the first one's results.
    """
    found, elsewhere, written = _longest(_found(folder)), set[str](), {}
    for name, experiments in paper.experiments.items():
        own = {one.digest for one in experiments} - elsewhere
        elsewhere |= own
        file = _results(paper) / f"{Path(name).stem}.jsonl.gz"
        before = _longest(_read(file)) if file.exists() else {}
        after = _longest(
            [*before.values(), *(run for digest, run in found.items() if digest in own)]
        )
        news = sum(after[digest] is not before.get(digest) for digest in after)
        if news:
            order = [one.digest for one in experiments if one.digest in after]
            _write(file, [after[digest] for digest in dict.fromkeys([*order, *after])])
        written[file.name] = len(after), news
    return written


def strangers(paper: Paper, folder: Path) -> int:
    """How many runs of a folder belong to none of the paper's files."""
    own = {one.digest for experiments in paper.experiments.values() for one in experiments}
    return len(_longest(_found(folder)).keys() - own)


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
    """A manifest without what is nobody's business: the folders on its command line, and the system
    of the machine.
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


def _command(spoken: Sequence[str]) -> list[str]:
    """A command line as anybody can give it: DIR for folders, and of a file elsewhere its name."""
    return ["feddkd", *(_argument(before, argument) for before, argument in pairwise(spoken))]


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
            run.experiment  # noqa: B018  # complain now, with the file's name
        return runs
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"the results in {file} cannot be read: {error}") from None


def _write(file: Path, runs: Iterable[RecordedRun]) -> None:
    """The same runs make the same bytes: no time of writing, no name."""
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", fileobj=packed, mode="wb", mtime=0) as out:
        for run in runs:
            out.write(run.line.encode())
    file.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.put(file, packed.getvalue())
