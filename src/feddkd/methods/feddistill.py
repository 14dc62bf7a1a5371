"""FedDistill, also FD: Jeong, Oh, Kim, Park, Bennis, Kim, "Communication-efficient on-device
machine learning: federated distillation and augmentation under non-IID private data", NeurIPS 2018
workshop, arXiv:1811.11479; Seo et al., arXiv:2011.02367.

    local loss = CE + coefficient KL(softmax(zbar[y]) || f(w; x)),   zbar[c] = 1/M sum_k z_k[c]
    z_k[c] = client k's mean logits on its examples of label c

FedDistill exchanges only these mean logits, and every client keeps its own model. FedDistill+
(FedDistill-FL in the code of FedGen, arXiv:2105.10056, with which the FedDKD paper compares) also
averages the models.

The mean logits are computed as in FedGen: sums and counts of the training-mode logits of every
mini-batch, which are never reset. FedGen's counts begin at one: so the means of rare labels are too
close to zero, and a label that a client never saw counts as a row of zeros. `counts_from="zero"`
takes true means, and the mean of a label leaves out the clients that never saw it. FedGen's zbar is
the mean over all clients of the last round. `leave_one_out=True` is the mean of the original paper,
(M zbar - z_k) / (M - 1): a client that was part of the mean takes its own logits out of it. If
there are no logits of other clients for a label, as in the first round, there is no term. (FedGen's
code keeps the graph of past logits; ours does not. The values are the same.)

With the logits of each label one number is sent: up, 1 if the client has logits for the label, else
0; down, the number of clients that have logits for it.
"""

from functools import partial
from typing import Literal

from torch import Tensor

from feddkd.method import Batch, Collect, Method, Private, World
from feddkd.methods.local import Local, Variant, local_training, take_average
from feddkd.methods.losses import CLASSES, distillation
from feddkd.methods.registry import METHODS
from feddkd.models.functional import Model, Output
from feddkd.spec.types import NonNegative
from feddkd.tensors import Groups, Tensors


@METHODS.register
def feddistill(
    local: Local,
    *,
    coefficient: NonNegative = 1.0,
    leave_one_out: bool = False,
    counts_from: Literal["one", "zero"] = "one",
) -> Method:
    """Private models, shared mean logits: CE + coefficient KL(softmax(zbar[y]) || f(w; x))."""
    return local_training(local, _variant(coefficient, leave_one_out, counts_from, "model"))


@METHODS.register
def feddistill_plus(
    local: Local,
    *,
    coefficient: NonNegative = 1.0,
    leave_one_out: bool = False,
    counts_from: Literal["one", "zero"] = "one",
    private: Literal["none", "norm", "statistics"] = "none",
) -> Method:
    """FedAvg with shared mean logits: CE + coefficient KL(softmax(zbar[y]) || f(w; x))."""
    return local_training(local, _variant(coefficient, leave_one_out, counts_from, private))


def _variant(
    coefficient: float, leave_one_out: bool, counts_from: str, private: Private
) -> Variant:
    return Variant(
        terms=(partial(_agree, coefficient),),
        begin=partial(_begin, leave_one_out),
        watch=_track,
        part=_part,
        server=_server,
        collect={"logits": Collect.EVERY},
        sends=("logits",),
        rates={"round": lambda round, step: float(round)} if leave_one_out else {},
        keeps=frozenset({"tracker"}),
        opens=_open,
        brings=partial(_bring, leave_one_out, 1.0 if counts_from == "one" else 0.0),
        private=private,
        requires=CLASSES,
    )


def _open(model: Model, state: Groups, world: World) -> Groups:
    """Return the server's mean logits before the first round: zeros of no client."""
    zero = world.like.new_zeros(world.classes, world.outputs)
    return {"logits": {"mean": zero, "members": zero[:, 0]}}


def _bring(dated: bool, count: float, model: Model, state: Groups, world: World) -> Groups:
    """Return a client's tracker: sums and counts of logits, and its last round if `dated`."""
    tracker = {
        "sums": world.like.new_zeros(world.classes, world.outputs),
        "counts": world.like.new_full((world.classes,), count),
    }
    if dated:
        tracker["round"] = world.like.new_zeros(())
    return {"tracker": tracker}


# --- the client's half


def _begin(leave_one_out: bool, model: Model, sent: Groups, memo: Groups) -> Groups:
    """Return the tracker and the logits to learn, `target`, with 1 for each label that has some."""
    mean, members, tracker = sent["logits"]["mean"], sent["logits"]["members"], memo["tracker"]
    if leave_one_out:
        # the tracker has not changed since the client's last answer: its means are the client's
        # last upload, which is part of the mean if that was in the last round
        was_asked = tracker["round"] == sent["rates"]["round"] - 1
        counted = _seen(tracker) * was_asked
        total = members.unsqueeze(-1) * mean - counted.unsqueeze(-1) * _means(tracker)
        members = members - counted
        mean = total / members.clamp(min=1).unsqueeze(-1)
        tracker = {**tracker, "round": sent["rates"]["round"]}
    return {"tracker": tracker, "target": {"logits": mean, "known": (members > 0).to(mean.dtype)}}


def _agree(
    coefficient: float,
    model: Model,
    w: Tensors,
    sent: Groups,
    carry: Groups,
    output: Output,
    batch: Batch,
) -> Tensor:
    taught, known = carry["target"]["logits"][batch.y], carry["target"]["known"][batch.y]
    weighted = batch._replace(share=batch.share * known)
    return coefficient * distillation(taught, output.logits, weighted)


def _track(model: Model, sent: Groups, carry: Groups, output: Output, batch: Batch) -> Groups:
    """Add the logits of a batch to the tracker, label by label."""
    tracker = carry["tracker"]
    marks = batch.marks(len(tracker["counts"]))
    # not a matrix product: tf32 would round the logits
    sums = tracker["sums"] + (marks.unsqueeze(-1) * output.logits.unsqueeze(1)).sum(0)
    counts = tracker["counts"] + marks.sum(0)
    return {"tracker": {**tracker, "sums": sums, "counts": counts}}


def _part(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
    tracker = carry["tracker"]
    return {"logits": {"mean": _means(tracker), "seen": _seen(tracker)}}, {"tracker": tracker}


def _means(tracker: Tensors) -> Tensor:
    """Return the mean logits z_k, a row for each label."""
    return tracker["sums"] / tracker["counts"].clamp(min=1).unsqueeze(-1)


def _seen(tracker: Tensors) -> Tensor:
    """Return 1 for each label that has logits, else 0."""
    return (tracker["counts"] > 0).to(tracker["sums"].dtype)


# --- the server's half


def _server(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
    """Take the average of the models and, for each label, the mean over the clients that saw it."""
    rows, seen = collected["logits"]["mean"], collected["logits"]["seen"]
    members = seen.sum(0)
    mean = (seen.unsqueeze(-1) * rows).sum(0) / members.clamp(min=1).unsqueeze(-1)
    return {
        **take_average(model, state, collected, rates),
        "logits": {"mean": mean, "members": members},
    }
