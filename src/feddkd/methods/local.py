"""Local training, the exchange that most methods share (Algorithm 1, Client-LocalTrain): a method adds its terms to the loss.

w <- optimiser(w, grad[ CE(f(w; x), y) + terms ]) over the client's mini-batches, from the weights that were sent;
the server takes the average of the w_k by examples.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from torch.func import grad

from feddkd.data.batches import Reads
from feddkd.method import Batch, Collect, Fold, Method, Phase, Private, Rate, own_model, uploads
from feddkd.models import Model
from feddkd.objectives import Term, cross_entropy
from feddkd.optimisers import Optimiser, adam, sgd
from feddkd.params import Groups, Tensors
from feddkd.spelling import Count, Momentum, NonNegative, Positive


@dataclass(frozen=True, kw_only=True)
class Local:
    """How a client trains: options that every method with local training takes."""

    epochs: Count = 5
    steps: Count | None = None  # so many mini-batches in place of epochs
    batch_size: Count = 64
    lr: Positive = 0.1
    lr_decay: Positive = 1.0  # per round
    optimiser: Literal["sgd", "adam"] = "sgd"
    momentum: Momentum = 0.0
    nesterov: bool = False
    weight_decay: NonNegative = 0.0
    beta1: Momentum = 0.9
    beta2: Momentum = 0.999
    eps: Positive = 1e-8
    amsgrad: bool = False
    drop_last: bool = False

    def build_optimiser(self) -> Optimiser:
        if self.optimiser == "sgd":
            return sgd(momentum=self.momentum, nesterov=self.nesterov, weight_decay=self.weight_decay)
        return adam(beta1=self.beta1, beta2=self.beta2, eps=self.eps, weight_decay=self.weight_decay, amsgrad=self.amsgrad)


def local_training(local: Local, *terms: Term, private: Private = "none") -> Method:
    """One exchange: train on labels, leave the trained model with the client (it may have to teach), average."""
    phase = Phase(
        name="local",
        client=_client(local.build_optimiser(), terms),
        server=take_average,
        reads=Reads(local.batch_size, local.epochs, local.steps, drop_last=local.drop_last),
        collect={"params": Collect.MEAN_BY_EXAMPLES, "buffers": Collect.MEAN_BY_EXAMPLES},
        rates={"lr": Rate(local.lr, local.lr_decay)},
        leaves=frozenset({"model"}),
    )
    return Method((phase,), frozenset({private}))


def take_average(state: Groups, collected: Groups, rates: Tensors) -> Groups:
    """wbar = sum_k n_k / (sum_i n_i) w_k"""
    return {**state, "params": collected["params"], "buffers": collected["buffers"]}


def _client(optimiser: Optimiser, terms: tuple[Term, ...]) -> Fold:
    def start(model: Model, sent: Groups, memo: Groups) -> Groups:
        params, buffers = own_model(model, sent, memo)
        return {"params": params, "buffers": buffers, **optimiser.init(params)}

    def step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        def loss(w: Tensors) -> tuple[Tensor, dict[str, Tensor]]:
            output = model(w, carry["buffers"], batch.x, mode="train", key=batch.key)
            value = cross_entropy(output.logits, batch)
            for term in terms:
                value = value + term(model, w, sent, output, batch)
            return value, output.buffers

        grads, buffers = grad(loss, has_aux=True)(carry["params"])
        params, state = optimiser.update(carry["params"], grads, carry, sent["rates"]["lr"])
        return {"params": params, "buffers": buffers, **state}

    def finish(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
        upload, memo = uploads(model, carry["params"], carry["buffers"], memo)
        return upload, {**memo, "model": {**carry["params"], **carry["buffers"]}}

    return Fold(start, step, finish)
