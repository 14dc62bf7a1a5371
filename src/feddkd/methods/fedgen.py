"""FedGen: Zhu, Hong, Zhou, "Data-free knowledge distillation for heterogeneous federated learning",
ICML 2021, arXiv:2105.10056.

    local loss = CE + b/B alpha_t CE(h(w; G(y')), y') + beta_t KL(softmax h(w; G(y)) || f(w; x))
    G descends   sum_k mean_i p_k(y_i) CE(h(w_k; G(y_i)), y_i)
                 + diversity exp(-mean_ij |e_i - e_j|^2 |G(y_i) - G(y_j)|)

h is the network's last layer; G(y) is an input for it, made from the label and noise e; y' is
uniform over the known labels; b and B are the sizes of generated and real batches. p_k(y) =
n_k(y) / sum_l n_l(y), where n_k(y) is one plus the number of examples of label y that client k read
in this round. The server trains the generator on the heads of the clients that answered, and sends
it to the clients of the next round. The generator does not use the average, so the server may
average before or, as in the published code, after its training; DKD may follow, too.

As in the published code: the noise is uniform (a comment there says Gaussian); the beta term, which
is not in the paper's objective; no generated features in the first round, then alpha_t = max(1e-4,
alpha decay^(t-1)), and beta_t likewise; the generator is in training mode at the server and in
evaluation mode at clients; its Adam keeps its moments from round to round; the server does not draw
labels that no client of the round has. The coefficients are those for EMNIST (MNIST: beta 10,
generator_lr 3e-4).

Unlike the published code: p_k(y_i) weighs example i, as the paper means it. By a mistake with
shapes the code weighs all examples by the mean of the p_k(y_i); `weighting="published"` does the
same. The code knows all labels from the start; here a label is known after a client has counted it.
The code stops using generated features after 20 mini-batches, which never happens with its own 20;
this is left out.
"""

from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import vmap

from feddkd.data.batches import Reads
from feddkd.errors import InputError
from feddkd.gradient import grad
from feddkd.method import Batch, Collect, Fold, Method, Phase, World
from feddkd.methods.local import Local, Variant, local_training, take_average
from feddkd.methods.losses import CLASSES, Term, cross_entropy, distillation, diversity_loss
from feddkd.methods.optimisers import Optimiser, adam
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Mode, Model, Output, functional
from feddkd.models.seeded_build import seeded_generators
from feddkd.randomness import uniform
from feddkd.spec.schedules import Rate
from feddkd.spec.types import Count, NonNegative, Positive
from feddkd.tensors import Groups, Tensors, only, to

