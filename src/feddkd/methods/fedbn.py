"""FedBN: Li, Jiang, Zhang, Kamp, Dou, "FedBN: federated learning on non-IID features via local
batch normalization", ICLR 2021, arXiv:2102.07623.

    w = (w', w_k^BN),   w_k^BN = the batch-norm layers of client k
    w'_{t+1} = sum_k n_k / (sum_i n_i) w'_k

The tensors of batch-norm layers never leave their client. `private="statistics"` keeps only the
running statistics there and averages the affine parameters, as FedGen does with its EMNIST network.
`local_bn` is the same as a piece to put after any other method: fedavg() | local_bn() is fedbn(),
and fedprox() | local_bn() is FedProx with private batch-norm layers.
"""

from typing import Literal

from feddkd.method import Method
from feddkd.methods.aggregation import Gathering
from feddkd.methods.local import Local, Variant, local_training
from feddkd.methods.registry import METHODS


@METHODS.register
def fedbn(
    local: Local, gathering: Gathering, *, private: Literal["norm", "statistics"] = "norm"
) -> Method:
    """FedAvg with batch-norm layers kept at each client: average w' only, w = (w', w_k^BN)."""
    return local_training(local, Variant(private=private), gathering)


@METHODS.register
def local_bn(*, private: Literal["norm", "statistics"] = "norm") -> Method:
    """The method before it, with batch-norm layers kept at each client: w = (w', w_k^BN)."""
    return Method((), frozenset({private}))
