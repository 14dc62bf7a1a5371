"""Facts about the registered methods, for lists and pages: paper, formula, options, phases.

All of them are read from the code. The paper is the first paragraph of the method's module and the
summary is the docstring of its function. The groups sent, uploaded and kept are those of the phases
of the method with default options.
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
    """Return the facts about a method."""
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
    """Return the facts about all methods."""
    return [entry(name) for name in METHODS]


def is_piece(method: Method) -> bool:
    """Return True if a method must come after a method that trains locally, like dkd.

    It needs something that an earlier phase leaves, or reads no examples.
    """
    try:
        method.check_order()
    except InputError:
        return True
    return not any(phase.client is not None for phase in method.phases)


def _with_defaults(name: str) -> Method | None:
    """Return a method with its default options, or None if an option has no default."""
    return None if ... in METHODS.options(name).values() else METHODS[name]()


def _private(method: Method) -> str:
    """Return the kind of tensors that stay with a client: a key of PRIVATE, or "none"."""
    if method.codec and method.codec.remembers:
        return "unsent"
    kinds = [kind for kind in method.private if kind != "none"]
    return "names" if method.private_patterns else next(iter(kinds), "none")


def _paper(text: str) -> Citation | None:
    """Return the paper of the first paragraph.

    It reads: Name: authors, "title", venue, arXiv:number (or doi:number).
    """
    match = REFERENCE.match(" ".join(text.split("\n\n")[0].split()))
    return None if match is None else Citation(**match.groupdict())


def _settings(name: str) -> Iterator[MethodOption]:
    """Yield the options of a method."""
    factory = METHODS[name]
    shared: dict[str, str] = {}
    for annotation in typing.get_type_hints(inspect.unwrap(factory)).values():
        for kind, title in SHARED.items():
            if isinstance(annotation, type) and issubclass(annotation, kind):
                shared |= dict.fromkeys((item.name for item in dataclasses.fields(kind)), title)
    parameters = inspect.signature(factory).parameters
    for key, default in METHODS.options(name).items():
        takes = _in_words(parameters[key].annotation)
        yield MethodOption(key, default, takes, shared.get(key, ""))


def _in_words(annotation: Any) -> str:
    """Return the values of an option in words."""
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
    """Return a phase in words."""
    judging = phase.at == "judging"
    asked = phase.asks_clients or judging
    empty = {"params", "buffers"} if "model" in method.private else set()
    sends = [group for group in phase.sends if group not in empty]
    sends += [f"rate {rate}" for rate in phase.rates]
    rules = {group: rule.value for group, rule in phase.collect.items() if group not in empty}
    for group in phase.every.values():
        rules[group] = f"{rules[group]}, and every client's" if group in rules else "every client's"
    return PhaseInWords(
        name=phase.name,
        who="clients" if asked else "server",
        does=_does(phase),
        times="before each evaluation" if judging else _times(phase),
        sends=tuple(sends) if asked else (),
        uploads=rules if asked else {},
        keeps=tuple(sorted(phase.keeps)),
        leaves=tuple(sorted(phase.leaves)),
        needs=tuple(sorted(phase.needs)),
    )


def _does(phase: Phase) -> str:
    """Return the computation of a phase in words."""
    if phase.client is None:
        return "computes with what it holds"
    if isinstance(phase.client, Gradient):
        return f"a gradient at the weights sent, on {_examples(phase.reads)}"
    return f"steps through {_examples(phase.reads)}"


EXAMPLES = {
    "train": "own examples",
    "public": "public examples",
    "train+public": "own and public examples",
    "pooled": "the examples of all clients",
}


def _examples(reads: Reads) -> str:
    """Return the examples that a phase reads, in words."""
    if reads.source == "none":
        return _number(reads.count(1), "draw")
    whose, size = EXAMPLES.get(reads.source, reads.source), reads.batch_size
    if reads.steps is None:
        return f"{_number(reads.epochs, 'epoch')} of {whose} in batches of {size}"
    return f"{_number(reads.steps, 'batch', 'es')} of {size} {whose}"


def _number(count: int, noun: str, plural: str = "s") -> str:
    return f"{count} {noun}{plural if count > 1 else ''}"


def _times(phase: Phase) -> str:
    """Return the number of repetitions of a phase in words."""
    times = str(phase.repeat.times) if phase.over is None else f"at most {phase.repeat.times}"
    warmup = phase.repeat.warmup
    return f"{times}, none in the first {warmup} rounds" if warmup else times
