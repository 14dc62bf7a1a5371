"""A run halted between two rounds, on disk, so that it can go on later with the same numbers.

checkpoints/round-000040.safetensors   the server's state and the clients' memos
checkpoints/round-000040.json          everything else, and the checksum of the tensors; there only once both are whole

Randomness needs no saving: every draw is a function of its key. The last two are kept, so that runs
killed between the writing of one seed's and the next one's still find a round that all of them
have.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from feddkd.errors import InputError
from feddkd.rounds.costs import Costs
from feddkd.simulation import Snapshot
from feddkd.tensors import Groups

FORMAT = 1
KEPT = 2
FOLDER = "checkpoints"


class DamagedError(InputError):
    """A checkpoint that does not fit its checksum."""


def write(folder: Path, digest: str, snapshot: Snapshot) -> None:
    """Write one checkpoint of the run in `folder`, then forget all but the last few."""
    place = folder / FOLDER
    place.mkdir(exist_ok=True)
    tensors: dict[str, Tensor] = {}
    page = {
        "format": FORMAT,
        "digest": digest,
        "round": snapshot.round,
        "costs": asdict(snapshot.costs),
        "engine": snapshot.engine,
        "state": _index(
            {name: group for name, group in snapshot.state.items() if name != "start"}, tensors
        ),
        "memos": {str(client): _index(memo, tensors) for client, memo in snapshot.memos.items()},
    }
    content = save(tensors)
    page["tensors"] = hashlib.sha256(content).hexdigest()
    stem = place / f"round-{snapshot.round:06d}"
    put(stem.with_suffix(".safetensors"), content)
    put(stem.with_suffix(".json"), signed(page))
    for old in rounds(folder)[:-KEPT]:
        for suffix in (".json", ".safetensors"):  # in this order: tensors alone count for nothing
            (place / f"round-{old:06d}").with_suffix(suffix).unlink(missing_ok=True)


def signed(page: Mapping[str, Any]) -> bytes:
    """A page as JSON, with its own checksum."""
    return json.dumps({"page": page, "checksum": _checksum(page)}).encode()


def _checksum(page: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(page, sort_keys=True).encode()).hexdigest()


def _index(groups: Groups, tensors: dict[str, Tensor]) -> dict[str, dict[str, str]]:
    """The groups with the number of a tensor in place of each tensor; the tensors go to `tensors`."""
    page: dict[str, dict[str, str]] = {}
    for group, own in groups.items():
        page[group] = {}
        for name, tensor in own.items():
            number = page[group][name] = str(len(tensors))
            tensors[number] = tensor.detach().to("cpu", copy=True).contiguous()
    return page


def put(path: Path, content: bytes) -> None:
    """Whole or not at all, also when the power fails."""
    part = path.with_suffix(path.suffix + ".part")
    with part.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def rounds(folder: Path) -> list[int]:
    """The rounds of which a run's folder holds checkpoints, ascending."""
    return sorted(
        int(path.stem.removeprefix("round-")) for path in (folder / FOLDER).glob("round-*.json")
    )


def read(folder: Path, digest: str, round: int, device: torch.device) -> Snapshot:
    stem = folder / FOLDER / f"round-{round:06d}"
    try:
        found = json.loads(stem.with_suffix(".json").read_text(encoding="utf-8"))
        page = found["page"]
        if found["checksum"] != _checksum(page):
            raise DamagedError(f"the checkpoint {stem}.json is damaged: its checksum does not fit")
        if page["format"] > FORMAT:
            raise InputError(
                f"the checkpoint {stem}.json was written by a newer feddkd (format {page['format']}, known: {FORMAT})"
            )
        if page["digest"] != digest:
            raise InputError(
                f"the checkpoint {stem}.json belongs to another experiment ({page['digest'][:12]}, not {digest[:12]})"
            )
        content = stem.with_suffix(".safetensors").read_bytes()
        if hashlib.sha256(content).hexdigest() != page["tensors"]:
            raise DamagedError(
                f"the checkpoint {stem}.safetensors is damaged: its checksum does not fit"
            )
        tensors = {name: tensor.to(device) for name, tensor in load(content).items()}

        def groups(index: Mapping[str, Mapping[str, str]]) -> Groups:
            return {
                group: {name: tensors[number] for name, number in own.items()}
                for group, own in index.items()
            }

        memos = {int(client): groups(memo) for client, memo in page["memos"].items()}
        return Snapshot(
            page["round"], groups(page["state"]), Costs(**page["costs"]), memos, page["engine"]
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        raise DamagedError(f"the checkpoint {stem}.json is damaged: {error!r}") from None


def remove(folder: Path) -> None:
    """A finished run needs none."""
    for path in (folder / FOLDER).glob("round-*"):
        path.unlink()
    if (folder / FOLDER).is_dir():
        (folder / FOLDER).rmdir()


class Writer:
    """Writes checkpoints beside the training, one at a time."""

    def __init__(self) -> None:
        self._hand = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._last: Future[None] | None = None

    def submit(self, work: Callable[[], None]) -> None:
        self.wait()
        self._last = self._hand.submit(work)

    def wait(self) -> None:
        """Until everything is on disk; an error of the writing is raised here."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def close(self) -> None:
        self._hand.shutdown(wait=True)
