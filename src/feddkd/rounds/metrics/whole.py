"""Metrics of all predictions at once, such as torchmetrics objects.

They are for evaluations that may keep predictions: of the global model, on this machine.
"""

import re
from typing import Any

from feddkd.errors import InputError
from feddkd.rounds.metrics.metric import Metric


def is_object(asked: Any) -> bool:
    """Return True if something measures as torchmetrics do: by reset, update and compute."""
    measures = all(callable(getattr(asked, name, None)) for name in ("reset", "update", "compute"))
    if measures and isinstance(asked, type):
        raise InputError(f"metrics takes an object, {asked.__name__}(...), and not its class")
    return measures


def of_object(asked: Any) -> Metric:
    """Return the metric that such an object computes; its class names it."""
    kind = type(asked).__name__
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind).lower().lstrip("_")

    def whole(output: Any, target: Any) -> float:
        if getattr(target, "shape", None) == output.shape[:1] and output[0].numel() == 1:
            output = output.reshape(target.shape)  # one number, as the tasks take it
        asked.reset()
        try:
            asked.update(output, target)
            return float(asked.compute())
        except (ValueError, RuntimeError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise InputError(f"{kind} cannot be computed of these predictions: {reason}") from error

    return Metric(
        name,
        name.replace("_", " "),
        sums=lambda output, batch: {},
        value=lambda sums: sums[name],
        higher_is_better=getattr(asked, "higher_is_better", None) is not False,
        percent=False,
        by_client=False,
        whole=whole,
    )
