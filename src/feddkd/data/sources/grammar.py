"""Small texts by a fixed grammar, so that a language model can be tried without any file.

Each speaker chooses among words and sentence forms with its own weights. The weights and all
draws are whole numbers, so the texts are the same on every machine.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import torch

from feddkd.data.batches import Indices
from feddkd.data.examples import Data, Examples, from_arrays
from feddkd.data.sources.registry import SOURCES, Source
from feddkd.randomness import generator
from feddkd.spec.types import Bound

CHARACTERS = " .abcdefghijklmnopqrstuvwxyz"
# Each part of a sentence and its forms. A form is a row of parts and words; a text in capital
# letters is a part.
RULES = {
    "SENTENCE": (
        "ONE SINGS .",
        "MANY SING .",
        "PLACE ONE SINGS .",
        "PLACE MANY SING .",
        "ONE says that MANY SING .",
        "MANY know that ONE SINGS .",
    ),
    "ONE": ("a NOUN", "the NOUN", "the ADJECTIVE NOUN", "a NOUN with a ADJECTIVE THING"),
    "MANY": ("the NOUN s", "two NOUN s", "many ADJECTIVE NOUN s", "all NOUN s"),
    "SINGS": ("sings", "VERB s ONE", "VERB s MANY", "VERB s the THING", "sings PLACE"),
    "SING": ("sing", "VERB ONE", "VERB MANY", "VERB the THING", "sing PLACE"),
    "NOUN": ("bird", "cat", "dog", "farmer", "girl", "king", "miller", "sailor"),
    "VERB": ("follow", "greet", "hear", "help", "love", "need", "paint", "want"),
    "THING": ("boat", "bridge", "crown", "flute", "garden", "lamp", "mill", "river"),
    "ADJECTIVE": ("big", "brave", "clever", "green", "happy", "quiet", "small", "young"),
    "PLACE": ("at the mill", "by the river", "in the garden", "near the bridge", "on the boat"),
}


@SOURCES.register
def grammar(
    speakers: Annotated[int, Bound(least=1, most=10_000)] = 20,
    lines: Annotated[int, Bound(least=2, most=10_000)] = 50,
    length: Annotated[int, Bound(least=1, most=1_000)] = 32,
    skew: Annotated[int, Bound(least=0, most=8)] = 2,
) -> Source:
    """Texts of several speakers, as rows of characters, for the task `language`.

    Each speaker has `lines` rows of `length` characters; the last fifth are test examples. The
    target of a character is the one that follows it. A speaker's weight of each word and form is a
    draw from 1..9 to the power `skew`: with 0 all speakers are alike. Speakers are the domains, so
    partition = "owners()" makes a client of each.
    """

    def load(root: Path | None) -> Data:
        rows = np.stack([_rows(speaker, lines, length, skew) for speaker in range(speakers)])
        tested = max(1, lines // 5)
        names = tuple(f"speaker {speaker}" for speaker in range(speakers))
        return from_arrays(
            _examples(rows[:, :-tested]),
            _examples(rows[:, -tested:]),
            name="grammar",
            labels=tuple(CHARACTERS),
            domains=names,
            class_labels=False,
        )

    summary = "texts of 20 speakers by a fixed grammar, 28 characters; no files needed"
    return Source(load, (), "made by a fixed grammar", "normalise(mean=0.0, std=1.0)", summary)


def _examples(rows: Indices) -> Examples:
    """Return rows, (speakers, lines, length + 1), as characters and the ones that follow them."""
    tokens = torch.from_numpy(rows.reshape(-1, rows.shape[2]))
    speakers = torch.arange(len(rows)).repeat_interleave(rows.shape[1])
    return Examples(tokens[:, :-1], tokens[:, 1:], speakers)


def _rows(speaker: int, lines: int, length: int, skew: int) -> Indices:
    """Return a speaker's text as numbers, (lines, length + 1)."""
    needed, text = lines * (length + 1), ""
    sentences = _sentences(speaker, skew)
    while len(text) < needed:
        text += next(sentences) + " "
    codes = np.array([CHARACTERS.index(character) for character in text[:needed]])
    return codes.reshape(lines, length + 1)


def _sentences(speaker: int, skew: int) -> Iterator[str]:
    """Yield sentences of a speaker without end."""
    random = generator(("grammar", speaker, skew))
    sums = {part: np.cumsum(random.integers(1, 10, len(RULES[part])) ** skew) for part in RULES}

    def words(part: str) -> str:
        if part not in RULES:
            return part
        drawn = random.integers(sums[part][-1])
        form = RULES[part][np.searchsorted(sums[part], drawn, side="right")]
        return " ".join(map(words, form.split()))

    while True:
        yield words("SENTENCE").replace(" s ", "s ").replace(" .", ".")
