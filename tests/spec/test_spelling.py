"""A value's text reads back as the same value, and a wrong text is refused by name."""

import contextlib
import inspect
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from feddkd import InputError, dkd, fedavg, parse
from feddkd.data.partitions.registry import PARTITIONS
from feddkd.data.sources import SOURCES
from feddkd.data.transforms import TRANSFORMS, transform
from feddkd.method import Method
from feddkd.methods import METHODS
from feddkd.models.registry import MODELS
from feddkd.spec.registry import Registry, Spelled
from feddkd.spec.types import Bound, Count, Share, checked

REGISTRIES: dict[str, Registry[Any]] = {
    "methods": METHODS,
    "partitions": PARTITIONS,
    "models": MODELS,
    "transforms": TRANSFORMS,
    "sources": SOURCES,
}
TEXTS = {
    "hidden": ["", "8", "64,32"],
    "domains": ["mnist", "svhn,usps"],
    "path": ["a.npz", "it's \\ odd.npz"],
    "label": ["kind"],
    "shape": ["12", "1x28x28"],
    "names": ["head.*", "*.bias, 0.weight"],
    "x": ["age, height"],
    "y": ["price"],
    "owner": ["user"],
    "test_path": ["b.csv"],
}
NOT_DRAWN = {"saved", "domains"}  # a file must be there; has no options


ANYTHING = Bound()


