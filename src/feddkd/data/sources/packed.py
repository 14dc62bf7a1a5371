"""Packed copies: the part of a data source that some experiments read, for other machines.

NAME-DIGEST.json     the source, all labels, and the pieces with their checksums
NAME-DIGEST-00.npz   a piece: some images and their positions

Images that no experiment reads are left out. All labels are kept, so that validation sets and
partitions are the same as with the original. The copy has the digest of the original.
"""

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
from feddkd.trees import kind_in_words

FORMAT = 1
PIECE = 60 * 2**20  # bytes in a piece, at most
IMAGES = 20_000  # images in a piece, at most; fewer if they do not compress enough


def pack(
    data: Data, source: Source, train: Indices, test: Indices, folder: Path, piece: int = PIECE
) -> list[Path]:
    """Write the images at these positions of the training and test sets; return the files."""
    for tree in (data.train.x, data.train.y):
        if not isinstance(tree, torch.Tensor):
            raise InputError(
                f"data {data.name!r} have {kind_in_words(tree)} in each example, and only examples"
                " of one tensor can be packed: copy their file"
            )
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{data.name}-{data.digest[:12]}"
    pieces: list[dict[str, Any]] = []
    for side, part, used in (("train", data.train, train), ("test", data.test, test)):
        for images, content in _pieces(part, used, piece):
            name, sha256 = f"{stem}-{len(pieces):02d}.npz", hashlib.sha256(content).hexdigest()
            (folder / name).write_bytes(content)
            pieces.append({"file": name, "side": side, "images": images, "sha256": sha256})
    contents = {
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
    (folder / f"{stem}.json").write_text(json.dumps(contents) + "\n", encoding="utf-8")
    return [folder / f"{stem}.json", *(folder / entry["file"] for entry in pieces)]


def _pieces(part: Examples, used: Indices, most: int) -> list[tuple[int, bytes]]:
    """Return the number of images and the content of each piece; `most` is its size in bytes."""
    left, size, pieces = np.unique(used), IMAGES, []
    while len(left):
        positions = left[:size]
        buffer = io.BytesIO()
        np.savez_compressed(buffer, at=positions, x=part.x[torch.from_numpy(positions)].numpy())
        content = buffer.getvalue()
        if len(content) <= most:
            pieces.append((len(positions), content))
            left = left[size:]
        elif size > 1:
            size //= 2
        else:
            raise InputError(
                f"a single image takes {len(content)} bytes, more than a piece may hold ({most})"
            )
    return pieces


def _described(part: Examples) -> dict[str, Any]:
    domain = None if part.domain is None else part.domain.tolist()
    return {
        "shape": list(part.x.shape),
        "dtype": str(part.x.dtype),
        "y": part.y.tolist(),
        "domain": domain,
        "group": None if part.group is None else part.group.tolist(),
    }


def unpack(source: Source, folder: Path | None) -> Data | None:
    """Return the packed copy of a source in a folder, or None if there is none."""
    if folder is None or not folder.is_dir():
        return None
    for path in sorted(folder.glob("*.json")):
        contents = _contents(path)
        if contents is not None and contents["source"] == source.canonical:
            return _read(path, contents)
    return None


def _contents(path: Path) -> dict[str, Any] | None:
    """Return the contents of the JSON file of a packed copy; None if it is another file."""
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    packed = isinstance(contents, dict) and {"format", "source", "pieces"} <= set(contents)
    return contents if packed else None


def _read(path: Path, contents: dict[str, Any]) -> Data:
    if contents["format"] != FORMAT:
        raise InputError(
            f"{path} was packed by another version of feddkd: its format is {contents['format']},"
            f" this version reads {FORMAT}"
        )
    sides = {side: _empty(contents[side]) for side in ("train", "test")}
    held: dict[str, list[Indices]] = {"train": [np.arange(0)], "test": [np.arange(0)]}
    for entry in contents["pieces"]:
        piece = _load(path.parent / entry["file"], entry["sha256"])
        sides[entry["side"]].x[torch.from_numpy(piece["at"])] = torch.from_numpy(piece["x"])
        held[entry["side"]].append(piece["at"])
    data = Data(
        contents["name"],
        sides["train"],
        sides["test"],
        contents["classes"],
        tuple(contents["labels"]),
        contents["scale"],
        tuple(contents["domains"]),
        contents["note"],
        held=(np.sort(np.concatenate(held["train"])), np.sort(np.concatenate(held["test"]))),
    )
    # the digest of the original: in this copy the images that no experiment reads are zeros
    data.__dict__["digest"] = contents["digest"]
    return data


def _empty(described: dict[str, Any]) -> Examples:
    dtype = getattr(torch, described["dtype"].removeprefix("torch."))
    x, y = torch.zeros(described["shape"], dtype=dtype), torch.tensor(described["y"])
    domain = described["domain"]
    group = described.get("group")  # older copies have none
    return Examples(
        x,
        y,
        None if domain is None else torch.tensor(domain),
        group=None if group is None else np.array(group),
    )


def _load(path: Path, sha256: str) -> dict[str, np.ndarray[Any, Any]]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"a piece of the packed copy cannot be read: {error}") from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise InputError(f"the piece {path} of a packed copy is damaged: its checksum is wrong")
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in ("at", "x")}


def used(data: Data, parts: Sequence[Indices]) -> tuple[Indices, Indices]:
    """Return the positions in the training and in the test set that a federation's lists hold."""
    every = np.unique(np.concatenate([np.arange(0), *parts]))
    return every[every < len(data.train)], every[every >= len(data.train)] - len(data.train)


def check_held(data: Data, parts: Sequence[Indices]) -> None:
    """Raise an InputError if a packed copy lacks images that an experiment will read."""
    if data.held is None:
        return
    for side, wanted, held in zip(("training", "test"), used(data, parts), data.held, strict=True):
        if missing := len(np.setdiff1d(wanted, held)):
            raise InputError(
                f"the packed copy of {data.name!r} lacks {missing} {side} images that this"
                " experiment reads: pack it again with this experiment"
            )
