"""Data sharing: Zhao, Li, Lai, Suda, Civin, Chandra, "Federated learning with non-IID data",
arXiv:1806.00582.

    w_{t+1} = sum_k (n_k + p) / sum_i (n_i + p) w_k
    w_k = local training from w_t on client k's own n_k examples and p public ones

All clients get all p public examples: alpha = 100% in the paper's notation. (A random part of them
for each client is not offered; you may set a smaller public part aside.) The public examples count
in a client's weight like its own. With `warmup_steps` the server first trains the initial model on
the public examples, before the exchange of the first round, with the clients' mini-batches and
optimiser. The bytes that send the public examples once to every client are not counted.
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
    """FedAvg with public examples added to every client's: w = sum_k (n_k+p)/sum_i (n_i+p) w_k."""
    shared = local_training(local, Variant(source="train+public"), gathering)
    if not warmup_steps:
        return shared
    (phase,) = local_training(replace(local, steps=warmup_steps), Variant(source="public")).phases
    warm_up = replace(phase, name="warm up", at="server", leaves=frozenset(), repeat=Repeat(last=1))
    return Method((warm_up, *shared.phases))
