"""FedProx: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated optimization in heterogeneous
networks", MLSys 2020, arXiv:1812.06127.

    local loss = CE + mu/2 |w - w_t|^2

`form="mean"` is the form of the FedMAX code, a mean square for each tensor: with it mu=10 is the
mild pull that the FedDKD paper's FEMNIST table shows; in the true form mu=10 with learning rate 0.1
would pin the weights to w_t.
"""

from typing import Literal

from feddkd.method import Method
from feddkd.methods.aggregation import Gathering
from feddkd.methods.local import Local, Variant, local_training
from feddkd.methods.losses import proximal
from feddkd.methods.registry import METHODS
from feddkd.spec.types import NonNegative


@METHODS.register
def fedprox(
    local: Local,
    gathering: Gathering,
    *,
    mu: NonNegative = 0.01,
    form: Literal["sum", "mean"] = "sum",
) -> Method:
    """FedAvg with a pull towards the weights sent: loss = CE + mu/2 |w - w_t|^2."""
    return local_training(local, Variant(terms=(proximal(mu, form),)), gathering)
