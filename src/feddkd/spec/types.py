"""What an option may be:

its kind and limits, checked and converted in one place, with an error that names what is wrong.
"""

import math
import types
import typing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np

from feddkd.errors import InputError

Value = bool | int | float | str | None


@dataclass(frozen=True)
class Bound:
    """Limits of a number, checked when a value is spelled. Use inside `Annotated`."""

    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    below: float = math.inf

    def holds(self, value: float) -> bool:
        return self.least <= value <= self.most and self.above < value < self.below

    def __str__(self) -> str:
        limits = {">=": self.least, ">": self.above, "<=": self.most, "<": self.below}
        return " and ".join(
            f"{sign} {limit:g}" for sign, limit in limits.items() if math.isfinite(limit)
        )


@dataclass(frozen=True)
class Later:
    """Marks an option that its factory did not always have: `canonical` leaves it out while it has
    its default, so that what was spelled before it came is still the same. Use inside
    `Annotated`.
    """


@dataclass(frozen=True)
class Joined:
    """Marks a text that lists names with commas between them. Use inside `Annotated`.

    Python code may also give a list or a tuple of texts.
    """


LATER = Later()
JOINED = Joined()
Names = Annotated[str, JOINED]
Count = Annotated[int, Bound(least=1)]
Whole = Annotated[int, Bound(least=0)]
Positive = Annotated[float, Bound(above=0)]
NonNegative = Annotated[float, Bound(least=0)]
Share = Annotated[float, Bound(above=0, most=1)]
Chance = Annotated[float, Bound(above=0, below=1)]
Momentum = Annotated[float, Bound(least=0, below=1)]


def checked(value: Any, annotation: Any, where: str) -> Any:
    """The value, converted to what the annotation asks for; an error that names it otherwise."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int) and abs(value) >= 2**63:
        raise InputError(f"{where} must fit into 64 bits; this number has {value.bit_length()}")
    if origin is Annotated:
        if JOINED in arguments and isinstance(value, list | tuple):
            value = ", ".join(checked(name, str, f"each of {where}") for name in value)
        value = checked(value, arguments[0], where)
        for bound in arguments[1:]:
            if value is not None and isinstance(bound, Bound) and not bound.holds(value):
                raise InputError(f"{where} must be {bound}, not {value!r}")
        return value
    if origin is Literal:
        if value not in arguments or isinstance(value, bool) != isinstance(arguments[0], bool):
            raise InputError(
                f"{where} must be one of {', '.join(map(repr, arguments))}, not {value!r}"
            )
        return value
    if origin in (typing.Union, types.UnionType):
        return _checked_union(value, arguments, where)
    if annotation is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if annotation is float and isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{where} must be a finite number, not {value!r}")
    if type(value) is not annotation:
        raise InputError(f"{where} must be {_describe(annotation)}, not {value!r}")
    return value


def _checked_union(value: Any, members: tuple[Any, ...], where: str) -> Any:
    """The first member of exactly the value's type wins, so that 1 stays a count where `int |
    float` is asked for.
    """
    if value is None and type(None) in members:
        return None
    concrete = [member for member in members if member is not type(None)]
    if any(
        typing.get_origin(member) is Literal and value in typing.get_args(member)
        for member in concrete
    ):
        return value
    fits = [m for m in concrete if type(value) is _plain(m)] or [
        m for m in concrete if _plain(m) is float and type(value) is int
    ]
    if not fits and len(concrete) > 1:
        raise InputError(
            f"{where} must be {' or '.join(_describe(_plain(m)) for m in concrete)}, not {value!r}"
        )
    return checked(value, (fits or concrete)[0], where)


def _plain(annotation: Any) -> Any:
    return (
        typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation
    )


def _describe(annotation: Any) -> str:
    if typing.get_origin(annotation) is Literal:
        return " or ".join(map(repr, typing.get_args(annotation)))
    words = {int: "a whole number", float: "a number", bool: "True or False", str: "a text"}
    return words.get(annotation, str(annotation))
