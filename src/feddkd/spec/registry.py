"""Values that can be written down: `name(key=value, ...)`, joined by `|`.

Methods, partitions, data sources and models are all spelled this way. The same text is the Python
expression, the line in an experiment's TOML and the row of a table; defaults left out or written
out mean the same thing (`canonical`).
"""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar

import numpy as np

from feddkd.errors import InputError, choices
from feddkd.spec.parser import read_calls
from feddkd.spec.types import LATER, Value, checked


@dataclass(frozen=True)
class Call:
    """One `name(key=value, ...)`: as it was written, and with every default filled in."""

    name: str
    given: tuple[tuple[str, Value], ...]
    complete: tuple[tuple[str, Value], ...]
    unsaid: frozenset[str] = frozenset()  # options that came later and have their default

    def __str__(self) -> str:
        return _write(self.name, self.given)

    @property
    def canonical(self) -> str:
        return _write(
            self.name, tuple(item for item in self.complete if item[0] not in self.unsaid)
        )


def _write(name: str, arguments: tuple[tuple[str, Value], ...]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments)})"


@dataclass(frozen=True, eq=False)
class Spelled:
    """A value that remembers how it was written.

    Two are equal when they mean the same, however they were spelled.
    """

    calls: tuple[Call, ...] = field(default=(), kw_only=True)

    def __str__(self) -> str:
        return " | ".join(str(call) for call in self.calls)

    @property
    def canonical(self) -> str:
        return " | ".join(call.canonical for call in self.calls)

    def __eq__(self, other: object) -> bool:
        # made by hand, without a spelling: equal to itself alone
        if not isinstance(other, Spelled) or not self.calls:
            return self is other
        return type(self) is type(other) and self.canonical == other.canonical

    def __hash__(self) -> int:
        return hash(self.canonical)


T = TypeVar("T", bound=Spelled)


@dataclass(frozen=True)
class Option:
    """One keyword of a registered factory."""

    name: str
    annotation: Any
    default: Any = dataclasses.MISSING


class Registry(Generic[T]):
    """Factories by name, the package's own and those of entry-point plug-ins; `parse` turns text
    into what they make.
    """

    def __init__(self, kind: str, group: str) -> None:
        self.kind, self.group = kind, group
        self._factories: dict[str, Callable[..., T]] = {}
        self._plugins_loaded = False

    def register(self, factory: Callable[..., T]) -> Callable[..., T]:
        """Make a factory callable by keywords alone, check what it is given and record the spelling
        in what it makes.
        """
        name, takes = factory.__name__, _options(factory)

        @functools.wraps(factory)
        def spelled(**given: Any) -> T:
            given = {
                key: value.item() if isinstance(value, np.generic) else value
                for key, value in given.items()
            }
            complete = self._complete(name, takes, given)
            given = {
                key: complete[key] if isinstance(value, list | tuple) else value
                for key, value in given.items()
            }
            value = factory(**_regroup(factory, complete))
            call = Call(
                name, tuple(given.items()), tuple(complete.items()), _unsaid(takes, complete)
            )
            return dataclasses.replace(value, calls=(call,))

        spelled.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(
                    option.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    annotation=option.annotation,
                    default=(
                        inspect.Parameter.empty
                        if option.default is dataclasses.MISSING
                        else option.default
                    ),
                )
                for option in takes
            ]
        )
        self._factories[name] = spelled
        return spelled

    def __getitem__(self, name: str) -> Callable[..., T]:
        if name not in self._factories:
            self._load_plugins()
        if name not in self._factories:
            raise InputError(f"unknown {self.kind} {name!r}; there are: {choices(self)}")
        return self._factories[name]

    def __iter__(self) -> Iterator[str]:
        self._load_plugins()
        return iter(sorted(self._factories))

    def options(self, name: str) -> dict[str, Any]:
        """Keyword -> default of one factory, for help pages.

        A keyword without a default maps to `...`.
        """
        signature = inspect.signature(self[name])
        return {
            key: ... if p.default is p.empty else p.default
            for key, p in signature.parameters.items()
        }

    def parse(self, text: str) -> tuple[T, ...]:
        """The values of `a(...) | b(...) | ...`, in order. A bare name means all defaults."""
        return tuple(self[name](**arguments) for name, arguments in read_calls(self.kind, text))

    def one(self, text: str) -> T:
        """The value of a single `name(...)`."""
        values = self.parse(text)
        if len(values) != 1:
            raise InputError(f"one {self.kind} is wanted here, not {len(values)}: {text!r}")
        return values[0]

    def _complete(
        self, name: str, takes: list[Option], given: Mapping[str, Any]
    ) -> dict[str, Value]:
        known = {option.name: option for option in takes}
        for key in given:
            if key not in known:
                raise InputError(
                    f"{self.kind} {name!r} has no option {key!r}; it takes: {choices(known)}"
                )
        complete = {}
        for option in takes:
            value = given.get(option.name, option.default)
            if value is dataclasses.MISSING:
                raise InputError(f"{self.kind} {name!r} needs a value for {option.name!r}")
            complete[option.name] = checked(
                value, option.annotation, f"{self.kind} {name!r}: {option.name}"
            )
        return complete

    def _load_plugins(self) -> None:
        if self._plugins_loaded:
            return
        self._plugins_loaded = True
        for point in entry_points(group=self.group):
            try:
                factory = point.load()
                # a plug-in may have registered itself on import
                if factory.__name__ not in self._factories:
                    self.register(factory)
            except Exception as error:
                raise InputError(
                    f"the plug-in {point.name!r} ({point.value}) of {self.group} cannot be used:"
                    f" {error!r}"
                ) from error


def _options(factory: Callable[..., Any]) -> list[Option]:
    """A factory's keywords.

    A parameter whose type is a dataclass stands for the dataclass's fields.
    """
    hints = typing.get_type_hints(factory, include_extras=True)
    found = []
    for parameter in inspect.signature(factory).parameters.values():
        annotation = hints[parameter.name]
        if dataclasses.is_dataclass(annotation):
            inner = typing.get_type_hints(annotation, include_extras=True)
            found += [
                Option(f.name, inner[f.name], f.default) for f in dataclasses.fields(annotation)
            ]
        else:
            default = (
                dataclasses.MISSING if parameter.default is parameter.empty else parameter.default
            )
            found.append(Option(parameter.name, annotation, default))
    return found


def _unsaid(takes: list[Option], complete: Mapping[str, Value]) -> frozenset[str]:
    later = (option for option in takes if LATER in getattr(option.annotation, "__metadata__", ()))
    return frozenset(option.name for option in later if complete[option.name] == option.default)


def _regroup(factory: Callable[..., Any], complete: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of the expansion in `_options`: fields back into their dataclass."""
    hints = typing.get_type_hints(factory, include_extras=True)
    arguments: dict[str, Any] = {}
    for name in inspect.signature(factory).parameters:
        group = hints[name]
        if isinstance(group, type) and dataclasses.is_dataclass(group):
            arguments[name] = group(**{f.name: complete[f.name] for f in dataclasses.fields(group)})
        else:
            arguments[name] = complete[name]
    return arguments
