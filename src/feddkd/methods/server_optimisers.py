"""Optimisers at the server, pieces to put after any method with a shared model: Reddi, Charles,
Zaheer, Garrett, Rush, Konecny, Kumar, McMahan, "Adaptive federated optimization", ICLR 2021,
arXiv:2003.00295, Algorithm 2; for momentum Hsu, Qi, Brown, "Measuring the effects of non-identical
data distribution for federated visual classification", arXiv:1909.06335.

    w_{t+1} = w_t - optimiser(g_t),   g_t = w_t - w,   w = the model after the round's exchanges
    momentum:  v <- b v + g,   step lr v
    adaptive:  m <- b1 m + (1 - b1) g,   step lr m / (sqrt(v) + tau)
               adam: v <- b2 v + (1 - b2) g^2,   adagrad: v <- v + g^2
               yogi: v <- v - (1 - b2) g^2 sign(v - g^2)

So fedavg() | server_adam() is FedAdam (fedopt.py has the usual names). In fedavg() | dkd() |
server_adam() the pseudo-gradient g_t is the whole change by averaging and distillation. Only shared
parameters are moved; buffers stay averaged. The moments last as long as the run. The defaults
b1 = .9, b2 = .99 (Adagrad: no momentum) and tau = 1e-3 are the paper's. Its learning rates are
tuned for each task; the defaults here are only orders of magnitude to start with.

server_optimiser() has the optimisers of local training, as torch.optim has them: SGD, Adam, AdamW,
Adagrad, RMSprop, LAMB. Its defaults of beta1, beta2 and eps are those of server_adam.

The paper does not correct the bias of the moments and requires v_0 >= tau^2. `initial` is v_0; its
default is tau^2 (Flower: 0). `bias_correction=True` is the step of torch.optim.Adam, with v_0 = 0;
Flower corrects in the same way, but its correction of v also scales tau.
"""

from dataclasses import dataclass
from functools import partial

from feddkd.errors import InputError
from feddkd.method import Method, Phase, World
from feddkd.methods.optimisers import (
    Optimiser,
    OptimiserName,
    adam,
    adaptive,
    optimiser_from,
    sgd,
)
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Model
from feddkd.spec.rate_schedules import ScheduleText, read_schedule
from feddkd.spec.schedules import Rate
from feddkd.spec.types import Momentum, NonNegative, Positive
from feddkd.tensors import Groups, Tensors, add


@METHODS.register
def server_momentum(
    *,
    lr: Positive = 1.0,
    lr_decay: Positive = 1.0,
    momentum: Momentum = 0.9,
    nesterov: bool = False,
    lr_schedule: ScheduleText = None,
) -> Method:
    """Momentum on the change of the round: v <- b v + (w_t - w), w <- w_t - lr v."""
    if nesterov and not momentum:
        raise InputError("server_momentum: nesterov=True does not go with momentum=0")
    return _piece(
        "server_momentum",
        sgd(momentum=momentum, nesterov=nesterov),
        _rate(lr, lr_decay, lr_schedule),
    )


@METHODS.register
def server_adam(
    *,
    lr: Positive = 0.01,
    lr_decay: Positive = 1.0,
    beta1: Momentum = 0.9,
    beta2: Momentum = 0.99,
    tau: Positive = 1e-3,
    initial: NonNegative | None = None,
    bias_correction: bool = False,
    lr_schedule: ScheduleText = None,
) -> Method:
    """Adam on the change of the round: g = w_t - w, w <- w_t - lr m/(sqrt(v) + tau)."""
    if bias_correction and initial is not None:
        raise InputError(
            "server_adam: bias_correction=True does not go with initial=...: it requires v_0 = 0"
        )
    if bias_correction:
        optimiser = adam(beta1=beta1, beta2=beta2, eps=tau)
    else:
        optimiser = adaptive("adam", beta1=beta1, beta2=beta2, tau=tau, initial=initial)
    return _piece("server_adam", optimiser, _rate(lr, lr_decay, lr_schedule))


