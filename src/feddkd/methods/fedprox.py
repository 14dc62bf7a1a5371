"""FedProx: Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated optimization in heterogeneous
networks", MLSys 2020, arXiv:1812.06127.

    local loss = CE + mu/2 |w - w_t|^2

`form="mean"` is the form of the FedMAX code: the mean square of each tensor in place of the sum. In
that form mu=10 is a weak pull, as in the FEMNIST table of the FedDKD paper. In the form of the
equation mu=10 with learning rate 0.1 would hold the weights at w_t.
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
