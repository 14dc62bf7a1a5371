"""All predictions of the global model at once, for metrics that are no sums over examples."""

from collections.abc import Sequence

import torch

from feddkd.data.batches import Source
from feddkd.data.federation import SERVER
from feddkd.engines.client import read
from feddkd.engines.interface import Engine
from feddkd.engines.local import LocalEngine
from feddkd.rounds.metrics import Metric
from feddkd.tensors import Groups
from feddkd.trees import cat, take

AT_ONCE = 1000  # examples in one forward pass


def whole_values(
    engine: Engine, run: int, state: Groups, source: Source, metrics: Sequence[Metric]
) -> dict[str, float]:
    """Return the values of the metrics that need all outputs and targets of a set at once."""
    wanted = {metric.name: metric.whole for metric in metrics if metric.whole is not None}
    if not wanted:
        return {}
    assert isinstance(engine, LocalEngine)  # `Simulation` refuses others
    federation = engine.federations[run]
    indices, outputs = federation.indices(source, SERVER), []
    with torch.no_grad():
        for start in range(0, len(indices), AT_ONCE):
            part = indices[start : start + AT_ONCE]
            batch = read(federation, part, 0, engine.dtype, random=False)
            given = (state["params"], state["buffers"], batch.x)
            outputs.append(engine.model(*given, mode="eval", key=batch.key).logits)
    target = take(federation.y, torch.from_numpy(indices).to(federation.device))
    output = cat(outputs)
    return {name: whole(output, target) for name, whole in wanted.items()}
