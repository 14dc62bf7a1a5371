"""Texts as rows of characters, with their vocabulary.

Number 0 of a vocabulary is padding; it is written as the empty text.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from feddkd.data.batches import Indices
from feddkd.tasks.task import IGNORED


class Rows(NamedTuple):
    """Rows of characters and the characters that follow them."""

    x: Tensor  # (N, length)
    y: Tensor  # (N, length); -100 where no character follows
    texts: Indices  # the number of the text that each row is from


def vocabulary(texts: Iterable[str]) -> tuple[str, ...]:
    """Return the characters of texts in order, after the padding."""
    return ("", *sorted(set().union(*texts)))


def encoded(texts: Sequence[str], characters: Sequence[str], length: int) -> Tensor:
    """Return the first `length` characters of each text as numbers, padded with 0."""
    numbers = {character: number for number, character in enumerate(characters)}
    rows = np.zeros((len(texts), length), np.int64)
    for row, text in zip(rows, texts, strict=True):
        row[: min(len(text), length)] = [numbers[character] for character in text[:length]]
    return torch.from_numpy(rows)


def next_characters(texts: Sequence[str], characters: Sequence[str], length: int) -> Rows:
    """Return texts in rows of `length` characters, each with the one that follows it.

    A text is cut into rows that overlap in no target. A text with fewer than two characters, which
    has no target, is left out.
    """
    pieces, origin = [], []
    for number, text in enumerate(texts):
        for start in range(0, len(text) - 1, length):
            pieces.append(text[start : start + length + 1])
            origin.append(number)
    tokens = encoded(pieces, characters, length + 1)
    x, y = tokens[:, :-1].clone(), tokens[:, 1:]
    y = torch.where(y == 0, IGNORED, y)
    x[y == IGNORED] = 0  # a character that nothing follows is no input
    return Rows(x, y, np.array(origin, np.int64))
