"""Records -> the numbers behind the page's charts, as values that JSON can hold."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from feddkd.reports import curves
from feddkd.reports.families import confused, families, headline_of, labels
from feddkd.reports.heterogeneity import heterogeneity
from feddkd.rounds.metrics import Metric, shown_in
from feddkd.runs.record import Counts, Record

if TYPE_CHECKING:  # the page of records needs no torch
    from feddkd.rounds.loop import Row

CELLS = 2000  # of a picture of clients and rounds; with more, some rounds are left out
CLIENTS = 200  # of a picture of clients and classes
THEORY = {
    "L2": "L2' after DKD: the clients' models against the shared one",
    "L2_average": "L2' before DKD: the clients' models against the plain average",
    "L1": "L1': the clients' models against the labels",
    "bound": "L1' + L2' after DKD: the bound",
    "bound_average": "L1' + L2' before DKD: the bound of the plain average",
}
ByClient = Callable[["Row"], dict[int, float | None]]
DIAGNOSTICS: dict[str, ByClient] = {
    "training loss of the client's own model": lambda row: _active(row, "client_loss"),
    "training accuracy of the client's own model in %": lambda row: _active(
        row, "client_accuracy", 100
    ),
    "training loss of the global model": lambda row: _active(row, "global_loss"),
    "training accuracy of the global model in %": lambda row: _active(row, "global_accuracy", 100),
}


def figures(records: Sequence[Record]) -> dict[str, Any]:
    """Return the numbers of all charts."""
    groups, first = families(records), headline_of(records)
    named = list(zip(labels(groups), groups, strict=True))
    metrics = dict.fromkeys(metric for record in records for metric in shown_in(record.history[0]))
    methods = [
        {"label": label, "seeds": len(group), **_curves(group, list(metrics), first)}
        for label, group in named
    ]
    targets = {record.manifest["experiment"].get("target") for record in records} - {None}
    by_client = [_by_client(label, group[0], list(metrics)) for label, group in named]
    return {
        "methods": methods,
        "metrics": {metric.name: _shown(metric) for metric in metrics},
        "axes": {
            axis: title
            for axis, title in curves.AXES.items()
            if all(axis in method["x"] for method in methods)
        },
        "targets": sorted(first.scale * target for target in targets),
        "theory": {
            name: title
            for name, title in THEORY.items()
            if any(name in method for method in methods)
        },
        "clients": [picture for picture in by_client if picture is not None],
        "partitions": _partitions(records),
        "confusions": _confusions(named),
    }


def _shown(metric: Metric) -> dict[str, str]:
    """Return the texts with which the page shows a metric."""
    return {
        "title": metric.title,
        "heading": metric.heading,
        "unit": metric.unit,
        "difference": metric.difference_unit,
    }


def _curves(group: Sequence[Record], metrics: Sequence[Metric], first: Metric) -> dict[str, Any]:
    """Return the curves of a family, and what they can be drawn against."""
    costs = curves.spent(group).items()
    on_test = {metric.name: curves.on_test(metric) for metric in metrics}
    others = {"gain": curves.gain(first), **{name: curves.theory(name) for name in THEORY}}
    return {
        "x": {axis: _numbers(amounts, 8) for axis, amounts in costs},
        "metrics": _with_spread(group, on_test),
        **_with_spread(group, others),
    }


def _with_spread(group: Sequence[Record], quantities: dict[str, curves.Quantity]) -> dict[str, Any]:
    """Return mean and deviation of the quantities that a family has."""
    drawn = {}
    for name, quantity in quantities.items():
        band = curves.band(group, quantity)
        if band is not None:
            drawn[name] = {"mean": _numbers(band.mean), "std": _numbers(band.std)}
    return drawn


def _by_client(label: str, record: Record, metrics: Sequence[Metric]) -> dict[str, Any] | None:
    """Return tables of clients and rounds for one seed, with some of the rounds if there are many;
    None if rows say nothing about single clients.
    """
    clients = record.manifest["canonical"]["clients"]
    spaced = np.linspace(0, len(record.history) - 1, max(2, CELLS // clients))
    rows = [record.history[number] for number in np.unique(spaced.round().astype(int))]
    quantities = {metric.heading: _of_every_client(metric) for metric in metrics} | DIAGNOSTICS
    tables = {}
    for title, read in quantities.items():
        columns = [read(row) for row in rows]
        if any(columns):
            tables[title] = [
                _numbers((column.get(client) for column in columns), 4) for client in range(clients)
            ]
    if not tables:
        return None
    name = f"{label}, seed {record.manifest['canonical']['seed']}"
    return {"label": name, "rounds": [row["round"] for row in rows], "tables": tables}


def _of_every_client(metric: Metric) -> ByClient:
    """Return a function that reads a metric on the clients' test sets from a row."""

    def read(row: "Row") -> dict[int, float | None]:
        values = row.get(metric.client_key) or ()
        return {client: _scaled(value, metric.scale) for client, value in enumerate(values)}

    return read


def _active(row: "Row", name: str, scale: float = 1.0) -> dict[int, float | None]:
    """Return a diagnostic of the clients that took part to the end of a round; nothing if their
    numbers are not certain.
    """
    lost = {client for _, _, client, _ in row.get("missing", ())}
    clients = [client for client in row["clients"] if client not in lost]
    values = row.get("diagnostics", {}).get(name, ())
    if len(values) != len(clients):
        return {}
    return {client: _scaled(value, scale) for client, value in zip(clients, values, strict=True)}


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else scale * value


def _partitions(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return each partition once: methods with the same seed share theirs."""
    first: dict[str, Record] = {}
    for record in records:
        if record.partition is not None:
            first.setdefault(record.manifest["partition"]["digest"], record)
    shown = [(record, record.partition) for record in first.values()]
    return [_partition(record, held) for record, held in shown if held is not None]


def _partition(record: Record, held: Counts) -> dict[str, Any]:
    canonical, spelled = record.manifest["canonical"], record.manifest["experiment"]
    measures = heterogeneity(held.counts).items()
    return {
        "label": f"{spelled['partition']} of {canonical['data']}, seed {canonical['split_seed']}",
        "classes": held.classes,
        "counts": held.counts[:CLIENTS],
        "clients": len(held.counts),
        "figures": {name: float(f"{value:.3g}") for name, value in measures},
    }


def _confusions(named: Sequence[tuple[str, Sequence[Record]]]) -> list[dict[str, Any]]:
    shown = []
    for label, group in named:
        matrix = confused(group)
        if matrix is not None:
            shown.append({"label": label, **matrix._asdict()})
    return shown


def _numbers(values: Iterable[float | None], digits: int = 5) -> list[float | int | None]:
    """Return numbers with few digits; null for those that are not finite."""
    return [
        None if value is None or not math.isfinite(value) else _short(float(f"{value:.{digits}g}"))
        for value in values
    ]


def _short(value: float) -> float | int:
    return int(value) if value == int(value) else value
