"""Types and limits of options, and one function that checks and converts a value."""

import math
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np

from feddkd.errors import InputError, did_you_mean

Value = bool | int | float | str | None


@dataclass(frozen=True)
class Bound:
    """Limits of a number, checked when an option is given. Use it inside `Annotated`."""

    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    below: float = math.inf

    def holds(self, value: float) -> bool:
        """Return True if the value is within the limits."""
        return self.least <= value <= self.most and self.above < value < self.below

    def __str__(self) -> str:
        limits = {">=": self.least, ">": self.above, "<=": self.most, "<": self.below}
        return " and ".join(
            f"{sign} {limit:g}" for sign, limit in limits.items() if math.isfinite(limit)
        )


@dataclass(frozen=True)
class Later:
    """Mark of an option that was added to an existing factory. Use it inside `Annotated`.

    `canonical` leaves the option out while it has its default, so that texts from before the option
    was added keep their canonical text and their digest.
    """


@dataclass(frozen=True)
class Joined:
    """Mark of a text that lists names or numbers with commas between them. Use inside `Annotated`.

    Python code may also give a list or a tuple. A list of one number may be the number.
    """

    numbers: bool = False


@dataclass(frozen=True)
class CallText:
    """Mark of a text of the form name(key=value, ...). Use it inside `Annotated`.

    `read` makes the value that the text stands for. The option holds its canonical text, with all
    defaults written out.
    """

    kind: str
    read: Callable[[str], Any]


LATER = Later()
Names = Annotated[str, Joined()]
Numbers = Annotated[str, Joined(numbers=True)]
Count = Annotated[int, Bound(least=1)]
Whole = Annotated[int, Bound(least=0)]
Positive = Annotated[float, Bound(above=0)]
NonNegative = Annotated[float, Bound(least=0)]
Share = Annotated[float, Bound(above=0, most=1)]
Chance = Annotated[float, Bound(above=0, below=1)]
Momentum = Annotated[float, Bound(least=0, below=1)]


def checked(value: Any, annotation: Any, where: str) -> Any:
    """Return the value converted to the annotated type.

    Raise InputError with the name `where` if it does not fit.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int) and abs(value) >= 2**63:
        raise InputError(f"{where} must fit into 64 bits; this number has {value.bit_length()}")
    if origin is Annotated:
        if Joined(numbers=True) in arguments and type(value) is int:
            value = str(value)
        if any(isinstance(mark, Joined) for mark in arguments) and isinstance(value, list | tuple):
            value = ", ".join(checked(each, annotation, f"each of {where}") for each in value)
        value = checked(value, arguments[0], where)
        for bound in arguments[1:]:
            if value is not None and isinstance(bound, Bound) and not bound.holds(value):
                raise InputError(f"{where} must be {bound}, not {value!r}")
            if value is not None and isinstance(bound, CallText):
                value = _canonical(value, bound, where)
        return value
    if origin is Literal:
        if value not in arguments or isinstance(value, bool) != isinstance(arguments[0], bool):
            known = ", ".join(map(repr, arguments))
            hint = did_you_mean(value, filter(lambda name: isinstance(name, str), arguments))
            raise InputError(f"{where} must be one of {known}, not {value!r}{hint}")
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


def _canonical(text: str, mark: CallText, where: str) -> str:
    """Return the canonical text of the value that a text stands for."""
    try:
        return str(mark.read(text).canonical)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def _checked_union(value: Any, members: tuple[Any, ...], where: str) -> Any:
    """Return the value checked against the members of a union.

    The first member of exactly the value's type is used, so 1 stays an int for `int | float`.
    """
    if value is None and type(None) in members:
        return None
    concrete = [member for member in members if member is not type(None)]
    for member in concrete:
        if typing.get_origin(member) is Literal and value in typing.get_args(member):
            return value
    fits = [member for member in concrete if type(value) is _plain(member)]
    if not fits and type(value) is int:
        fits = [member for member in concrete if _plain(member) is float]
    if not fits and len(concrete) > 1:
        expected = " or ".join(_describe(_plain(member)) for member in concrete)
        raise InputError(f"{where} must be {expected}, not {value!r}")
    return checked(value, (fits or concrete)[0], where)


def _plain(annotation: Any) -> Any:
    """Return the type inside `Annotated[type, ...]`."""
    is_annotated = typing.get_origin(annotation) is Annotated
    return typing.get_args(annotation)[0] if is_annotated else annotation


def _describe(annotation: Any) -> str:
    """Return a type in words."""
    if typing.get_origin(annotation) is Literal:
        return " or ".join(map(repr, typing.get_args(annotation)))
    words = {int: "a whole number", float: "a number", bool: "True or False", str: "a text"}
    return words.get(annotation, str(annotation))
