"""Local training alone: Yu, Bagdasaryan, Shmatikov, "Salvaging federated learning by local
adaptation", arXiv:2002.04758, where it is the baseline that a client compares with.

    w_k <- local training of w_k on client k's own examples;   nothing is sent

Every client keeps its own model, which continues from round to round, and is evaluated on its own
tests. A method that does not beat it gains nothing from the other clients. The options are those
of FedAvg's local training. The optimiser restarts in every round, as in FedAvg.
"""

from feddkd.method import Method
from feddkd.methods.local import Local, Variant, local_training
from feddkd.methods.registry import METHODS


@METHODS.register
def local_only(local: Local) -> Method:
    """Each client trains alone: w_k <- local training of w_k, nothing is sent."""
    return local_training(local, Variant(private="model"))
