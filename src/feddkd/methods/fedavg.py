"""FedAvg: McMahan, Moore, Ramage, Hampson, Aguera y Arcas, "Communication-efficient learning of
deep networks from decentralized data", AISTATS 2017, arXiv:1602.05629.

    w_{t+1} = sum_k n_k / (sum_i n_i) w_k,   w_k = local training from w_t

n_k is the number of examples of client k.
"""

from feddkd.method import Method
from feddkd.methods.aggregation import Gathering
from feddkd.methods.local import Local, local_training
from feddkd.methods.registry import METHODS


@METHODS.register
def fedavg(local: Local, gathering: Gathering) -> Method:
    """Average of locally trained weights: w = sum_k n_k/n w_k."""
    return local_training(local, gathering=gathering)