def values(key: str, annotation: Any, bound: Bound = ANYTHING) -> st.SearchStrategy[Any]:
    """Any value that an option of this type may have."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return values(
            key, arguments[0], *(mark for mark in arguments[1:] if isinstance(mark, Bound))
        )
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values(key, member) for member in arguments if member is not str])
    least, most = max(bound.least, bound.above, -1e9), min(bound.most, bound.below, 1e9)
    if annotation is int:
        return st.integers(int(least), int(most))
    if annotation is float:
        return st.floats(least, most).filter(bound.holds) | st.integers(
            int(least), int(most)
        ).filter(bound.holds)
    if annotation is str:
        return st.sampled_from(TEXTS[key])
    return st.booleans() if annotation is bool else st.none()


@st.composite
def calls(draw: st.DrawFn, registry: Registry[Any]) -> tuple[str, dict[str, Any]]:
    """A name, and some of its options with values."""
    name = draw(st.sampled_from([name for name in registry if name not in NOT_DRAWN]))
    options = inspect.signature(registry[name]).parameters
    required = {key for key, option in options.items() if option.default is option.empty}
    keys = required | draw(st.sets(st.sampled_from(sorted(options)))) if options else set()
    drawn = {
        key: draw(values(key, options[key].annotation))
        for key in draw(st.permutations(sorted(keys)))
    }
    try:
        registry[name](**drawn)
    # only where options do not go together is a value in its own right refused
    except InputError as error:
        assume("go" not in str(error).split())
        raise
    return name, drawn


@pytest.mark.parametrize("kind", REGISTRIES)
@given(data=st.data())
def test_text_and_value_round_trip(kind: str, data: st.DataObject) -> None:
    registry = REGISTRIES[kind]
    name, options = data.draw(calls(registry))
    text = f"{name}({', '.join(f'{key}={value!r}' for key, value in options.items())})"
    made = registry[name](**options)
    assert str(made) == text
    assert str(registry.one(text)) == text
    assert registry.one(text) == made
    assert hash(registry.one(text)) == hash(made)


@pytest.mark.parametrize("kind", REGISTRIES)
@given(data=st.data())
def test_defaults_written_out_or_left_out_are_the_same(kind: str, data: st.DataObject) -> None:
    registry = REGISTRIES[kind]
    name, options = data.draw(calls(registry))
    complete = {**registry.options(name), **options}
    assert registry[name](**complete) == registry[name](**options)
    assert registry[name](**complete).canonical == registry[name](**options).canonical
    assert registry.one(registry[name](**options).canonical) == registry[name](**options)


@given(st.lists(calls(METHODS), min_size=1, max_size=4))
def test_a_composed_method_is_spelled_by_its_parts(parts: list[tuple[str, dict[str, Any]]]) -> None:
    parts = [("fedavg", {}), *parts]  # dkd needs models that have been trained
    made = METHODS[parts[0][0]](**parts[0][1])
    for name, options in parts[1:]:
        try:
            made = made | METHODS[name](**options)
        except InputError as error:  # dkd has no shared model to teach beside feddistill; a
            # client is judged by one personal model; some uploads cannot be compressed
            refusals = ("whole models stay", "personal model", "whole model of", "compress")
            assume(not any(words in str(error) for words in refusals))
            raise
    assert parse(str(made)) == made
    assert str(parse(str(made))) == str(made)
    assert str(made).count(" | ") == len(parts) - 1


@pytest.mark.parametrize(
    "loose",
    ["fedavg", " fedavg ( ) ", "fedavg(epochs = 5)", "fedavg(lr=1e-1)", "fedavg(\n  lr=.1,\n)"],
)
def test_white_space_and_the_way_numbers_are_written_do_not_matter(loose: str) -> None:
    assert parse(loose) == fedavg()


def test_a_whole_number_where_any_number_will_do_is_that_number() -> None:
    assert fedavg(lr=1) == fedavg(lr=1.0)
    assert str(fedavg(lr=1)) == "fedavg(lr=1)"


def test_numbers_of_numpy_are_numbers() -> None:
    made = fedavg(lr=np.float64(0.5), epochs=np.int64(2), nesterov=np.bool_(False))
    assert str(made) == "fedavg(lr=0.5, epochs=2, nesterov=False)"


def test_different_values_differ() -> None:
    assert len({fedavg(), fedavg(lr=0.2), dkd(), fedavg() | dkd(), fedavg() | dkd() | dkd()}) == 5
    assert transform("pad()") != transform("pad() | flip()")
    # things of another kind, though spelled alike
    assert transform("pad()") != TRANSFORMS.one("pad()")


def test_what_was_made_by_hand_has_no_spelling_and_equals_itself_alone() -> None:
    one, two = Method(fedavg().phases), Method(dkd().phases)
    assert one != two
    assert one != fedavg()


@settings(deadline=None)
@given(st.text(max_size=60))
@example("fedavg(lr={[]})")
@example("fedavg(lr={{}: 1})")
@example("fedavg(epochs=0x" + "f" * 5000 + ")")
@example("fedavg(epochs=" + "9" * 5000 + ")")
@example("fedavg(lr=" + "(" * 3000)
@example("fedavg(lr=" + "-" * 5000 + "1)")
@example(" | ".join(["fedavg"] * 1300))
@example("fedavg(lr=" + " " * 20_000 + "1)")
@example("fedavg(optimiser='\\d')")
@example("fedavg(lr=1if 1else 2)")
@example("\x00")
@example("\ud800")
def test_random_text_is_refused_in_words(text: str) -> None:
    for registry in REGISTRIES.values():
        refused_or_read(registry.parse, text)


TOKENS = (
    "fedavg dkd pad iid ( ) = , | lr steps ** 1 - 0.5 1e999 'sgd' x [ ] { } : True None not lambda"
    " f'{x}' b'' 1j ... if else ;"
)


@given(st.lists(st.sampled_from(TOKENS.split()), max_size=12), st.sampled_from(["", " "]))
def test_near_misses_are_refused_in_words(tokens: list[str], space: str) -> None:
    for text in (
        space.join(tokens),
        f"fedavg(lr={space.join(tokens)})",
        f"fedavg({space.join(tokens)}) | dkd()",
    ):
        refused_or_read(parse, text)


def refused_or_read(read: Callable[[str], Any], text: str) -> None:
    with contextlib.suppress(InputError):
        read(text)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("fedsvg()", ["'fedsvg'", "dkd, ", "fedavg, ", "fedprox"]),
        ("fedavg(speed=3)", ["'fedavg'", "'speed'", "batch_size", "lr"]),
        ("fedavg(epochs=0)", ["'fedavg'", "epochs", ">= 1", "0"]),
        ("fedavg(epochs=2.5)", ["epochs", "a whole number", "2.5"]),
        ("fedavg(epochs=True)", ["epochs", "a whole number", "True"]),
        ("fedavg(lr='fast')", ["lr", "a number", "'fast'"]),
        ("fedavg(lr=1e999)", ["lr", "finite", "inf"]),
        ("fedavg(lr=-0.1)", ["lr", "> 0", "-0.1"]),
        ("fedavg(momentum=1)", ["momentum", ">= 0 and < 1", "1.0"]),
        ("fedavg(nesterov=1)", ["nesterov", "True or False", "1"]),
        ("fedavg(steps='all')", ["steps", "a whole number", "'all'"]),
        ("fedavg(optimiser='adamx')", ["optimiser", "'sgd', 'adam'", "'adamx'"]),
        ("fedavg(optimiser='\\d')", ["optimiser", "'sgd', 'adam'"]),
        ("fedavg(lr=0.1, lr=0.2)", ["lr", "twice"]),
        ("fedavg(5)", ["by name", "key=value", "'5'"]),
        ("fedavg(**{'lr': 1})", ["**"]),
        ("fedavg(epochs=[1])", ["epochs"]),
        ("fedavg(epochs=99999999999999999999)", ["epochs", "64 bits"]),
        ("feddkd.fedavg()", ["'feddkd.fedavg()'", "name(key=value, ...)"]),
        ("fedavg() + dkd()", ["name(key=value, ...)"]),
        ("", ["name(key=value, ...)"]),
    ],
)
def test_an_error_names_the_wrong_thing_and_the_right_ones(text: str, named: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        parse(text)
    assert all(part in str(caught.value) for part in named), str(caught.value)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("half", "a whole number or a number"),
        (0, ">= 1"),
        (1.5, "> 0 and <= 1"),
        (True, "True"),
        (None, "None"),
    ],
)
def test_a_choice_of_types_is_complained_of_as_such(value: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        checked(value, Count | Share, "cohort")


def test_an_option_without_a_default_must_be_given() -> None:
    with pytest.raises(InputError, match=r"'npz' needs a value for 'path'"):
        SOURCES.one("npz")


def test_one_value_is_not_several() -> None:
    with pytest.raises(InputError, match="one partition, not 2"):
        PARTITIONS.one("iid() | iid()")


@dataclass(frozen=True, eq=False)
class Thing(Spelled):
    size: int = 0


@dataclass
class Point:
    """An entry point of some other package."""

    name: str
    factory: Any
    value: str = "elsewhere:thing"

    def load(self) -> Any:
        if isinstance(self.factory, Exception):
            raise self.factory
        return self.factory


def plugged(monkeypatch: pytest.MonkeyPatch, *points: Point) -> Registry[Thing]:
    """A new registry whose entry points are these."""
    monkeypatch.setattr(
        "feddkd.spec.registry.entry_points",
        lambda group: points if group == "feddkd.things" else (),
    )
    return Registry("thing", "feddkd.things")


def test_plug_ins_are_found_by_name_and_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    def thing(*, size: Count = 3) -> Thing:
        return Thing(size)

    registry = plugged(monkeypatch, Point("thing", thing))
    assert registry.one("thing(size=4)").size == 4
    assert list(registry) == ["thing"]
    with pytest.raises(InputError, match=r"'thong' .*'thing'.*; there are: thing"):
        registry.one("thong()")


def test_a_method_of_another_package_is_a_method(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*, patience: Count = 3) -> Method:
        return fedavg(epochs=patience)

    monkeypatch.setattr(
        "feddkd.spec.registry.entry_points",
        lambda group: [Point("slow", slow)] if group == "feddkd.methods" else [],
    )
    monkeypatch.setattr(METHODS, "_factories", dict(METHODS._factories))
    monkeypatch.setattr(METHODS, "_plugins_loaded", False)
    assert str(parse("slow(patience=2) | dkd()")) == "slow(patience=2) | dkd()"


def test_a_method_prints_as_its_text_and_one_made_by_hand_names_its_phases() -> None:
    method = parse("fedavg(lr=0.5) | dkd()")
    assert repr(method) == str(method) == "fedavg(lr=0.5) | dkd()"
    assert "'local', 'distil'" in repr(replace(method, calls=()))


def test_a_plug_in_that_registered_itself_on_import_is_left_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def thing() -> Thing:
        return Thing(1)

    registry = plugged(monkeypatch, Point("thing", thing))
    registered = registry.register(thing)
    assert list(registry) == ["thing"]
    assert registry["thing"] is registered


def untyped(size=3):  # type: ignore[no-untyped-def]
    return Thing(size)


@pytest.mark.parametrize("broken", [ImportError("no module named elsewhere"), untyped])
def test_a_plug_in_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, broken: Any
) -> None:
    registry = plugged(monkeypatch, Point("thing", broken))
    with pytest.raises(InputError, match=r"'thing' \(elsewhere:thing\) of feddkd.things"):
        registry.one("thing()")
