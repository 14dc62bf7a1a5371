"""Records -> the numbers behind the page's charts, as JSON can carry them."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from feddkd.reports import curves
from feddkd.reports.heterogeneity import heterogeneity
from feddkd.reports.tables import confused, families, labels
from feddkd.rounds.loop import Row
from feddkd.runs.record import Counts, Record

CELLS = 2000  # of a picture of clients x rounds: rounds are left out beyond it
CLIENTS = 200  # of a picture of clients x classes
THEORY = {
    "L2": "L2' after DKD: the clients' models against the shared one",
    "L2_average": "L2' before DKD: the clients' models against the plain average",
    "L1": "L1': the clients' models against the labels",
    "bound": "L1' + L2' after DKD: the bound",
    "bound_average": "L1' + L2' before DKD: the bound of the plain average",
}
BY_CLIENT: dict[str, Callable[[Row], dict[int, float | None]]] = {
    "test accuracy in %": lambda row: _all(row.get("test_client_accuracy"), 100),
    "training loss of the client's own model": lambda row: _active(row, "client_loss"),
    "training accuracy of the client's own model in %": lambda row: _active(
        row, "client_accuracy", 100
    ),
    "training loss of the global model": lambda row: _active(row, "global_loss"),
    "training accuracy of the global model in %": lambda row: _active(row, "global_accuracy", 100),
}


def figures(records: Sequence[Record]) -> dict[str, Any]:
    groups = families(records)
    named = list(zip(labels(groups), groups, strict=True))
    methods = [{"label": label, "seeds": len(group), **_curves(group)} for label, group in named]
    targets = {record.manifest["experiment"].get("target") for record in records} - {None}
    return {
        "methods": methods,
        "axes": {
            axis: title
            for axis, title in curves.AXES.items()
            if all(axis in method["x"] for method in methods)
        },
        "targets": sorted(100 * target for target in targets),
        "theory": {
            name: title
            for name, title in THEORY.items()
            if any(name in method for method in methods)
        },
        "clients": [found for label, group in named if (found := _by_client(label, group[0]))],
        "partitions": _partitions(records),
        "confusions": [
            {"label": label, **counts._asdict()}
            for label, group in named
            if (counts := confused(group))
        ],
    }


def _curves(group: Sequence[Record]) -> dict[str, Any]:
    quantities = {
        "accuracy": curves.accuracy,
        "gain": curves.gain,
        **{name: curves.theory(name) for name in THEORY},
    }
    found = {name: curves.band(group, quantity) for name, quantity in quantities.items()}
    known = {
        name: {"mean": _numbers(b.mean), "std": _numbers(b.std)}
        for name, b in found.items()
        if b is not None
    }
    return {
        "x": {axis: _numbers(amounts, 8) for axis, amounts in curves.spent(group).items()},
        **known,
    }


def _by_client(label: str, record: Record) -> dict[str, Any] | None:
    """Client x round for one seed, with only some of the rounds where there are many."""
    clients = record.manifest["canonical"]["clients"]
    wanted = np.unique(
        np.linspace(0, len(record.history) - 1, max(2, CELLS // clients)).round().astype(int)
    )
    rows = [record.history[at] for at in wanted]
    found = {title: [read(row) for row in rows] for title, read in BY_CLIENT.items()}
    tables = {
        title: [_numbers((each.get(client) for each in columns), 4) for client in range(clients)]
        for title, columns in found.items()
        if any(columns)
    }
    title = f"{label}, seed {record.manifest['canonical']['seed']}"
    return (
        {"label": title, "rounds": [row["round"] for row in rows], "tables": tables}
        if tables
        else None
    )


def _all(values: Sequence[float | None] | None, scale: float) -> dict[int, float | None]:
    return {client: _scaled(value, scale) for client, value in enumerate(values or ())}


def _active(row: Row, name: str, scale: float = 1.0) -> dict[int, float | None]:
    """Of the clients that were there to the end; nothing where it is not certain who they were."""
    lost = {client for _, _, client, _ in row.get("missing", ())}
    values, clients = (
        row.get("diagnostics", {}).get(name, ()),
        [client for client in row["clients"] if client not in lost],
    )
    if len(values) != len(clients):
        return {}
    return {client: _scaled(value, scale) for client, value in zip(clients, values, strict=True)}


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else scale * value


def _partitions(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Each once: methods of one seed share theirs."""
    found = {
        record.manifest["partition"]["digest"]: record
        for record in reversed(records)
        if record.partition is not None
    }
    return [
        _partition(record, record.partition)
        for record in reversed(found.values())
        if record.partition is not None
    ]


def _partition(record: Record, held: Counts) -> dict[str, Any]:
    canonical = record.manifest["canonical"]
    return {
        "label": (
            f"{record.manifest['experiment']['partition']} of {canonical['data']}, seed"
            f" {canonical['split_seed']}"
        ),
        "classes": held.classes,
        "counts": held.counts[:CLIENTS],
        "clients": len(held.counts),
        "figures": {
            name: float(f"{value:.3g}") for name, value in heterogeneity(held.counts).items()
        },
    }


def _numbers(values: Iterable[float | None], digits: int = 5) -> list[float | int | None]:
    """Short; null for what is not finite."""
    return [
        None if value is None or not math.isfinite(value) else _short(float(f"{value:.{digits}g}"))
        for value in values
    ]


def _short(value: float) -> float | int:
    return int(value) if value == int(value) else value
