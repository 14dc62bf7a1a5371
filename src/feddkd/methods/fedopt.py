"""FedAvgM, FedAdam, FedYogi, FedAdagrad, the usual names of FedAvg with an optimiser at the server:
Reddi et al., "Adaptive federated optimization", ICLR 2021, arXiv:2003.00295; FedAvgM: Hsu, Qi,
Brown, arXiv:1909.06335.

    fedavg(...) | server_momentum(...), and so on: the formulas are in server_optimisers.py

The server's options carry the prefix `server_` where a client's optimiser has options of that name.
The paper weighs clients equally in Algorithm 2 and by examples in its experiments; by examples
here, as in FedAvg.
"""

from feddkd.method import Method
from feddkd.methods import server_optimisers
from feddkd.methods.aggregation import Gathering
from feddkd.methods.fedavg import fedavg
from feddkd.methods.local import Local
from feddkd.methods.registry import METHODS
from feddkd.spec.types import Momentum, NonNegative, Positive


@METHODS.register
def fedavgm(
    local: Local,
    gathering: Gathering,
    *,
    server_lr: Positive = 1.0,
    server_lr_decay: Positive = 1.0,
    server_momentum: Momentum = 0.9,
    server_nesterov: bool = False,
) -> Method:
    """FedAvg with momentum at the server: v <- b v + (w_t - wbar), w <- w_t - lr v."""
    return fedavg(**vars(local), **vars(gathering)) | server_optimisers.server_momentum(
        lr=server_lr, lr_decay=server_lr_decay, momentum=server_momentum, nesterov=server_nesterov
    )


@METHODS.register
def fedadam(
    local: Local,
    gathering: Gathering,
    *,
    server_lr: Positive = 0.01,
    server_lr_decay: Positive = 1.0,
    server_beta1: Momentum = 0.9,
    server_beta2: Momentum = 0.99,
    tau: Positive = 1e-3,
    initial: NonNegative | None = None,
    bias_correction: bool = False,
) -> Method:
    """FedAvg with Adam at the server: g = w_t - wbar, w <- w_t - lr m/(sqrt(v) + tau)."""
    return fedavg(**vars(local), **vars(gathering)) | server_optimisers.server_adam(
        lr=server_lr,
        lr_decay=server_lr_decay,
        beta1=server_beta1,
        beta2=server_beta2,
        tau=tau,
        initial=initial,
        bias_correction=bias_correction,
    )


@METHODS.register
def fedyogi(
    local: Local,
    gathering: Gathering,
    *,
    server_lr: Positive = 0.01,
    server_lr_decay: Positive = 1.0,
    server_beta1: Momentum = 0.9,
    server_beta2: Momentum = 0.99,
    tau: Positive = 1e-3,
    initial: NonNegative | None = None,
) -> Method:
    """FedAvg with Yogi at the server: as fedadam, with v <- v - (1-b2) g^2 sign(v - g^2)."""
    return fedavg(**vars(local), **vars(gathering)) | server_optimisers.server_yogi(
        lr=server_lr,
        lr_decay=server_lr_decay,
        beta1=server_beta1,
        beta2=server_beta2,
        tau=tau,
        initial=initial,
    )


@METHODS.register
def fedadagrad(
    local: Local,
    gathering: Gathering,
    *,
    server_lr: Positive = 0.1,
    server_lr_decay: Positive = 1.0,
    server_beta1: Momentum = 0.0,
    tau: Positive = 1e-3,
    initial: NonNegative | None = None,
) -> Method:
    """FedAvg with Adagrad at the server: as fedadam, with v <- v + g^2."""
    return fedavg(**vars(local), **vars(gathering)) | server_optimisers.server_adagrad(
        lr=server_lr, lr_decay=server_lr_decay, beta1=server_beta1, tau=tau, initial=initial
    )
