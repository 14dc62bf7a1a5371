"""A model of a client's own, which it trains on the mini-batches of the shared one.

The memo group "personal" holds the tensors that a client is judged by in place of the shared ones.
A method whose clients are judged by more than the shared model keeps it there.
"""

from dataclasses import dataclass

from torch import Tensor

from feddkd.gradient import grad
from feddkd.method import Batch, World
from feddkd.methods.losses import task_loss
from feddkd.methods.optimisers import Optimiser
from feddkd.models.functional import Model, Output
from feddkd.tensors import Groups, Tensors, only

PREFIX = "own."  # of the groups of the own model's optimiser in the carry


def shared_tensors(state: Groups) -> Tensors:
    """Return the tensors of the shared model."""
    return {**state["params"], **state["buffers"]}


def bring_personal(model: Model, state: Groups, world: World) -> Groups:
    """Return the initial model as the model by which a client is judged before it is asked."""
    return {"personal": shared_tensors(state)}


def slope_at(model: Model, w: Tensors, buffers: Tensors, batch: Batch) -> tuple[Tensors, Output]:
    """Return the gradient of the task's loss at w on a batch, and the network's output there."""

    def loss(w: Tensors) -> tuple[Tensor, Output]:
        output = model(w, buffers, batch.x, mode="train", key=batch.key)
        return task_loss(model, output.logits, batch), output

    gradient, output = grad(loss, has_aux=True)(w)
    return gradient, output


@dataclass(frozen=True)
class OwnModel:
    """A client's own model: in the memo as one group, in the carry with its optimiser's state."""

    optimiser: Optimiser
    group: str = "personal"  # of the memo

    def begin(self, model: Model, sent: Groups, memo: Groups) -> Groups:
        """Return the groups of the carry: the model as the client left it, a new optimiser."""
        params = only(memo[self.group], model.param_names)
        buffers = only(memo[self.group], model.buffer_names)
        state = _prefixed(self.optimiser.init(params))
        return {"own_params": params, "own_buffers": buffers, **state}

    def moved(self, carry: Groups, gradient: Tensors, buffers: Tensors, lr: Tensor) -> Groups:
        """Return the groups of the carry after a step along a gradient."""
        state = {
            group.removeprefix(PREFIX): tensors
            for group, tensors in carry.items()
            if group.startswith(PREFIX)
        }
        params, after = self.optimiser.update(carry["own_params"], gradient, state, lr)
        return {"own_params": params, "own_buffers": buffers, **_prefixed(after)}

    def kept(self, carry: Groups) -> Groups:
        """Return the group of the memo."""
        return {self.group: {**carry["own_params"], **carry["own_buffers"]}}


def _prefixed(groups: Groups) -> Groups:
    return {f"{PREFIX}{group}": tensors for group, tensors in groups.items()}
