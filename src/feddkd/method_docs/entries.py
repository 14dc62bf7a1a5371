"""Facts about methods for lists and pages, as plain values."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

PACKAGE = "feddkd.methods."
PRIVATE = {
    "names": "the tensors that are named",
    "statistics": "batch norm's running statistics",
    "norm": "batch-norm layers",
    "head": "the head",
    "body": "all but the head",
    "model": "its whole model",
    "unsent": "what it has not sent yet",
}


@dataclass(frozen=True)
class Citation:
    """A paper."""

    name: str
    authors: str
    title: str
    venue: str
    number: str  # arXiv:... or doi:...

    def __str__(self) -> str:
        venue = f"{self.venue}, " if self.venue else ""
        return f'{self.authors}, "{self.title}", {venue}{self.number}'

    @property
    def link(self) -> str:
        kind, _, number = self.number.partition(":")
        return f"https://arxiv.org/abs/{number}" if kind == "arXiv" else f"https://doi.org/{number}"


@dataclass(frozen=True)
class MethodOption:
    """One option of a method."""

    name: str
    default: Any  # `...` where there is none
    takes: str  # its values in words
    shared: str  # "local training" or "gathering" if many methods take it, else ""

    def __str__(self) -> str:
        return self.name if self.default is ... else f"{self.name}={self.default!r}"


@dataclass(frozen=True)
class PhaseInWords:
    """One phase in words."""

    name: str
    who: Literal["clients", "server"]
    does: str
    times: str
    sends: tuple[str, ...]
    uploads: dict[str, str]  # group -> how the server gathers it
    keeps: tuple[str, ...]  # stays with the client from round to round
    leaves: tuple[str, ...]  # stays with the client for later phases of the round
    needs: tuple[str, ...]


@dataclass(frozen=True)
class Entry:
    """All facts about one method."""

    name: str
    summary: str
    module: str
    text: str  # the module's docstring
    paper: Citation | None
    settings: tuple[MethodOption, ...]
    private: str
    piece: bool  # must come after a method that trains locally
    turns: tuple[PhaseInWords, ...]

    @property
    def own(self) -> bool:
        """Return True for a method of the package, False for one of a plug-in."""
        return self.module.startswith(PACKAGE)

    @property
    def sends(self) -> list[str]:
        return _distinct(group for turn in self.turns for group in turn.sends)

    @property
    def uploads(self) -> list[str]:
        return _distinct(group for turn in self.turns for group in turn.uploads)

    @property
    def keeps(self) -> list[str]:
        private = [] if self.private == "none" else [PRIVATE[self.private]]
        return [*private, *_distinct(group for turn in self.turns for group in turn.keeps)]

    @property
    def paragraphs(self) -> list[str]:
        """Return the paragraphs of the text, each as one line; indented blocks keep their lines."""
        return [
            part if part.startswith(" ") else " ".join(part.split())
            for part in self.text.split("\n\n")
        ]


def _distinct(names: Iterator[str]) -> list[str]:
    return list(dict.fromkeys(names))
