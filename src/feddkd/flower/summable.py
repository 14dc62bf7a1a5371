"""The experiments that secure aggregation can run: those whose server needs only sums."""

from collections.abc import Mapping
from typing import Any

from feddkd.errors import InputError
from feddkd.flower.shares import LEAST
from feddkd.method import Collect, Phase
from feddkd.methods import parse
from feddkd.rounds.selection import find_selection


def check_summable(experiment: Mapping[str, Any], threshold: float) -> None:
    """Raise InputError if an experiment needs more than sums, before anything is run."""
    if not 0.5 < threshold <= 1:
        raise InputError(
            f"threshold is a fraction of the cohort, more than a half and at most 1, not"
            f" {threshold:g}"
        )
    method = parse(experiment["method"])
    if method.codec is not None:
        raise InputError(
            "secure aggregation adds up masked uploads, and compressed uploads cannot be added:"
            f" leave the compression out of {experiment['method']}"
        )
    for phase in method.phases:
        if phase.asks_clients and not _is_summed(phase):
            raise InputError(
                f"secure aggregation gives only sums, but phase {phase.name!r} of"
                f" {experiment['method']} needs every single client's upload; use a method that"
                " averages"
            )
    if experiment["diagnostics"]:
        raise InputError(
            "secure aggregation gives only sums, but diagnostics needs each client's numbers"
        )
    if experiment["availability"] != "always()":
        raise InputError(
            "availability simulates clients that fail; secure aggregation works with real clients"
            " only"
        )
    selection = find_selection(experiment.get("selection", "uniform()"))
    if selection.asks:
        raise InputError(
            f"secure aggregation gives only sums, but selection {str(selection)!r} needs every"
            " single client's loss"
        )
    cohort = experiment["cohort"]
    size = cohort if isinstance(cohort, int) else int(cohort * experiment["clients"] + 1e-9)
    if size < LEAST:
        raise InputError(
            f"secure aggregation sums over at least {LEAST} clients, but a cohort has {size}"
        )


def _is_summed(phase: Phase) -> bool:
    return not (
        phase.unfolds or phase.parts or phase.every or Collect.EVERY in phase.collect.values()
    )
