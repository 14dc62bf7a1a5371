"""The optimisers by name."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

from feddkd.errors import InputError, choices
from feddkd.methods.optimisers.adam import adam, adamw, lamb
from feddkd.methods.optimisers.optimiser import Optimiser
from feddkd.methods.optimisers.second_moment import adagrad, rmsprop
from feddkd.methods.optimisers.sgd import sgd

OptimiserName = Literal["sgd", "adam", "adamw", "adagrad", "rmsprop", "lamb"]
OPTIMISERS: dict[str, Callable[..., Optimiser]] = {
    "sgd": sgd,
    "adam": adam,
    "adamw": adamw,
    "adagrad": adagrad,
    "rmsprop": rmsprop,
    "lamb": lamb,
}
TAKES = {name: frozenset(inspect.signature(make).parameters) for name, make in OPTIMISERS.items()}


def optimiser_from(
    name: OptimiserName, options: Mapping[str, Any], unset: Mapping[str, Any]
) -> Optimiser:
    """Return the optimiser of this name, with those of the options that it takes.

    Raise InputError if another optimiser's option differs from its value in `unset`.
    """
    for key in sorted(frozenset[str]().union(*TAKES.values()) - TAKES[name]):
        if options[key] != unset[key]:
            raise InputError(
                f"optimiser={name!r} does not go with {key}={options[key]!r}: it takes"
                f" {choices(TAKES[name])}"
            )
    return OPTIMISERS[name](**{key: options[key] for key in TAKES[name]})
