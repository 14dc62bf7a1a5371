"""FedGen: Zhu, Hong, Zhou, "Data-free knowledge distillation for heterogeneous federated learning",
ICML 2021, arXiv:2105.10056.

    local loss = CE + b/B alpha_t CE(h(w; G(y')), y') + beta_t KL(softmax h(w; G(y)) || f(w; x)),   y' uniform over known labels
    G descends   sum_k mean_i p_k(y_i) CE(h(w_k; G(y_i)), y_i) + diversity exp(-mean_ij |e_i - e_j|^2 |G(y_i) - G(y_j)|)

h is the network's last layer, G(y) an input for it, made of the label and noise e, b and B sizes of
generated and real batches; p_k(y) = n_k(y) / sum_l n_l(y), where n_k(y) counts from one what client
k read in this round. The generator is trained at the server on the heads of the clients that
answered, and travels to the clients of the next round. It does not look at the average, so it is
all one whether the server averages before or, as in the published code, after; DKD, too, may
follow.

As the published code has it: noise is uniform (its comment says Gaussian); the beta term, which the
paper's objective lacks; no generated features in the first round, then alpha_t = max(1e-4, alpha
decay^(t-1)) and beta_t likewise; a generator in training mode at the server and in evaluation mode
with clients; its Adam lives on from round to round; labels that no client of the round has are not
drawn at the server. Coefficients are those for EMNIST (MNIST: beta 10, generator_lr 3e-4). Not as
published: p_k(y_i) is meant to weigh example i, but for a slip of shapes the code weighs all
examples by the mean of the p_k(y_i): `weighting="published"`. The code knows from the beginning
which labels exist; ours, which have been counted so far. It stops using generated features after 20
mini-batches, which with its own 20 never happens: left out.
"""

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from feddkd.data.batches import Reads
from feddkd.errors import InputError
from feddkd.method import Batch, Collect, Fold, Method, Phase, World
from feddkd.methods.local import Local, Variant, local_training, take_average
from feddkd.methods.losses import Term, cross_entropy, distillation, diversity_loss
from feddkd.methods.optimisers import Optimiser, adam
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Mode, Model, Output, functional
from feddkd.randomness import uniform
from feddkd.spec.schedules import Rate
from feddkd.spec.types import Count, NonNegative, Positive
from feddkd.tensors import Groups, Tensors, only, to

# What is random in a step; the streams below 2000 belong to dropout and augmentation.
LABELS, NOISE, NOISE_FOR_OWN_LABELS = 2000, 2001, 2002
GENERATOR = ("generator", "generator_buffers")
MOMENTS = ("first", "second", "count")  # of Adam
# what the server holds of this round's clients until the generator has seen it
ROUND = ("heads", "label_counts")


@METHODS.register
def fedgen(
    local: Local,
    *,
    alpha: NonNegative = 10.0,
    beta: NonNegative = 1.0,
    decay: Positive = 0.98,
    generated: Count = 32,
    weighting: Literal["intended", "published"] = "intended",
    diversity: NonNegative = 1.0,
    generator_steps: Count = 50,
    generator_batch: Count = 32,
    generator_lr: Positive = 1e-4,
    generator_lr_decay: Positive = 0.98,
    generator_weight_decay: NonNegative = 1e-2,
    noise: Count = 32,
    hidden: Count = 256,
    private: Literal["none", "norm", "statistics"] = "none",
) -> Method:
    """FedAvg with features of a generator G: loss = CE + alpha CE(h(w; G(y')), y') + beta KL."""
    if generator_batch == 1:
        raise InputError(
            "fedgen: generator_batch=1 does not go with the generator's batch norm, which needs two"
            " examples"
        )
    terms = [
        (alpha, _classify(noise, generated, generated / local.batch_size)),
        (beta, _agree(noise)),
    ]
    training = Variant(
        terms=tuple(term for coefficient, term in terms if coefficient),
        begin=_begin,
        watch=_count,
        part=lambda model, sent, carry, memo: ({"label_counts": carry["label_counts"]}, {}),
        server=_gather,
        collect={"label_counts": Collect.EVERY},
        every={"clients": "params"},
        sends=(*GENERATOR, "labels"),
        rates={
            "alpha": Rate(alpha, decay, after=1, least=1e-4),
            "beta": Rate(beta, decay, after=1, least=1e-4),
        },
        private=private,
    )
    optimiser = adam(weight_decay=generator_weight_decay)
    teaching = Phase(
        name="generator",
        client=_at_the_server(optimiser, noise, generator_batch, weighting, diversity),
        server=_take_generator,
        reads=Reads(1, steps=generator_steps, source="none"),
        # of the server alone
        collect=dict.fromkeys((*GENERATOR, *map(_moment, MOMENTS)), Collect.MEAN_BY_CLIENTS),
        sends=(*GENERATOR, *map(_moment, MOMENTS), *ROUND),
        rates={"lr": Rate(generator_lr, generator_lr_decay)},
        at="server",
        opens=partial(_open, optimiser, noise, hidden),
    )
    return local_training(local, training) | Method((teaching,))


