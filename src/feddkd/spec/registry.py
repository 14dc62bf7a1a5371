"""Factories by name, and values that remember their text `name(key=value, ...) | name(...)`.

Methods, partitions, data sources and models are all written this way. The same text is the Python
expression, the line in an experiment's TOML and the row of a table. `canonical` is the text with
all defaults written out, so it does not depend on which defaults the user left out.
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

from feddkd.errors import InputError, unknown
from feddkd.spec.parser import read_calls
from feddkd.spec.types import LATER, Value, checked


@dataclass(frozen=True)
class Call:
    """One `name(key=value, ...)`, with the options given and with all options."""

    name: str
    given: tuple[tuple[str, Value], ...]
    complete: tuple[tuple[str, Value], ...]
    # options marked LATER that have their default: `canonical` leaves them out
    unsaid: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return _write(self.name, self.given)

    @property
    def canonical(self) -> str:
        """Return the text with all defaults written out."""
        items = tuple(item for item in self.complete if item[0] not in self.unsaid)
        return _write(self.name, items)


def _write(name: str, arguments: tuple[tuple[str, Value], ...]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments)})"


@dataclass(frozen=True, eq=False)
class Spelled:
    """A value that remembers its text. Two values are equal if their canonical texts are."""

    calls: tuple[Call, ...] = field(default=(), kw_only=True)

    def __str__(self) -> str:
        return " | ".join(str(call) for call in self.calls)

    @property
    def canonical(self) -> str:
        """Return the text with all defaults written out."""
        return " | ".join(call.canonical for call in self.calls)

    def __eq__(self, other: object) -> bool:
        # made by hand, without a text: equal only to itself
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

    @property
    def parameter(self) -> inspect.Parameter:
        """Return the option as a keyword-only parameter of a signature."""
        missing = self.default is dataclasses.MISSING
        default = inspect.Parameter.empty if missing else self.default
        kind = inspect.Parameter.KEYWORD_ONLY
        return inspect.Parameter(self.name, kind, default=default, annotation=self.annotation)


class Registry(Generic[T]):
    """Factories by name: those of the package and those of entry-point plug-ins."""

    def __init__(self, kind: str, group: str) -> None:
        self.kind, self.group = kind, group
        self._factories: dict[str, Callable[..., T]] = {}
        self._plugins_loaded = False

    def register(self, factory: Callable[..., T]) -> Callable[..., T]:
        """Add a factory, and return it with keyword-only options that are checked.

        The values that it makes remember their text.
        """
        name, options = factory.__name__, _options(factory)

        @functools.wraps(factory)
        def spelled(**given: Any) -> T:
            given = self._british_spelling(name, options, given)
            for key, value in given.items():
                if isinstance(value, np.generic):
                    given[key] = value.item()
            complete = self._complete(name, options, given)
            for key, value in given.items():
                if isinstance(value, list | tuple):  # spelled as text
                    given[key] = complete[key]
            value = factory(**_regroup(factory, complete))
            unsaid = _unsaid(options, complete)
            call = Call(name, tuple(given.items()), tuple(complete.items()), unsaid)
            return dataclasses.replace(value, calls=(call,))

        signature = inspect.Signature([option.parameter for option in options])
        spelled.__signature__ = signature  # type: ignore[attr-defined]
        self._factories[name] = spelled
        return spelled

    def __getitem__(self, name: str) -> Callable[..., T]:
        if name not in self._factories:
            self._load_plugins()
        if name not in self._factories:
            raise unknown(f"unknown {self.kind} {name!r}", name, self)
        return self._factories[name]

    def __iter__(self) -> Iterator[str]:
        self._load_plugins()
        return iter(sorted(self._factories))

    def options(self, name: str) -> dict[str, Any]:
        """Return the defaults of a factory's options by name, `...` where there is none."""
        signature = inspect.signature(self[name])
        return {
            key: ... if p.default is p.empty else p.default
            for key, p in signature.parameters.items()
        }

    def parse(self, text: str) -> tuple[T, ...]:
        """Return the values of `a(...) | b(...) | ...`, in order. A bare name has all defaults."""
        return tuple(self[name](**arguments) for name, arguments in read_calls(self.kind, text))

    def one(self, text: str) -> T:
        """Return the value of a single `name(...)`."""
        values = self.parse(text)
        if len(values) != 1:
            raise InputError(f"expected one {self.kind}, not {len(values)}: {text!r}")
        return values[0]

    def _british_spelling(
        self, name: str, options: list[Option], given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the options given, with "optimizer" in their names written as "optimiser"."""
        names = {option.name for option in options}
        spelled: dict[str, Any] = {}
        for key, value in given.items():
            british = key.replace("optimizer", "optimiser")
            key = british if key not in names and british in names else key
            if key in spelled:
                raise InputError(f"{self.kind} {name!r}: {key} is given twice")
            spelled[key] = value
        return spelled

    def _complete(
        self, name: str, options: list[Option], given: Mapping[str, Any]
    ) -> dict[str, Value]:
        """Return the values of all options, checked."""
        names = {option.name for option in options}
        for key in given:
            if key not in names:
                problem = f"{self.kind} {name!r} has no option {key!r}"
                raise unknown(problem, key, names, "it takes")
        complete = {}
        for option in options:
            value = given.get(option.name, option.default)
            if value is dataclasses.MISSING:
                raise InputError(f"{self.kind} {name!r} needs a value for {option.name!r}")
            complete[option.name] = checked(
                value, option.annotation, f"{self.kind} {name!r}: {option.name}"
            )
        return complete

    def _load_plugins(self) -> None:
        """Register the factories of installed plug-ins, once."""
        if self._plugins_loaded:
            return
        self._plugins_loaded = True
        for point in entry_points(group=self.group):
            try:
                factory = point.load()
                # the import may have registered it
                if factory.__name__ not in self._factories:
                    self.register(factory)
            except Exception as error:
                raise InputError(
                    f"cannot load plug-in {point.name!r} ({point.value}) of {self.group}: {error!r}"
                ) from error


def _options(factory: Callable[..., Any]) -> list[Option]:
    """Return the keywords of a factory.

    A parameter whose type is a dataclass stands for the fields of the dataclass.
    """
    hints = typing.get_type_hints(factory, include_extras=True)
    options = []
    for parameter in inspect.signature(factory).parameters.values():
        annotation = hints[parameter.name]
        if dataclasses.is_dataclass(annotation):
            inner = typing.get_type_hints(annotation, include_extras=True)
            for member in dataclasses.fields(annotation):
                options.append(Option(member.name, inner[member.name], member.default))
        else:
            missing = parameter.default is parameter.empty
            default = dataclasses.MISSING if missing else parameter.default
            options.append(Option(parameter.name, annotation, default))
    return options


def _unsaid(options: list[Option], complete: Mapping[str, Value]) -> frozenset[str]:
    """Return the options marked LATER that have their default."""
    later = [o for o in options if LATER in getattr(o.annotation, "__metadata__", ())]
    return frozenset(option.name for option in later if complete[option.name] == option.default)


def _regroup(factory: Callable[..., Any], complete: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a factory: the inverse of `_options`, with fields in dataclasses."""
    hints = typing.get_type_hints(factory, include_extras=True)
    arguments: dict[str, Any] = {}
    for name in inspect.signature(factory).parameters:
        group = hints[name]
        if isinstance(group, type) and dataclasses.is_dataclass(group):
            arguments[name] = group(**{f.name: complete[f.name] for f in dataclasses.fields(group)})
        else:
            arguments[name] = complete[name]
    return arguments
