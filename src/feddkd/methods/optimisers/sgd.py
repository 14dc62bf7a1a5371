"""Stochastic gradient descent, with momentum."""

from torch import Tensor

from feddkd.methods.optimisers.optimiser import Optimiser
from feddkd.tensors import Groups, Tensors, add, zeros


def sgd(*, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0) -> Optimiser:
    """Return SGD as torch.optim.SGD: v <- momentum v + g;  w <- w - lr v.

    Nesterov: w <- w - lr (g + momentum v). Weight decay is part of the gradient g.
    """

    def init(params: Tensors) -> Groups:
        return {"velocity": zeros(params)} if momentum else {}

    def update(
        params: Tensors, grads: Tensors, state: Groups, lr: Tensor
    ) -> tuple[Tensors, Groups]:
        grads = add(grads, params, weight_decay) if weight_decay else grads
        if not momentum:
            return add(params, grads, -lr), {}
        velocity = add(grads, state["velocity"], momentum)
        direction = add(grads, velocity, momentum) if nesterov else velocity
        return add(params, direction, -lr), {"velocity": velocity}

    return Optimiser(init, update)
