"""What the registry knows of a method, for lists and pages: its paper, its formula, its options,
what travels and what stays.

Nothing is written down twice: the paper is the first paragraph of the method's module, the formula
the docstring of its function, what travels is read off the phases of the method with its default
options.
"""

import dataclasses
import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any, Literal

from feddkd.data.batches import Reads
from feddkd.errors import InputError
from feddkd.method import Gradient, Method, Phase
from feddkd.method_docs.entries import Citation, Entry, MethodOption, PhaseInWords
from feddkd.methods import METHODS
from feddkd.methods.aggregation import Gathering
from feddkd.methods.local import Local
from feddkd.spec.types import Bound

REFERENCE = re.compile(
    r'(?P<name>[^:"]+): (?P<authors>[^"]+), "(?P<title>[^"]+?),?",? (?P<venue>.*?)(?:, | )?\(?'
    r"(?P<number>arXiv:\d{4}\.\d{5}|doi:10\.[^\s;,:]*[^\s;,:.])"
)
SHARED = {Local: "local training", Gathering: "gathering"}


def entry(name: str) -> Entry:
    """What there is to know of a method by name."""
    factory = METHODS[name]
    text = inspect.cleandoc(sys.modules[factory.__module__].__doc__ or "")
    method = _with_defaults(name)
    return Entry(
        name=name,
        summary=" ".join((factory.__doc__ or "").split("\n\n")[0].split()),
        module=factory.__module__,
        text=text,
        paper=_paper(text),
        settings=tuple(_settings(name)),
        private="none" if method is None else _private(method),
        piece=method is not None and is_piece(method),
        turns=() if method is None else tuple(_turn(phase, method) for phase in method.phases),
    )


def entries() -> list[Entry]:
    return [entry(name) for name in METHODS]


def is_piece(method: Method) -> bool:
    """Whether it is to be put behind a method that trains locally, as dkd is: by itself it lacks
    something, or asks nobody.
    """
    try:
        method.check_order()
    except InputError:
        return True
    return not any(_asks_clients(phase) for phase in method.phases)


def _asks_clients(phase: Phase) -> bool:
    return phase.client is not None and phase.at == "clients"


def _with_defaults(name: str) -> Method | None:
    """None where an option must be given."""
    return None if ... in METHODS.options(name).values() else METHODS[name]()


def _private(method: Method) -> str:
    """Return what stays with a client: a key of PRIVATE, or "none"."""
    kinds = [kind for kind in method.private if kind != "none"]
    return "names" if method.private_patterns else next(iter(kinds), "none")


def _paper(text: str) -> Citation | None:
    """The first paragraph: Name: authors, "title", venue, arXiv:number (or doi:number where there
    is none).
    """
    found = REFERENCE.match(" ".join(text.split("\n\n")[0].split()))
    return None if found is None else Citation(**found.groupdict())


def _settings(name: str) -> Iterator[MethodOption]:
    factory = METHODS[name]
    groups = [
        group
        for group in typing.get_type_hints(inspect.unwrap(factory)).values()
        if group in SHARED
    ]
    shared = {item.name: SHARED[group] for group in groups for item in dataclasses.fields(group)}
    for key, default in METHODS.options(name).items():
        yield MethodOption(
            key,
            default,
            _in_words(inspect.signature(factory).parameters[key].annotation),
            shared.get(key, ""),
        )


def _in_words(annotation: Any) -> str:
    """What an option takes."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        bounds = [str(bound) for bound in arguments[1:] if isinstance(bound, Bound)]
        return " ".join([_in_words(arguments[0]), *bounds])
    if origin is Literal:
        return ", ".join(map(repr, arguments))
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_in_words(argument) for argument in arguments)
    words = {
        int: "whole number",
        float: "number",
        bool: "True, False",
        str: "text",
        type(None): "None",
    }
    return words.get(annotation, str(annotation))


def _turn(phase: Phase, method: Method) -> PhaseInWords:
    asked = _asks_clients(phase)
    empty = {"params", "buffers"} if "model" in method.private else set()
    rules = {group: rule.value for group, rule in phase.collect.items() if group not in empty}
    rules |= {
        group: f"{rules[group]}, and every client's" if group in rules else "every client's"
        for group in phase.every.values()
    }
    return PhaseInWords(
        name=phase.name,
        who="clients" if asked else "server",
        does=_does(phase),
        times=_times(phase),
        sends=(
            *(g for g in phase.sends if g not in empty),
            *(f"rate {rate}" for rate in phase.rates),
        )
        if asked
        else (),
        uploads=rules if asked else {},
        keeps=tuple(sorted(phase.keeps)),
        leaves=tuple(sorted(phase.leaves)),
        needs=tuple(sorted(phase.needs)),
    )


def _does(phase: Phase) -> str:
    if phase.client is None:
        return "computes with what it holds"
    if isinstance(phase.client, Gradient):
        return f"a gradient at the weights sent, on {_examples(phase.reads)}"
    return f"steps through {_examples(phase.reads)}"


EXAMPLES = {
    "train": "own examples",
    "public": "public examples",
    "train+public": "own and public examples",
}


def _examples(reads: Reads) -> str:
    if reads.source == "none":
        return _number(reads.count(1), "draw")
    whose, size = EXAMPLES.get(reads.source, reads.source), reads.batch_size
    if reads.steps is None:
        return f"{_number(reads.epochs, 'epoch')} of {whose} in batches of {size}"
    return f"{_number(reads.steps, 'batch', 'es')} of {size} {whose}"


def _number(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{plural if count > 1 else ''}"


def _times(phase: Phase) -> str:
    times = f"at most {phase.repeat.times}" if phase.over is not None else str(phase.repeat.times)
    return (
        f"{times}, none in the first {phase.repeat.warmup} rounds" if phase.repeat.warmup else times
    )
