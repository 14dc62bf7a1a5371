"""Splits: who holds which examples, with a digest, in memory and in a file."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from feddkd.data.batches import Indices
from feddkd.data.index_lists import IndexLists
from feddkd.errors import InputError


@dataclass(frozen=True, eq=False)
class Split:
    """The examples of each client, as positions in the training set.

    A partition with test sets also gives positions in the test set.
    """

    train: Sequence[Indices]
    # each client's own test examples; None: every client is tested on all test examples
    test: Sequence[Indices] | None
    text: str  # canonical text of the partition that made it

    @property
    def digest(self) -> str:
        """The sha256 over all lists in order.

        It does not depend on the partition's text, so a saved split keeps its digest.
        """
        digest = hashlib.sha256()
        for lists in (self.train, self.test):
            held = IndexLists.of(lists or ())
            sizes = [-1] if lists is None else [len(held), *held.sizes]
            for array in (np.array(sizes), held.values):
                digest.update(array.astype("<i8").tobytes())
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        """Write the split as an .npz file, in full or not at all."""
        arrays = {"text": np.array(self.text), "digest": np.array(self.digest)}
        for name, lists in (("train", self.train), ("test", self.test)):
            if lists is not None:
                held = IndexLists.of(lists)
                arrays[name], arrays[f"{name}_sizes"] = held.values, held.sizes
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with unfinished.open("wb") as file:
                np.savez(file, allow_pickle=False, **arrays)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path) -> "Split":
        """Return the split in a file that `save` wrote."""
        try:
            with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                arrays = dict(file)
            test = _unpack(arrays, "test") if "test" in arrays else None
            split = cls(_unpack(arrays, "train"), test, str(arrays["text"]))
            digest = str(arrays["digest"])
        # numpy and zipfile raise a dozen kinds of exception for damaged files
        except Exception as error:
            # numpy's own message explains how to allow pickles, which would run the file's code
            reason = "it holds no lists" if "pickle" in str(error) else error
            raise InputError(f"cannot read a saved partition from {path}: {reason}") from error
        if digest != split.digest:
            raise InputError(
                f"the saved partition {path} is damaged: its lists do not have its digest"
            )
        return split


def _unpack(arrays: dict[str, Indices], name: str) -> IndexLists:
    return IndexLists(arrays[name], arrays[f"{name}_sizes"])
