"""Optimisers at the server, pieces to put after any method with a shared model: Reddi, Charles,
Zaheer, Garrett, Rush, Konecny, Kumar, McMahan, "Adaptive federated optimization", ICLR 2021,
arXiv:2003.00295, Algorithm 2; for momentum Hsu, Qi, Brown, "Measuring the effects of non-identical
data distribution for federated visual classification", arXiv:1909.06335.

    w_{t+1} = w_t - optimiser(g_t),   g_t = w_t - w,   w = what the round has made of w_t

So fedavg() | server_adam() is FedAdam (fedopt.py has the usual names), and fedavg() | dkd() |
server_adam() takes the whole way through averaging and distillation as the pseudo-gradient. Only
shared parameters are moved; buffers stay averaged. Moments last as long as the run. The papers'
defaults b1 = .9, b2 = .99 (Adagrad: no momentum) and tau = 1e-3; their learning rates are tuned for
each task: ours are orders of magnitude to begin with.

The paper corrects no bias and asks for v_0 >= tau^2: `initial` is v_0, tau^2 unless said (Flower:
0). `bias_correction=True` is Adam's own step as in torch.optim.Adam, v_0 = 0; Flower's corrects
likewise, but lets the correction of v act on tau too.
"""

from functools import partial

from feddkd.errors import InputError
from feddkd.method import Method, Phase, World
from feddkd.methods.optimisers import Optimiser, adam, adaptive, sgd
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Model
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
) -> Method:
    """The round's move with momentum: v <- b v + (w_t - w), w <- w_t - lr v."""
    if nesterov and not momentum:
        raise InputError("server_momentum: nesterov=True does not go with momentum=0")
    return _piece("server_momentum", sgd(momentum=momentum, nesterov=nesterov), Rate(lr, lr_decay))


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
) -> Method:
    """The round's move by Adam: g = w_t - w, m <- b1 m + (1-b1) g, v <- b2 v + (1-b2) g^2, w <- w_t
    - lr m/(sqrt(v) + tau).
    """
    if bias_correction and initial is not None:
        raise InputError(
            "server_adam: bias_correction=True, which supposes that v begins at 0, does not go with"
            " initial=..."
        )
    corrected, plain = (
        adam(beta1=beta1, beta2=beta2, eps=tau),
        adaptive("adam", beta1=beta1, beta2=beta2, tau=tau, initial=initial),
    )
    return _piece("server_adam", corrected if bias_correction else plain, Rate(lr, lr_decay))


@METHODS.register
def server_yogi(
    *,
    lr: Positive = 0.01,
    lr_decay: Positive = 1.0,
    beta1: Momentum = 0.9,
    beta2: Momentum = 0.99,
    tau: Positive = 1e-3,
    initial: NonNegative | None = None,
) -> Method:
    """The round's move by Yogi: as server_adam, with v <- v - (1-b2) g^2 sign(v - g^2)."""
    return _piece(
        "server_yogi",
        adaptive("yogi", beta1=beta1, beta2=beta2, tau=tau, initial=initial),
        Rate(lr, lr_decay),
    )


@METHODS.register
def server_adagrad(
    *,
    lr: Positive = 0.1,
    lr_decay: Positive = 1.0,
    beta1: Momentum = 0.0,
    tau: Positive = 1e-3,
    initial: NonNegative | None = None,
) -> Method:
    """The round's move by Adagrad: as server_adam, with v <- v + g^2."""
    return _piece(
        "server_adagrad",
        adaptive("adagrad", beta1=beta1, beta2=0.0, tau=tau, initial=initial),
        Rate(lr, lr_decay),
    )


def _piece(name: str, optimiser: Optimiser, lr: Rate) -> Method:
    """The server's own business after the round's exchanges; the optimiser's groups stand in the
    state under the piece's name.
    """

    def opens(model: Model, state: Groups, world: World) -> Groups:
        if own := [group for group in state if group.startswith(f"{name}.")]:
            raise InputError(
                f"{name} does not go with another {name} in the same method: they would share"
                f" {own[0]!r}"
            )
        return {
            f"{name}.{group}": tensors for group, tensors in optimiser.init(state["params"]).items()
        }

    phase = Phase(
        name,
        client=None,
        server=partial(_move, name, optimiser),
        rates={"lr": lr},
        opens=opens,
        follows=True,
    )
    return Method((phase,))


def _move(
    name: str, optimiser: Optimiser, model: Model, state: Groups, collected: Groups, rates: Tensors
) -> Groups:
    before = {
        group.removeprefix(f"{name}."): tensors
        for group, tensors in state.items()
        if group.startswith(f"{name}.")
    }
    pseudo_gradient = add(state["start"], state["params"], -1.0)
    params, after = optimiser.update(state["start"], pseudo_gradient, before, rates["lr"])
    return {
        **state,
        "params": params,
        **{f"{name}.{group}": tensors for group, tensors in after.items()},
    }
