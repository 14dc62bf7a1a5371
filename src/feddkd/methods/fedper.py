"""FedPer: Arivazhagan, Aggarwal, Singh, Choudhary, "Federated learning with personalization
layers", arXiv:1912.00818.

    w = (w', h_k),   h_k = the head of client k;   w'_{t+1} = sum_k n_k / (sum_i n_i) w'_k

Clients train body and head together and upload the body alone. A client that has not been asked yet
has the initial head. `names` lists the tensors of the head as patterns, as in names="head.*"; by
default it is the last linear layer. `private` is the same as a piece to put after any method.
"""

from feddkd.method import Method
from feddkd.methods.aggregation import Gathering
from feddkd.methods.local import Local, local_training
from feddkd.methods.private import keeping
from feddkd.methods.registry import METHODS
from feddkd.spec.types import Names


@METHODS.register
def fedper(local: Local, gathering: Gathering, *, names: Names | None = None) -> Method:
    """FedAvg with each client's own head: average w' only, w = (w', h_k)."""
    return keeping(local_training(local, gathering=gathering), names, "head")