@METHODS.register
def server_yogi(
    *,
    lr: Positive = 0.01,
    lr_decay: Positive = 1.0,
    beta1: Momentum = 0.9,
    beta2: Momentum = 0.99,
    tau: Positive = 1e-3,
    initial: NonNegative | None = None,
    lr_schedule: ScheduleText = None,
) -> Method:
    """Yogi on the change of the round: as server_adam, with v <- v - (1-b2) g^2 sign(v - g^2)."""
    optimiser = adaptive("yogi", beta1=beta1, beta2=beta2, tau=tau, initial=initial)
    return _piece("server_yogi", optimiser, _rate(lr, lr_decay, lr_schedule))


@METHODS.register
def server_adagrad(
    *,
    lr: Positive = 0.1,
    lr_decay: Positive = 1.0,
    beta1: Momentum = 0.0,
    tau: Positive = 1e-3,
    initial: NonNegative | None = None,
    lr_schedule: ScheduleText = None,
) -> Method:
    """Adagrad on the change of the round: as server_adam, with v <- v + g^2."""
    optimiser = adaptive("adagrad", beta1=beta1, beta2=0.0, tau=tau, initial=initial)
    return _piece("server_adagrad", optimiser, _rate(lr, lr_decay, lr_schedule))


@dataclass(frozen=True, kw_only=True)
class ServerStep:
    """Options of an optimiser of local training, at the server."""

    lr: Positive = 0.01
    lr_decay: Positive = 1.0
    lr_schedule: ScheduleText = None
    optimiser: OptimiserName = "adamw"
    momentum: Momentum = 0.0
    nesterov: bool = False
    weight_decay: NonNegative = 0.0
    beta1: Momentum = 0.9
    beta2: Momentum = 0.99
    eps: Positive = 1e-3
    amsgrad: bool = False


@METHODS.register
def server_optimiser(chosen: ServerStep) -> Method:
    """An optimiser of local training on the change of the round: g = w_t - w."""
    optimiser = optimiser_from(chosen.optimiser, vars(chosen), vars(ServerStep()))
    rate = _rate(chosen.lr, chosen.lr_decay, chosen.lr_schedule)
    return _piece("server_optimiser", optimiser, rate)


def _rate(lr: float, decay: float, schedule: str | None) -> Rate:
    return Rate(lr, decay, rounds=read_schedule(schedule))


def _piece(name: str, optimiser: Optimiser, lr: Rate) -> Method:
    """Return a method whose one phase applies an optimiser at the server.

    The groups of the optimiser are in the server's state with the prefix `name.`.
    """

    def opens(model: Model, state: Groups, world: World) -> Groups:
        if taken := [group for group in state if group.startswith(f"{name}.")]:
            raise InputError(
                f"{name} does not go with another {name} in the same method: they would share"
                f" {taken[0]!r}"
            )
        return _prefixed(name, optimiser.init(state["params"]))

    phase = Phase(
        name,
        client=None,
        server=partial(_move, name, optimiser),
        rates={"lr": lr},
        opens=opens,
        follows=True,
    )
    return Method((phase,))


def _prefixed(name: str, groups: Groups) -> Groups:
    return {f"{name}.{group}": tensors for group, tensors in groups.items()}


def _move(
    name: str, optimiser: Optimiser, model: Model, state: Groups, collected: Groups, rates: Tensors
) -> Groups:
    """Move the shared parameters from the weights of the round's start by the optimiser."""
    before = {
        group.removeprefix(f"{name}."): tensors
        for group, tensors in state.items()
        if group.startswith(f"{name}.")
    }
    pseudo_gradient = add(state["start"], state["params"], -1.0)
    params, after = optimiser.update(state["start"], pseudo_gradient, before, rates["lr"])
    return {**state, "params": params, **_prefixed(name, after)}
