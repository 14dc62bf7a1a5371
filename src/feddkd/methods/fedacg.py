"""FedACG: Kim, Kim, Han, "Communication-efficient federated learning with accelerated client
gradient", CVPR 2024, arXiv:2201.03172.

    clients start from s_t = w_t + momentum m_t,   local loss = CE + beta/2 |w - s_t|^2
    m_{t+1} = momentum m_t + (wbar - s_t),   w_{t+1} = w_t + m_{t+1} = wbar

The server looks ahead along its momentum before it sends the model, so clients receive one model
and upload one, as in FedAvg. The published code has no factor 1/2 before its 0.001. Models are
averaged by examples. The momentum is of shared parameters; buffers are averaged.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from feddkd.method import Method, Part
from feddkd.methods.aggregation import Gathering
from feddkd.methods.local import Local, Variant, local_training, take_average
from feddkd.methods.losses import proximal
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Model
from feddkd.spec.types import Momentum, NonNegative
from feddkd.tensors import Groups, Tensors, add, zeros


@METHODS.register
def fedacg(
    local: Local,
    gathering: Gathering,
    *,
    server_momentum: Momentum = 0.85,
    beta: NonNegative = 0.001,
) -> Method:
    """FedAvg from a look-ahead: clients start at s = w_t + b m; m <- b m + (wbar - s)."""
    variant = Variant(
        terms=(proximal(beta, "sum"),),
        server=partial(_server, server_momentum),
        opens=lambda model, state, world: {"momentum": zeros(state["params"])},
    )
    (phase,) = local_training(local, variant, gathering).phases
    return Method((replace(phase, parts=partial(_ahead, server_momentum)),))


def _ahead(
    momentum: float, state: Groups, cohort: tuple[int, ...], repetition: int
) -> Sequence[Part]:
    """Return the whole cohort, with the look-ahead in place of the model."""
    return [Part(cohort, {"params": add(state["params"], state["momentum"], momentum)})]


def _server(
    momentum: float, model: Model, state: Groups, collected: Groups, rates: Tensors
) -> Groups:
    """Take the average, and the momentum b m + (wbar - s) = wbar - w_t."""
    moved = add(collected["params"], state["params"], -1)
    return {**take_average(model, state, collected, rates), "momentum": moved}
