"""Data in memory that `simulate` takes: divided by the user, or by a partition."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from feddkd.data import federation
from feddkd.data.conversion import in_words, is_pair
from feddkd.data.examples import Data, Examples, examples
from feddkd.data.federation import Federation, assemble
from feddkd.data.partitions.registry import find_partition
from feddkd.data.sources.python_source import find_source
from feddkd.data.transforms import transform
from feddkd.data.versions import with_versions
from feddkd.errors import InputError
from feddkd.experiment.description import Fraction
from feddkd.spec.types import Count, Whole, checked
from feddkd.tasks.task import Task


def divide(
    data: Data | str,
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
        data: Data, as `feddkd.from_table` returns them, or a data source's text, as in "digits".
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
    if not isinstance(data, Data):
        raise InputError(f"data must be Data or the text of a data source, not {in_words(data)}")
    divided, _ = federation.divide(
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


def gathered(clients: Any, test: Any, validation: Any, public: Any, task: Task) -> Federation:
    """Return the federation of what a user passes to `simulate`."""
    if isinstance(clients, Federation):
        if any(given is not None for given in (test, validation, public)):
            raise InputError(
                "clients from feddkd.divide have their test, validation and public examples: leave"
                " test, validation and public out"
            )
        return clients
    _check_clients(clients)
    if test is None:
        raise InputError("test is missing: give the examples of the test set, as in test=(x, y)")
    read = partial(_examples, class_labels="labels" in task.offers)
    parts = [read(client, f"client {k}") for k, client in enumerate(clients)]
    others = {"test": test, "validation": validation, "public": public}
    given = {name: part for name, part in others.items() if part is not None}
    parts, steps = with_versions([*parts, *(read(part, name) for name, part in given.items())])
    rest = dict(zip(given, parts[len(clients) :], strict=True))
    return assemble(
        parts[: len(clients)],
        rest["test"],
        rest.get("validation"),
        transform(steps),
        rest.get("public"),
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
    if not isinstance(clients, Sequence) or isinstance(clients, str):
        raise InputError(
            f"clients must be a list with the examples of each client, not {in_words(clients)}"
        )
    if is_pair(clients) and all(hasattr(part, "shape") for part in clients):
        raise InputError(
            "clients must be a list with the examples of each client, as in [(x0, y0), (x1, y1)];"
            " this is one pair (x, y)"
        )


def _examples(given: Any, whose: str, class_labels: bool) -> Examples:
    try:
        return examples(given, class_labels)
    except InputError as error:
        raise InputError(f"{whose}: {error}") from error
