"""Data sharing: Zhao, Li, Lai, Suda, Civin, Chandra, "Federated learning with non-IID data",
arXiv:1806.00582.

    FedAvg, each client on its own examples and the public ones: w = sum_k (n_k + p) / sum_i (n_i +
    p) w_k

All clients get all p public examples, alpha = 100% in the paper's terms (a random part of them for
each client is not offered: set a smaller public part aside); they count in a client's weight as any
others do. `warmup_steps` trains the first model on the public examples at the server, in
mini-batches and by the optimiser that clients use, before the first round's exchange. That the
public examples travel once to every client is not among the counted bytes.
"""

from dataclasses import replace

from feddkd.method import Method
from feddkd.methods.aggregation import Gathering
from feddkd.methods.local import Local, Variant, local_training
from feddkd.methods.registry import METHODS
from feddkd.spec.schedules import Repeat
from feddkd.spec.types import Whole


@METHODS.register
def data_sharing(local: Local, gathering: Gathering, *, warmup_steps: Whole = 0) -> Method:
    """FedAvg with public examples joined to every client's own: w = sum_k (n_k+p)/sum_i (n_i+p)
    w_k.
    """
    shared = local_training(local, Variant(source="train+public"), gathering)
    if not warmup_steps:
        return shared
    (phase,) = local_training(replace(local, steps=warmup_steps), Variant(source="public")).phases
    return Method(
        (
            replace(phase, name="warm up", at="server", leaves=frozenset(), repeat=Repeat(last=1)),
            *shared.phases,
        )
    )