# Streams of random numbers in a step; dropout and augmentation use the streams below 2000.
LABELS, NOISE, NOISE_FOR_OWN_LABELS = 2000, 2001, 2002
GENERATOR = ("generator", "generator_buffers")
MOMENTS = ("first", "second", "count")  # of Adam
# groups of this round's clients, which the server deletes after the generator's training
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
            "fedgen: generator_batch=1 does not go with the generator's batch norm, which needs at"
            " least two examples"
        )
    terms: list[Term] = []
    if alpha:
        terms.append(_classify(noise, generated, generated / local.batch_size))
    if beta:
        terms.append(_agree(noise))
    training = Variant(
        terms=tuple(terms),
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
        requires=CLASSES,
    )
    optimiser = adam(weight_decay=generator_weight_decay)
    teaching = Phase(
        name="generator",
        client=_at_the_server(optimiser, noise, generator_batch, weighting, diversity),
        server=_take_generator,
        reads=Reads(1, steps=generator_steps, source="none"),
        # a mean over one upload, the server's own
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
    """Return a generator drawn with the run's key, its optimiser's moments, and no known label."""
    head = _checked_head(model, state, world)
    network = _network(noise + world.classes, hidden, head.in_features)
    drawn = network.initial(("generator", *world.key))
    params, buffers = (to(group, world.like.device, world.like.dtype) for group in drawn)
    moments = {_moment(name): group for name, group in optimiser.init(params).items()}
    known = {"labels": {"known": world.like.new_zeros(world.classes)}}
    return {"generator": params, "generator_buffers": buffers, **moments, **known}


def _checked_head(model: Model, state: Groups, world: World) -> nn.Linear:
    """Return the network's last layer, or raise InputError if it cannot use generated inputs."""
    if model.head is None:
        raise InputError(
            "fedgen makes inputs for the last linear layer, and this network has no linear layer"
        )
    head = model.net.get_submodule(model.head)
    assert isinstance(head, nn.Linear)
    names = {f"{model.head}.{name}".removeprefix(".") for name, _ in head.named_parameters()}
    if not names <= state["params"].keys():
        raise InputError(
            f"fedgen uses the head {model.head!r} of every client, so the head must be trained,"
            " shared by the clients and not tied to another layer"
        )
    if head.out_features != world.outputs:
        raise InputError(
            f"fedgen makes inputs for the last layer, and {model.head!r}, the network's head, is"
            " not its last"
        )
    return head


# --- the generator


@lru_cache
def _network(inputs: int, hidden: int, outputs: int) -> Model:
    with seeded_generators(("fedgen",)):  # the layers draw initial weights that are not used
        layers = (
            nn.Linear(inputs, hidden),
            nn.BatchNorm1d(hidden),
            nn.ReLU(),
            nn.Linear(hidden, outputs),
        )
        return functional(nn.Sequential(*layers))


def _generate(generator: Groups, batch: Batch, noise: Tensor, mode: Mode) -> Output:
    """Return the generator's output for the labels of a batch; its logits are the features."""
    params, buffers = generator["params"], generator["buffers"]
    hidden, inputs = params["0.weight"].shape
    network = _network(inputs, hidden, len(params["3.weight"]))
    x = torch.cat([noise, batch.marks(inputs - noise.shape[1])], 1)
    return network(params, buffers, x, mode=mode)


def _noise(batch: Batch, width: int, stream: int) -> Tensor:
    return uniform(batch.key, (len(batch.y), width), stream).to(batch.share.dtype)


def _draw(batch: Batch, labels: Tensor, size: int) -> Batch:
    """Return a batch of `size` labels, uniform over the marked `labels` (over all if none is)."""
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
    """Return the generator that was sent."""
    return {"params": sent["generator"], "buffers": sent["generator_buffers"]}


def _classify(width: int, size: int, weight: float) -> Term:
    """Return the term b/B alpha_t CE(h(w; G(y')), y')."""

    def term(
        model: Model, w: Tensors, sent: Groups, carry: Groups, output: Output, batch: Batch
    ) -> Tensor:
        drawn = _draw(batch, sent["labels"]["known"], size)
        made = _generate(_received(sent), drawn, _noise(drawn, width, NOISE), "eval").logits
        return weight * sent["rates"]["alpha"] * cross_entropy(model.apply_head(w, made), drawn)

    return term


def _agree(width: int) -> Term:
    """Return the term beta_t KL(softmax h(w; G(y)) || f(w; x)).

    The first distribution is constant: it is computed with the carry's weights, which equal w.
    """

    def term(
        model: Model, w: Tensors, sent: Groups, carry: Groups, output: Output, batch: Batch
    ) -> Tensor:
        noise = _noise(batch, width, NOISE_FOR_OWN_LABELS)
        made = _generate(_received(sent), batch, noise, "eval").logits
        taught = model.apply_head(carry["params"], made)
        return sent["rates"]["beta"] * distillation(taught, output.logits, batch)

    return term


# --- the server's half


def _gather(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
    """Take the average, and keep every client's head and label counts for the generator."""
    counts, known = collected["label_counts"], state["labels"]["known"]
    head = f"{model.head}." if model.head else ""
    known = torch.maximum(known, (counts["counts"] > 1).any(0).to(known.dtype))
    heads = only(collected["clients"], (f"{head}weight", f"{head}bias"))
    after = take_average(model, state, collected, rates)
    return {**after, "labels": {"known": known}, "heads": heads, "label_counts": counts}


def _at_the_server(optimiser: Optimiser, width: int, size: int, weighting: str, eta: float) -> Fold:
    """Return the training of the generator, on one drawn batch in each step."""

    def start(model: Model, sent: Groups, memo: Groups) -> Groups:
        return {**_received(sent), **{name: sent[_moment(name)] for name in MOMENTS}}

    def step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        counts = sent["label_counts"]["counts"]
        drawn = _draw(batch, (counts > 1).any(0), size)
        noise = _noise(drawn, width, NOISE)
        weights = (counts / counts.sum(0))[:, drawn.y]
        if weighting == "published":
            weights = weights.mean(1, keepdim=True)
        shares = weights * drawn.share

        def loss(generator: Tensors) -> tuple[Tensor, Mapping[str, Tensor]]:
            made = _generate({**carry, "params": generator}, drawn, noise, "train")

            def client_loss(head: Tensors, share: Tensor) -> Tensor:
                logits = model.apply_head(head, made.logits)
                return cross_entropy(logits, drawn._replace(share=share))

            taught = vmap(client_loss)(sent["heads"], shares).sum()
            return taught + eta * diversity_loss(noise, made.logits), made.buffers

        gradient, buffers = grad(loss, has_aux=True)(carry["params"])
        params, moments = optimiser.update(carry["params"], gradient, carry, sent["rates"]["lr"])
        return {"params": params, "buffers": buffers, **moments}

    def finish(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
        moments = {_moment(name): carry[name] for name in MOMENTS}
        generator = {"generator": carry["params"], "generator_buffers": carry["buffers"]}
        return {**generator, **moments}, memo

    return Fold(start, step, finish)


def _take_generator(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
    """Replace the generator and its moments, and delete the groups of this round's clients."""
    kept = {name: group for name, group in state.items() if name not in ROUND}
    return {**kept, **collected}
