"""Centralised training: McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-efficient
learning of deep networks from decentralized data", AISTATS 2017, arXiv:1602.05629, where it is the
baseline that federated learning is compared with.

    w <- SGD on the examples of all clients together

The server trains one model on the training examples of all clients, as if they lay in one place. A
round has `epochs` passes over them, or `steps` mini-batches. The optimiser restarts in every
round, as that of a client in FedAvg. No client computes, so a run has no communications, no bytes
and no local steps. The server's validation and public examples are not part of the training.
"""

from dataclasses import replace

from feddkd.method import Method
from feddkd.methods.local import Local, Variant, local_training
from feddkd.methods.registry import METHODS


@METHODS.register
def centralised(local: Local) -> Method:
    """One model trained on all clients' examples together: w <- SGD on the union of the D_k."""
    (phase,) = local_training(local, Variant(source="pooled")).phases
    return Method((replace(phase, name="train", at="server", leaves=frozenset()),))
