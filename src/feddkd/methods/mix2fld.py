"""Mix2FLD: Oh, Park, Jeong, Kim, Bennis, Kim, "Mix2FLD: downlink federated learning after uplink
federated distillation with two-way mixup", IEEE Communications Letters 2020, arXiv:2006.09801.

    client: w_k <- local training from w_t,   F_k[c] = mean of softmax f(w; x), examples with y = c
            once: v = lam x_i + (1 - lam) x_j of own examples with labels y_i != y_j
    server: G[c] = mean_k F_k[c],   w_{t+1} <- from w_t, S steps on samples x with label y:
            w <- w - lr grad[ CE(y, f(w; x)) + beta CE(G[y], f(w; x)) ]
            x = q v + (1 - q) v',   y = y_i of v,   q = lam / (2 lam - 1)

Up go mean outputs and, once, mixed examples; down go weights. v and v' come from two clients and
have mirrored labels, (a, b) and (b, a): in x the label b has weight zero. F_k is measured on the
mini-batches of local training, before each step. A label that no client of the round has read has
no second term.

A client mixes up to `mixed` disjoint pairs of its examples in the first round in which it takes
part; those with two labels count. The server draws `samples` of all mirrored pairs, each as seldom
as can be, after every round with new clients. While no pair is mirrored it draws from the v
themselves, with the labels lam y_i + (1 - lam) y_j: this is the paper's MixFLD. A run in which no
client has two labels ends with an error. A step at the server reads `server_batch_size` samples,
drawn with replacement.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import log_softmax, softmax

from feddkd.data.batches import Reads
from feddkd.errors import InputError, RunError
from feddkd.gradient import grad
from feddkd.method import Batch, Collect, Fold, Method, Part, Phase, World
from feddkd.methods.local import Local, Variant, local_training
from feddkd.methods.losses import CLASSES, mean
from feddkd.methods.registry import METHODS
from feddkd.methods.virtual_samples import draw_samples
from feddkd.models.functional import Model, Output
from feddkd.randomness import fold, generator
from feddkd.spec.schedules import Rate
from feddkd.spec.types import Bound, Count, NonNegative, Positive
from feddkd.tensors import Groups, Tensors, add, combine

Mixing = Annotated[float, Bound(least=0, below=0.5)]


@METHODS.register
def mix2fld(
    local: Local,
    *,
    lam: Mixing = 0.1,
    beta: NonNegative = 0.01,
    mixed: Count = 50,
    samples: Count = 100,
    server_steps: Count = 3200,
    server_batch_size: Count = 16,
    server_lr: Positive = 0.01,
) -> Method:
    """Up: mean outputs by label; the server learns from unmixed samples: CE(y) + beta CE(G[y])."""
    mixing = Phase(
        name="mix",
        client=Fold(_no_pairs, partial(_mix, lam, mixed), _send_pairs),
        server=partial(_unmix, lam, samples),
        keeps=frozenset({"mixed"}),
        brings=partial(_bring_pairs, mixed),
        reads=Reads(2 * mixed, steps=1),
        collect={"mixed": Collect.EVERY},
        sends=(),
        parts=_new_clients,
        opens=_open,
        requires=CLASSES,
    )
    variant = Variant(
        begin=_begin,
        watch=_track,
        server=_take_outputs,
        keeps=frozenset({"blank"}),
        brings=_blank,
        requires=CLASSES,
    )
    (training,) = local_training(local, variant).phases
    assert isinstance(training.client, Fold)
    training = replace(
        training,
        client=replace(training.client, finish=_send_outputs),
        collect={"outputs": Collect.EVERY},
    )
    converting = Phase(
        name="convert",
        client=_convert(beta, server_batch_size),
        server=lambda model, state, collected, rates: {**state, **collected},
        reads=Reads(1, steps=server_steps, source="none"),
        # a mean over one upload, the server's own
        collect={"params": Collect.MEAN_BY_CLIENTS, "buffers": Collect.MEAN_BY_CLIENTS},
        sends=("params", "buffers", "outputs", "samples"),
        rates={"lr": Rate(server_lr)},
        at="server",
    )
    return Method((mixing, training, converting))


def _open(model: Model, state: Groups, world: World) -> Groups:
    """Return a key, and which clients have sent mixed examples; refuse private tensors."""
    if {*state["params"], *state["buffers"]} != model.param_names | model.buffer_names:
        raise InputError(
            "mix2fld trains whole models at the server; they do not go with tensors private to"
            " clients"
        )
    heard = torch.zeros(world.clients, dtype=torch.int64)
    return {"mix2fld": {"key": torch.tensor(fold(("mix2fld", *world.key))), "heard": heard}}


# --- mixed examples, once


def _new_clients(state: Groups, cohort: Sequence[int], step: int) -> list[Part]:
    """Return the clients that have not sent mixed examples, as the part of the cohort to ask."""
    heard = state["mix2fld"]["heard"].tolist()
    new = tuple(client for client in cohort if not heard[client])
    return [Part(new, {})] if new else []


def _bring_pairs(count: int, model: Model, state: Groups, world: World) -> Groups:
    """Return a table for a client's mixed examples, or raise InputError if they cannot be mixed."""
    x = world.example
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise InputError("mix2fld mixes examples, so each must be one tensor of real numbers")
    labels = torch.zeros(count, dtype=torch.int64, device=x.device)
    table = {"x": x.new_zeros(count, *x.shape), "first": labels, "second": labels}
    return {"mixed": {**table, "valid": labels > 0}}


