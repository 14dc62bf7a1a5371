"""A compact copy of what some experiments read of a data source, for machines that do not have the
originals.

NAME-DIGEST.json     which source, all labels, and the pieces with their checksums
NAME-DIGEST-00.npz   so many images as fit into a piece, and their positions

Images that no experiment reads are left out, but every label is there, so that validation sets and
partitions come out the same; the copy carries the digest of the original.
"""

import functools
import hashlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from feddkd.data.batches import Indices
from feddkd.data.examples import Data, Examples
from feddkd.data.sources.registry import Source
from feddkd.errors import InputError

FORMAT = 1
PIECE = 60 * 2**20  # bytes of a piece at most
IMAGES = 20_000  # in a piece at first; fewer where they do not compress enough


def pack(
    data: Data, source: Source, train: Indices, test: Indices, folder: Path, piece: int = PIECE
) -> list[Path]:
    """Write the images at these positions of the training and test sets. Returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{data.name}-{data.digest[:12]}"
    pieces: list[dict[str, Any]] = []
    for side, part, used in (("train", data.train, train), ("test", data.test, test)):
        for at, content in _pieces(part, used, piece):
            name = f"{stem}-{len(pieces):02d}.npz"
            (folder / name).write_bytes(content)
            pieces.append(
                {
                    "file": name,
                    "side": side,
                    "images": at,
                    "sha256": hashlib.sha256(content).hexdigest(),
                }
            )
    page = {
        "format": FORMAT,
        "source": source.canonical,
        "digest": data.digest,
        "name": data.name,
        "classes": data.classes,
        "labels": data.labels,
        "scale": data.scale,
        "domains": data.domains,
        "note": data.note,
        "pieces": pieces,
        "train": _described(data.train),
        "test": _described(data.test),
    }
    (folder / f"{stem}.json").write_text(json.dumps(page) + "\n", encoding="utf-8")
    return [folder / f"{stem}.json", *(folder / entry["file"] for entry in pieces)]


def _pieces(part: Examples, used: Indices, most: int) -> list[tuple[int, bytes]]:
    used, size, found = np.unique(used), IMAGES, []
    while len(used):
        at = used[:size]
        buffer = io.BytesIO()
        np.savez_compressed(buffer, at=at, x=part.x[torch.from_numpy(at)].numpy())
        if len(buffer.getvalue()) > most:
            if size == 1:
                raise InputError(
                    f"a single image takes {len(buffer.getvalue())} bytes, more than a piece of"
                    f" {most} may"
                )
            size //= 2
            continue
        found.append((len(at), buffer.getvalue()))
        used = used[size:]
    return found


def _described(part: Examples) -> dict[str, Any]:
    domain = None if part.domain is None else part.domain.tolist()
    return {
        "shape": list(part.x.shape),
        "dtype": str(part.x.dtype),
        "y": part.y.tolist(),
        "domain": domain,
    }


def unpack(source: Source, folder: Path | None) -> Data | None:
    """The packed copy of a source in a folder, if there is one."""
    for path in sorted(folder.glob("*.json")) if folder is not None and folder.is_dir() else ():
        page = _page(path)
        if page is not None and page["source"] == source.canonical:
            return _read(path, page)
    return None


def _page(path: Path) -> dict[str, Any] | None:
    """What a JSON file says, if it is one of ours."""
    try:
        page = json.loads(path.read_text(encoding="utf-8"))
        return (
            page if isinstance(page, dict) and {"format", "source", "pieces"} <= set(page) else None
        )
    except (OSError, ValueError):
        return None


def _read(path: Path, page: dict[str, Any]) -> Data:
    if page["format"] != FORMAT:
        raise InputError(
            f"{path} was packed by another feddkd (format {page['format']}, known: {FORMAT})"
        )
    sides = {side: _empty(page[side]) for side in ("train", "test")}
    held: dict[str, list[Indices]] = {"train": [], "test": []}
    for entry in page["pieces"]:
        piece = _load(path.parent / entry["file"], entry["sha256"])
        sides[entry["side"]].x[torch.from_numpy(piece["at"])] = torch.from_numpy(piece["x"])
        held[entry["side"]].append(piece["at"])
    train, test = (
        np.sort(np.concatenate([*held[side], np.arange(0)])) for side in ("train", "test")
    )
    data = Data(
        page["name"],
        sides["train"],
        sides["test"],
        page["classes"],
        tuple(page["labels"]),
        page["scale"],
        tuple(page["domains"]),
        page["note"],
        held=(train, test),
    )
    # of the original: this copy has holes where nobody looks
    data.__dict__["digest"] = page["digest"]
    return data


def _empty(described: dict[str, Any]) -> Examples:
    x = torch.zeros(
        described["shape"], dtype=getattr(torch, described["dtype"].removeprefix("torch."))
    )
    domain = described["domain"]
    return Examples(
        x, torch.tensor(described["y"]), None if domain is None else torch.tensor(domain)
    )


def _load(path: Path, sha256: str) -> dict[str, np.ndarray[Any, Any]]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"the packed copy lacks a piece: {error}") from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise InputError(f"the piece {path} of a packed copy is damaged: its checksum does not fit")
    with np.load(io.BytesIO(content), allow_pickle=False) as found:
        return {name: found[name] for name in ("at", "x")}


def used(data: Data, parts: Sequence[Indices]) -> tuple[Indices, Indices]:
    """Positions in a federation's store -> positions in the training and in the test set."""
    every = functools.reduce(np.union1d, parts, np.arange(0))
    return every[every < len(data.train)], every[every >= len(data.train)] - len(data.train)


def check_held(data: Data, parts: Sequence[Indices]) -> None:
    """A packed copy has all the images that are going to be read."""
    if data.held is None:
        return
    for side, wanted, held in zip(("training", "test"), used(data, parts), data.held, strict=True):
        if missing := len(np.setdiff1d(wanted, held)):
            raise InputError(
                f"the packed copy of {data.name!r} lacks {missing} {side} images that this"
                " experiment reads: pack it again"
            )
