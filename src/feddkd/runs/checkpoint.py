"""Checkpoints: a run between two rounds on disk, from where it continues with the same numbers.

checkpoints/round-000040.safetensors   the server's state and the clients' memos
checkpoints/round-000040.json          everything else, and the checksum of the tensors; it is
                                       written last, when both are complete

Random generators need no saving: every draw is a function of its key. The last two checkpoints are
kept: if runs in lock-step are killed after one of them was saved and before the next, there is
still a round of which all have a checkpoint.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from feddkd.errors import InputError
from feddkd.rounds.costs import Costs
from feddkd.runs.files import parsed, put
from feddkd.simulation import Snapshot
from feddkd.tensors import Groups

FORMAT = 1
KEPT = 2
FOLDER = "checkpoints"


class DamagedError(InputError):
    """A checkpoint differs from its checksum."""


def write(folder: Path, digest: str, snapshot: Snapshot) -> None:
    """Write a checkpoint of the run in `folder`, then remove all but the last few."""
    checkpoints = folder / FOLDER
    checkpoints.mkdir(exist_ok=True)
    tensors: dict[str, Tensor] = {}
    state = {name: group for name, group in snapshot.state.items() if name != "start"}
    content = {
        "format": FORMAT,
        "digest": digest,
        "round": snapshot.round,
        "costs": asdict(snapshot.costs),
        "engine": snapshot.engine,
        "state": _index(state, tensors),
        "memos": {str(client): _index(memo, tensors) for client, memo in snapshot.memos.items()},
    }
    saved = save(tensors)
    content["tensors"] = hashlib.sha256(saved).hexdigest()
    stem = checkpoints / f"round-{snapshot.round:06d}"
    put(stem.with_suffix(".safetensors"), saved)
    put(stem.with_suffix(".json"), signed(content))
    for old in rounds(folder)[:-KEPT]:
        remove_round(folder, old)


def signed(content: Mapping[str, Any]) -> bytes:
    """Return content as JSON, with its checksum."""
    return json.dumps({"page": content, "checksum": _checksum(content)}).encode()


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _index(groups: Groups, tensors: dict[str, Tensor]) -> dict[str, dict[str, str]]:
    """Return the groups with a number in place of each tensor, and put the tensors in `tensors`."""
    index: dict[str, dict[str, str]] = {}
    for group, members in groups.items():
        index[group] = {}
        for name, tensor in members.items():
            number = str(len(tensors))
            index[group][name] = number
            tensors[number] = tensor.detach().to("cpu", copy=True).contiguous()
    return index


def rounds(folder: Path) -> list[int]:
    """Return the rounds of which a run's folder has checkpoints, in order."""
    names = (path.stem for path in (folder / FOLDER).glob("round-*.json"))
    found = (re.fullmatch(r"round-(\d{6,})", name, re.ASCII) for name in names)  # not of copies
    return sorted(int(match[1]) for match in found if match)


def read(folder: Path, digest: str, round: int, device: torch.device) -> Snapshot:
    """Return the checkpoint of a round; raise DamagedError if it is damaged, InputError if it is of
    another experiment or version.
    """
    stem = folder / FOLDER / f"round-{round:06d}"
    try:
        return _read(stem, digest, device)
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DamagedError(f"the checkpoint {stem}.json is damaged: {error!r}") from None


def _read(stem: Path, digest: str, device: torch.device) -> Snapshot:
    page = parsed(stem.with_suffix(".json").read_bytes())
    content = page["page"]
    if page["checksum"] != _checksum(content):
        raise DamagedError(f"the checkpoint {stem}.json is damaged: its checksum differs")
    if content["format"] > FORMAT:
        raise InputError(
            f"the checkpoint {stem}.json was written by a newer feddkd"
            f" (format {content['format']}, known: {FORMAT})"
        )
    if content["digest"] != digest:
        raise InputError(
            f"the checkpoint {stem}.json belongs to another experiment"
            f" ({content['digest'][:12]}, not {digest[:12]})"
        )
    saved = stem.with_suffix(".safetensors").read_bytes()
    if hashlib.sha256(saved).hexdigest() != content["tensors"]:
        raise DamagedError(f"the checkpoint {stem}.safetensors is damaged: its checksum differs")
    tensors = {name: tensor.to(device) for name, tensor in load(saved).items()}

    def groups(index: Mapping[str, Mapping[str, str]]) -> Groups:
        result = {}
        for group, members in index.items():
            result[group] = {name: tensors[number] for name, number in members.items()}
        return result

    memos = {int(client): groups(memo) for client, memo in content["memos"].items()}
    costs = Costs(**content["costs"])
    return Snapshot(content["round"], groups(content["state"]), costs, memos, content["engine"])


def remove_round(folder: Path, round: int) -> None:
    """Remove the checkpoint of a round."""
    for suffix in (".json", ".safetensors"):  # in this order: tensors alone are no checkpoint
        path = (folder / FOLDER / f"round-{round:06d}").with_suffix(suffix)
        path.unlink(missing_ok=True)


def remove(folder: Path) -> None:
    """Remove all checkpoints: a finished run needs none."""
    for path in (folder / FOLDER).glob("round-*"):
        path.unlink()
    with suppress(OSError):  # it holds a file of another program
        (folder / FOLDER).rmdir()


class Writer:
    """Writes checkpoints in a separate thread, one after the other."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._last: Future[None] | None = None

    def submit(self, work: Callable[[], None]) -> None:
        """Start a write when the one before it is complete."""
        self.wait()
        self._last = self._thread.submit(work)

    def wait(self) -> None:
        """Wait until everything is on disk; raise the error of a write that failed."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def close(self) -> None:
        """Wait for the last write and end the thread."""
        self._thread.shutdown(wait=True)
