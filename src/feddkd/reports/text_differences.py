"""Differences of two recorded experiments, from the texts in their manifests.

It gives what `reports.compare.differences` gives, without loading torch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from feddkd.errors import InputError
from feddkd.method_docs import snapshot
from feddkd.spec.parser import read_calls
from feddkd.spec.registry import Call

TEXTS = ("method", "data", "partition", "model", "transform")  # keys that hold calls
OF_A_RUN = ("seed", "split_seed")  # keys in which seeds of one experiment differ
Manifest = Mapping[str, Any]
Options = dict[str, Any]


class UnclearError(Exception):
    """The texts alone do not tell the difference; the registries do."""


def text_differences(a: Manifest, b: Manifest) -> dict[str, tuple[Any, Any]]:
    """Return key -> the two values, for all keys that differ but the seed.

    Raise UnclearError if the texts leave out something that the difference needs: the default of
    an option or of a key.
    """
    first, second = a["canonical"], b["canonical"]
    found: dict[str, tuple[Any, Any]] = {}
    for key in {**first, **second}:
        if first.get(key) == second.get(key) or key in OF_A_RUN:
            continue
        if key in TEXTS:
            found[key] = _spelled(a, key), _spelled(b, key)
            found |= _options(key, _calls(first[key]), _calls(second[key]))
        else:
            found[key] = first.get(key), second.get(key)
    return {key: (one, other) for key, (one, other) in found.items() if one != other}


def _spelled(manifest: Manifest, key: str) -> str:
    """Return the written text of a key, with the usual spaces."""
    text = manifest["experiment"].get(key)
    if text is None:  # it goes with the data: only the source knows how it is written
        raise UnclearError
    try:
        return " | ".join(str(Call(name, tuple(args.items()), ())) for name, args in _read(text))
    except InputError:
        return str(text)


def _calls(canonical: str) -> list[tuple[str, Options]]:
    """Return the calls of a canonical text; none if it names a file or data in memory."""
    try:
        return _read(canonical)
    except InputError:
        return []


def _read(text: str) -> list[tuple[str, Options]]:
    return [(name, dict(options)) for name, options in read_calls("text", text)]


def _options(
    key: str, first: Sequence[tuple[str, Options]], second: Sequence[tuple[str, Options]]
) -> dict[str, tuple[Any, Any]]:
    """Return the options in which calls at the same position differ."""
    found: dict[str, tuple[Any, Any]] = {}
    for number, (one, other) in enumerate(zip(first, second, strict=False), 1):
        ours, theirs = one[1], other[1]
        if one[0] != other[0] or ours.keys() != theirs.keys():
            ours, theirs = _complete(key, *one), _complete(key, *other)
        place = f"{key} {number}" if max(len(first), len(second)) > 1 else key
        for option in {**ours, **theirs}:
            found[f"{place}, {option}"] = ours.get(option), theirs.get(option)
    return found


def _complete(key: str, name: str, options: Options) -> Options:
    """Return the options of a call with all defaults: a canonical text leaves some out."""
    if name == "memory":
        return options
    known = {entry.name: entry for entry in snapshot.read()} if key == "method" else {}
    if name not in known:
        raise UnclearError
    return {s.name: options.get(s.name, s.default) for s in known[name].settings}
