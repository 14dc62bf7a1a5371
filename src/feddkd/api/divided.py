"""Data in memory that `simulate` takes: divided by the user, or by a partition."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import Tensor

from feddkd.data import division
from feddkd.data.conversion import has_axes, in_words, is_data_set, is_pair, joined
from feddkd.data.examples import Data, Examples, examples, from_arrays
from feddkd.data.federation import Federation, assemble, of_parts
from feddkd.data.partitions.registry import find_partition
from feddkd.data.sources.python_source import find_source
from feddkd.data.transforms import transform
from feddkd.data.versions import with_versions
from feddkd.errors import InputError
from feddkd.experiment.description import Fraction
from feddkd.spec.types import Count, Whole, checked
from feddkd.tasks.task import Task
from feddkd.trees import first_tensor


def divide(
    data: Any,
    partition: str = "iid()",
    clients: int = 10,
    *,
    validation: float = 0.1,
    public: float = 0.0,
    client_tests: Literal["auto", "own"] = "auto",
    seed: int = 0,
    folder: str | Path | None = None,
) -> Federation:
    """Return data divided among clients by a partition, for `simulate(clients=...)`.

    Args:
        data: A pair (train, test) of examples as `simulate` takes them, such as ((x, y), (x, y)) or
            two torch data sets; or what `feddkd.from_table` returns; or a data source's text, as in
            "digits".
        partition: How the examples are divided, as in "dirichlet(alpha=0.1)" or "owners()".
        clients: The number of clients.
        validation: The share of the training examples that choose the best round.
        public: The share of the clients' examples that the server has instead.
        client_tests: "own": each client has test and validation examples like its training
            examples.
        seed: Decides the draws. The same numbers as in an experiment with the key `split_seed`.
        folder: The folder with the files of a data source.
    """
    steps = ""
    if isinstance(data, str):
        source = find_source(data)
        data, steps = source.load(None if folder is None else Path(folder)), source.transform
    elif is_pair(data):
        data = from_arrays(data[0], data[1], class_labels=None)
    if not isinstance(data, Data):
        raise InputError(
            "data must be a pair (train, test), Data, or the text of a source; not"
            f" {in_words(data)}"
        )
    divided, _ = division.divide(
        data,
        find_partition(checked(partition, str, "partition")),
        transform(steps, data.scale),
        clients=checked(clients, Count, "clients"),
        training=None,
        validation=checked(validation, Fraction, "validation"),
        key=(checked(seed, Whole, "seed"),),
        public=checked(public, Fraction, "public"),
        own_tests=checked(client_tests, Literal["auto", "own"], "client_tests") == "own",
    )
    return divided


def gathered(
    clients: Any, test: Any, client_tests: Any, validation: Any, public: Any, task: Task
) -> Federation:
    """Return the federation of what a user passes to `simulate`."""
    if isinstance(clients, Federation):
        if any(given is not None for given in (test, client_tests, validation, public)):
            raise InputError(
                "clients from feddkd.divide have their test, validation and public examples: leave"
                " test, validation and public out"
            )
        return clients
    _check_clients(clients)
    own = [] if client_tests is None else list(client_tests)
    _check_tests(test, own, len(clients), task)
    others = {"test": test, "validation": validation, "public": public}
    given = {name: part for name, part in others.items() if part is not None}
    class_labels = "labels" in task.offers
    together = _read_together(clients, own, given, class_labels)
    if together is not None:
        return together
    read = partial(_examples, class_labels=class_labels)
    parts = [read(client, f"client {k}") for k, client in enumerate(clients)]
    parts += [read(part, f"client_tests, client {k}") for k, part in enumerate(own)]
    parts, steps = with_versions([*parts, *(read(part, name) for name, part in given.items())])
    ends = len(clients), len(clients) + len(own)
    rest = dict(zip(given, parts[ends[1] :], strict=True))
    return assemble(
        parts[: ends[0]],
        rest.get("test"),
        rest.get("validation"),
        transform(steps),
        rest.get("public"),
        parts[ends[0] : ends[1]],
    )


def with_groups(federation: Federation, groups: Any) -> Federation:
    """Return the federation with the groups of its test examples that a user passes."""
    if groups is None:
        return federation
    own = federation.own_test
    lists = [federation.test] if own is None else list(own)
    try:
        parts = [groups] if own is None else groups
        named = [np.array([str(name) for name in np.asarray(part).tolist()]) for part in parts]
    except (TypeError, ValueError):
        raise InputError(f"groups must be a list of names or numbers, not {groups!r}") from None
    wanted = [len(indices) for indices in lists]
    if (given := [len(part) for part in named]) != wanted:
        whose = "of the test examples" if own is None else "of the clients' test examples"
        raise InputError(f"groups has the lengths {given}, and those {whose} are {wanted}")
    whole = np.full(len(first_tensor(federation.y)), "", dtype=object)
    whole[np.concatenate(lists)] = np.concatenate(named)
    return replace(federation, groups=whole.astype(str))


def _read_together(
    clients: Sequence[Any], own: Sequence[Any], others: Mapping[str, Any], class_labels: bool
) -> Federation | None:
    """Return the federation of arrays of one kind: checked at once, for many clients.

    None if they are something else, or wrong; then the parts are read one by one, and an error
    names the part.
    """
    pair = joined([*clients, *own, *others.values()]) if clients else None
    if pair is None:
        return None
    try:
        whole = examples(pair, class_labels)
    except InputError:
        return None
    sizes = [[len(y) for _, y in parts] for parts in (clients, own, others.values())]
    return of_parts(
        whole, sizes[0], sizes[1], dict(zip(others, sizes[2], strict=True)), transform("")
    )


def _check_clients(clients: Any) -> None:
    """Raise InputError, which says how to pass them, if clients are not a list of examples."""
    if isinstance(clients, Data):
        raise InputError('clients must be divided: feddkd.divide(data, "iid()", clients=10)')
    if isinstance(clients, Mapping):
        raise InputError(
            "clients must be a list with the examples of each client, not a"
            f" {type(clients).__name__}: give list(clients.values())"
        )
    undivided = is_data_set(clients) and not isinstance(clients, Sequence)
    if isinstance(clients, int | str) or undivided:
        raise InputError(
            f"clients must be a list with the examples of each client, not {in_words(clients)};"
            " feddkd.divide((train, test), 'iid()', clients=10) divides a data set"
        )
    if not isinstance(clients, Sequence):
        raise InputError(
            f"clients must be a list with the examples of each client, not {in_words(clients)}"
        )
    if is_pair(clients) and all(isinstance(part, Tensor | np.ndarray) for part in clients):
        raise InputError(
            "clients must be a list with the examples of each client, as in [(x0, y0), (x1, y1)];"
            " this is one pair (x, y)"
        )


def _check_tests(test: Any, own: Sequence[Any], clients: int, task: Task) -> None:
    """Raise InputError if there are no tests, or if tests of clients are at a wrong place."""
    if own and len(own) != clients:
        raise InputError(f"client_tests has {len(own)} parts, and there are {clients} clients")
    if test is None and not own:
        raise InputError("test is missing: give the examples of the test set, as in test=(x, y)")
    by_client = isinstance(test, list) and len(test) == clients and all(map(is_pair, test))
    if by_client and "labels" in task.offers and all(has_axes(y) for _, y in test):
        raise InputError(
            "test is one pair (x, y); client_tests takes a list with one for each client"
        )


def _examples(given: Any, whose: str, class_labels: bool) -> Examples:
    try:
        return examples(given, class_labels)
    except InputError as error:
        raise InputError(f"{whose}: {error}") from error
