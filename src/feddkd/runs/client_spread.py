"""The differences of a metric between clients, from the values of one row."""

import statistics
from collections.abc import Mapping
from typing import Any

from feddkd.rounds.metrics import Metric, shown_in

SHARES = {"10 %": 0.1, "25 %": 0.25, "50 %": 0.5, "75 %": 0.75, "90 %": 0.9}


def client_spread(row: Mapping[str, Any], metric: Metric) -> dict[str, Any] | None:
    """Return number, mean, deviation, quantiles, and the mean of the worst tenth of the clients.

    The worst tenth has at least one client. Clients without a value are left out; None if a row
    has no values of clients.
    """
    values = [value for value in row.get(metric.client_key) or () if value == value]
    found = sorted(value for value in values if value is not None)
    if not found:
        return None
    by_rank = sorted(found, key=metric.rank)
    return {
        "clients": len(found),
        "mean": statistics.fmean(found),
        "std": statistics.pstdev(found),
        "worst_tenth": statistics.fmean(by_rank[: max(1, round(len(found) / 10))]),
        "quantiles": {name: _quantile(found, share) for name, share in SHARES.items()},
    }


def client_spreads(row: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the differences between clients for each metric that reports show."""
    spreads = {metric.name: client_spread(row, metric) for metric in shown_in(row)}
    return {name: spread for name, spread in spreads.items() if spread is not None}


def _quantile(ordered: list[float], share: float) -> float:
    """Return a quantile as numpy does by default: linear between the two nearest values."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