def _moment(name: str) -> str:
    return f"generator_{name}"


def _open(
    optimiser: Optimiser, noise: int, hidden: int, model: Model, state: Groups, world: World
) -> Groups:
    """A generator for this network's head, as the run's key draws it, with a fresh optimiser; no
    label is known yet.
    """
    if model.head is None:
        raise InputError(
            "fedgen makes inputs for the last linear layer, and this network has no linear layer"
        )
    head = model.net.get_submodule(model.head)
    assert isinstance(head, nn.Linear)
    if (
        not {f"{model.head}.{own}".removeprefix(".") for own, _ in head.named_parameters()}
        <= state["params"].keys()
    ):
        raise InputError(
            f"fedgen takes the head {model.head!r} of every client, so it must be trained, shared"
            " by the clients and not tied to another layer"
        )
    if head.out_features != world.outputs:
        raise InputError(
            f"fedgen makes inputs for the last layer, and {model.head!r}, the network's head, is"
            " not its last"
        )
    drawn = _network(noise + world.classes, hidden, head.in_features).initial(
        ("generator", *world.key)
    )
    params, buffers = (to(group, world.like.device, world.like.dtype) for group in drawn)
    moments = {_moment(name): group for name, group in optimiser.init(params).items()}
    known = {"labels": {"known": world.like.new_zeros(world.classes)}}
    return {"generator": params, "generator_buffers": buffers, **moments, **known}


# --- the generator


@lru_cache
def _network(inputs: int, hidden: int, outputs: int) -> Model:
    with torch.random.fork_rng(devices=[]):  # layers draw first weights, which nobody reads
        layers = (
            nn.Linear(inputs, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, outputs),
        )
        return functional(nn.Sequential(*layers))


def _generate(generator: Groups, batch: Batch, noise: Tensor, mode: Mode) -> Output:
    """Features for the labels of a batch; the output's logits are these features."""
    params, buffers = (generator[name] for name in ("params", "buffers"))
    hidden, inputs = params["0.weight"].shape
    network = _network(inputs, hidden, len(params["3.weight"]))
    return network(
        params, buffers, torch.cat([noise, batch.marks(inputs - noise.shape[1])], 1), mode=mode
    )


def _noise(batch: Batch, width: int, stream: int) -> Tensor:
    return uniform(batch.key, (len(batch.y), width), stream).to(batch.share.dtype)


def _draw(batch: Batch, labels: Tensor, size: int) -> Batch:
    """So many labels, uniform over those marked in `labels`; over all of them while none is."""
    marked = ((labels > 0) | ~labels.any()).cumsum(0)
    nth = (uniform(batch.key, (size,), LABELS).double() * marked[-1]).long()
    y = (marked <= nth.unsqueeze(-1)).sum(-1)
    share = batch.share.new_full((size,), 1 / size)
    return Batch(batch.x, y, share, batch.key)


