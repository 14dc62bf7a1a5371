"""LG-FedAvg: Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think locally, act
globally: federated learning with local and global representations", arXiv:2001.01523.

    w = (b_k, h),   b_k = the body of client k;   h_{t+1} = sum_k n_k / (sum_i n_i) h_k

The reverse of FedPer: each client keeps its own body, and only the head is uploaded and averaged.
`names` lists the tensors of the head, which are shared, as patterns; by default it is the last
linear layer. The paper's runs start from a model that FedAvg has trained: give it as `initial`. Its
adversarial loss for fair representations is not included.
"""

from feddkd.method import Method
from feddkd.methods.aggregation import Gathering
from feddkd.methods.local import Local, local_training
from feddkd.methods.private import keeping
from feddkd.methods.registry import METHODS
from feddkd.spec.types import Names


@METHODS.register
def lg_fedavg(local: Local, gathering: Gathering, *, names: Names | None = None) -> Method:
    """FedAvg of the head alone, with each client's own body: average h only, w = (b_k, h)."""
    return keeping(local_training(local, gathering=gathering), names, "body")