def _no_pairs(model: Model, sent: Groups, memo: Groups) -> Groups:
    return {"mixed": memo["mixed"]}


def _mix(lam: float, count: int, model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
    """Mix example i of the batch with example i + h, h half the number of examples."""
    assert isinstance(batch.x, Tensor)
    half = (batch.share > 0).sum() // 2
    place = torch.arange(count, device=half.device)
    i = place.clamp(max=len(batch.y) - 1)
    j = (place + half).clamp(max=len(batch.y) - 1)
    first, second = batch.y[i], batch.y[j]
    mixed = lam * batch.x[i] + (1 - lam) * batch.x[j]
    valid = (place < half) & (first != second)
    return {"mixed": {"x": mixed, "first": first, "second": second, "valid": valid}}


def _send_pairs(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
    return carry, memo


def _unmix(
    lam: float, samples: int, model: Model, state: Groups, collected: Groups, rates: Tensors
) -> Groups:
    """Add the new mixed examples to those that the server has, and draw samples from all."""
    new, ledger = collected["mixed"], state["mix2fld"]
    valid = new["valid"].flatten()
    table = {name: new[name].flatten(0, 1)[valid] for name in ("x", "first", "second")}
    table["client"] = rates["clients"].repeat_interleave(new["valid"].shape[1])[valid]
    if before := state.get("mixed"):
        table = combine(lambda old, new: torch.cat([old, new]), before, table)
    if not len(table["x"]):
        raise RunError("mix2fld: no client of the round has examples of two labels to mix")
    places = rates["clients"].to(ledger["heard"].device)
    heard = ledger["heard"].index_fill(0, places, 1)
    found = unmixed(table, lam)
    order = generator(("mix2fld", int(ledger["key"]), int(heard.sum())))
    drawn = order.permutation(len(found["x"]))[[n % len(found["x"]) for n in range(samples)]]
    some = combine(lambda tensor: tensor[torch.from_numpy(drawn).to(tensor.device)], found)
    return {**state, "mixed": table, "samples": some, "mix2fld": {**ledger, "heard": heard}}


def unmixed(table: Tensors, lam: float) -> dict[str, Tensor]:
    """Return x, y and other labels; the label y has the weight `weight`, the other one the rest."""
    first, second, client, x = (table[name] for name in ("first", "second", "client", "x"))
    mirrored = (first[:, None] == second) & (second[:, None] == first)
    v, other = (mirrored & (client[:, None] != client)).nonzero(as_tuple=True)
    if not len(v):
        weight = torch.full_like(x.flatten(1)[:, 0], lam)
        return {"x": x, "y": first, "other": second, "weight": weight}
    q = lam / (2 * lam - 1)
    plain = q * x[v] + (1 - q) * x[other]
    weight = torch.ones_like(plain.flatten(1)[:, 0])
    return {"x": plain, "y": first[v], "other": second[v], "weight": weight}


# --- mean outputs, in every round


def _blank(model: Model, state: Groups, world: World) -> Groups:
    """Return sums and counts of no outputs."""
    zero = world.like.new_zeros(world.classes, world.outputs)
    return {"blank": {"sums": zero, "counts": zero[:, 0]}}


def _begin(model: Model, sent: Groups, memo: Groups) -> Groups:
    return {"outputs": memo["blank"]}


def _track(model: Model, sent: Groups, carry: Groups, output: Output, batch: Batch) -> Groups:
    """Add the probabilities of a batch to the sums, label by label."""
    sums, counts = carry["outputs"]["sums"], carry["outputs"]["counts"]
    marks = batch.marks(len(counts))
    seen = (marks.unsqueeze(-1) * softmax(output.logits, -1).unsqueeze(1)).sum(0)
    return {"outputs": {"sums": sums + seen, "counts": counts + marks.sum(0)}}


def _send_outputs(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
    """Upload the outputs alone; the trained model stays, as a teacher for DKD."""
    trained = {**carry["params"], **carry["buffers"]}
    return {"outputs": carry["outputs"]}, {**memo, "model": trained}


def _take_outputs(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
    """Return the state with G[c], the mean over the clients that read examples of the label c."""
    sums, counts = collected["outputs"]["sums"], collected["outputs"]["counts"]
    means, seen = sums / counts.clamp(min=1).unsqueeze(-1), (counts > 0).to(sums.dtype)
    members = seen.sum(0)
    mean = means.sum(0) / members.clamp(min=1).unsqueeze(-1)
    return {**state, "outputs": {"mean": mean, "known": (members > 0).to(sums.dtype)}}


# --- from outputs to weights


def _convert(beta: float, size: int) -> Fold:
    """Return the steps of the server's model on the samples."""

    def start(model: Model, sent: Groups, memo: Groups) -> Groups:
        return {"params": sent["params"], "buffers": sent["buffers"]}

    def step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        some = draw_samples(sent["samples"], size, batch.key)
        targets = _targets(some, sent["outputs"], beta)
        drawn = Batch(some["x"], some["y"], torch.full_like(some["weight"], 1 / size), batch.key)

        def loss(w: Tensors) -> tuple[Tensor, Output]:
            output = model(w, carry["buffers"], drawn.x, mode="train", key=drawn.key)
            per_example = -(targets * log_softmax(output.logits, -1)).sum(-1)
            return mean(per_example, drawn), output

        gradient, output = grad(loss, has_aux=True)(carry["params"])
        params = add(carry["params"], gradient, -sent["rates"]["lr"])
        return {"params": params, "buffers": output.buffers}

    def finish(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
        return carry, memo

    return Fold(start, step, finish)


def _targets(some: Tensors, outputs: Tensors, beta: float) -> Tensor:
    """Return y + beta G[y] for each sample; a mixed label has the mixture of two targets."""
    means, known = outputs["mean"], outputs["known"].unsqueeze(-1)
    labels = torch.eye(*means.shape, dtype=means.dtype, device=means.device)
    table = labels + beta * known * means
    weight = some["weight"].unsqueeze(-1)
    return weight * table[some["y"]] + (1 - weight) * table[some["other"]]