# --- the client's half


def _begin(model: Model, sent: Groups, memo: Groups) -> Groups:
    return {"label_counts": {"counts": torch.ones_like(sent["labels"]["known"])}}


def _count(model: Model, sent: Groups, carry: Groups, output: Output, batch: Batch) -> Groups:
    counts = carry["label_counts"]["counts"]
    return {"label_counts": {"counts": counts + batch.marks(len(counts)).sum(0)}}


def _received(sent: Groups) -> Groups:
    return {"params": sent["generator"], "buffers": sent["generator_buffers"]}


def _classify(width: int, size: int, weight: float) -> Term:
    """b/B alpha_t CE(h(w; G(y')), y')"""

    def term(
        model: Model, w: Tensors, sent: Groups, carry: Groups, output: Output, batch: Batch
    ) -> Tensor:
        drawn = _draw(batch, sent["labels"]["known"], size)
        made = _generate(_received(sent), drawn, _noise(drawn, width, NOISE), "eval").logits
        return weight * sent["rates"]["alpha"] * cross_entropy(model.apply_head(w, made), drawn)

    return term


def _agree(width: int) -> Term:
    """beta_t KL(softmax h(w; G(y)) || f(w; x)), the first held constant: it is taken at the carry's
    weights, equal to w
    """

    def term(
        model: Model, w: Tensors, sent: Groups, carry: Groups, output: Output, batch: Batch
    ) -> Tensor:
        made = _generate(
            _received(sent), batch, _noise(batch, width, NOISE_FOR_OWN_LABELS), "eval"
        ).logits
        taught = model.apply_head(carry["params"], made)
        return sent["rates"]["beta"] * distillation(taught, output.logits, batch)

    return term


# --- the server's half


def _gather(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
    """The average; and for the generator every client's head and label counts."""
    counts, known = collected["label_counts"], state["labels"]["known"]
    head = f"{model.head}." if model.head else ""
    known = torch.maximum(known, (counts["counts"] > 1).any(0).to(known.dtype))
    heads = only(collected["clients"], (f"{head}weight", f"{head}bias"))
    after = take_average(model, state, collected, rates)
    return {**after, "labels": {"known": known}, "heads": heads, "label_counts": counts}


def _at_the_server(optimiser: Optimiser, width: int, size: int, weighting: str, eta: float) -> Fold:
    def start(model: Model, sent: Groups, memo: Groups) -> Groups:
        return {**_received(sent), **{name: sent[_moment(name)] for name in MOMENTS}}

    def step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        counts = sent["label_counts"]["counts"]
        drawn = _draw(batch, (counts > 1).any(0), size)
        noise = _noise(drawn, width, NOISE)
        weights = (counts / counts.sum(0))[:, drawn.y]
        shares = (
            weights if weighting == "intended" else weights.mean(1, keepdim=True)
        ) * drawn.share

        def loss(generator: Tensors) -> tuple[Tensor, Mapping[str, Tensor]]:
            made = _generate({**carry, "params": generator}, drawn, noise, "train")

            def taught(head: Tensors, share: Tensor) -> Tensor:
                return cross_entropy(
                    model.apply_head(head, made.logits), drawn._replace(share=share)
                )

            return (
                vmap(taught)(sent["heads"], shares).sum()
                + eta * diversity_loss(noise, made.logits),
                made.buffers,
            )

        gradient, buffers = grad(loss, has_aux=True)(carry["params"])
        params, moments = optimiser.update(carry["params"], gradient, carry, sent["rates"]["lr"])
        return {"params": params, "buffers": buffers, **moments}

    def finish(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
        moments = {_moment(name): carry[name] for name in MOMENTS}
        return {
            "generator": carry["params"],
            "generator_buffers": carry["buffers"],
            **moments,
        }, memo

    return Fold(start, step, finish)


def _take_generator(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
    return {**{name: group for name, group in state.items() if name not in ROUND}, **collected}
