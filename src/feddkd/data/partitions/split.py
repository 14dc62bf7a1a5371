"""Splits: who holds which examples, with a digest, in memory and in a file."""

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from feddkd.data.batches import Indices
from feddkd.data.index_lists import IndexLists
from feddkd.errors import InputError

PARTS = ("train", "test", "validation")


@dataclass(frozen=True, eq=False)
class Split:
    """The examples of each client, as positions in the training set.

    A partition with test sets also gives positions in the test set.
    """

    train: Sequence[Indices]
    # each client's own test examples; None: every client is tested on all test examples
    test: Sequence[Indices] | None
    text: str  # canonical text of the partition that made it
    # each client's own validation examples, as positions in the training set, if they are divided
    validation: Sequence[Indices] | None = None
    changed: str = ""  # how the clients' examples are changed, with the key of the draws

    @property
    def digest(self) -> str:
        """The sha256 over all lists in order, and over the changes of examples.

        It does not depend on the partition's text, so a saved split keeps its digest.
        """
        digest = hashlib.sha256(self.changed.encode())
        parts = [self.train, self.test, *([] if self.validation is None else [self.validation])]
        for lists in parts:
            held = IndexLists.of(lists or ())
            sizes = [-1] if lists is None else [len(held), *held.sizes]
            for array in (np.array(sizes), held.values):
                digest.update(array.astype("<i8").tobytes())
        return digest.hexdigest()

    def save(self, path: Path) -> None:
        """Write the lists as an .npz file, in full or not at all."""
        digest = replace(self, changed="").digest
        arrays = {"text": np.array(self.text), "digest": np.array(digest)}
        for name in PARTS:
            lists = getattr(self, name)
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
            test, validation = (
                _unpack(arrays, name) if name in arrays else None for name in PARTS[1:]
            )
            split = cls(_unpack(arrays, "train"), test, str(arrays["text"]), validation)
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
