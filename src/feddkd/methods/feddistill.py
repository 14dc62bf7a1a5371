"""FedDistill, also FD: Jeong, Oh, Kim, Park, Bennis, Kim, "Communication-efficient on-device
machine learning: federated distillation and augmentation under non-IID private data", NeurIPS 2018
workshop, arXiv:1811.11479; Seo et al., arXiv:2011.02367.

    local loss = CE + coefficient KL(softmax(zbar[y]) || f(w; x)),   zbar[c] = 1/M sum_k z_k[c]
    z_k[c] = client k's mean logits on its examples of label c

FedDistill exchanges those mean logits alone, and every client keeps a model of its own; FedDistill+
(FedDistill-FL in the code of FedGen, arXiv:2105.10056, which the FedDKD paper compares with)
averages the models as well.

The trackers are FedGen's: sums and counts over the training-mode logits of every mini-batch, never
reset. Its counts begin at one, so that rare labels shrink towards zero and a label that a client
never saw counts as a row of zeros in the mean; `counts_from="zero"` takes true means and leaves out
of each label's mean those who never saw it. FedGen's mean is over all clients of the last round;
`leave_one_out=True` is the original's, (M zbar - z_k) / (M - 1): a client takes its own share out
of the mean if it was part of it. No term where there is nobody to learn from, as in the first
round. (FedGen's tracker keeps the graph of past logits alive; ours does not, the values are the
same.)

Beside the logits of a label goes one number: whether the client has any, and how many had.
"""

from functools import partial
from typing import Literal

from torch import Tensor

from feddkd.method import Batch, Collect, Method, Private, World
from feddkd.methods.local import Local, Variant, local_training, take_average
from feddkd.methods.losses import distillation
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
    """Models stay private, each label's mean logits are shared: loss = CE + coefficient
    KL(softmax(zbar[y]) || f(w; x)).
    """
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
    """FedAvg with each label's mean logits shared, too: loss = CE + coefficient KL(softmax(zbar[y])
    || f(w; x)).
    """
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
    )


def _open(model: Model, state: Groups, world: World) -> Groups:
    nothing = world.like.new_zeros(world.classes, world.outputs)
    return {"logits": {"mean": nothing, "members": nothing[:, 0]}}


def _bring(dated: bool, count: float, model: Model, state: Groups, world: World) -> Groups:
    sums, counts = (
        world.like.new_zeros(world.classes, world.outputs),
        world.like.new_full((world.classes,), count),
    )
    return {
        "tracker": {
            "sums": sums,
            "counts": counts,
            **({"round": world.like.new_zeros(())} if dated else {}),
        }
    }


# --- the client's half


def _begin(leave_one_out: bool, model: Model, sent: Groups, memo: Groups) -> Groups:
    mean, members, tracker = sent["logits"]["mean"], sent["logits"]["members"], memo["tracker"]
    # the tracker has not moved since the client last answered: what it says is what the client then
    # sent
    if leave_one_out:
        asked_last = tracker["round"] == sent["rates"]["round"] - 1
        own = _seen(tracker) * asked_last
        total = members.unsqueeze(-1) * mean - own.unsqueeze(-1) * _means(tracker)
        members = members - own
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
    return coefficient * distillation(
        taught, output.logits, batch._replace(share=batch.share * known)
    )


def _track(model: Model, sent: Groups, carry: Groups, output: Output, batch: Batch) -> Groups:
    tracker = carry["tracker"]
    marks = batch.marks(len(tracker["counts"]))
    # not a matrix product: tf32 would round the logits
    sums = (marks.unsqueeze(-1) * output.logits.unsqueeze(1)).sum(0)
    return {
        "tracker": {
            **tracker,
            "sums": tracker["sums"] + sums,
            "counts": tracker["counts"] + marks.sum(0),
        }
    }


def _part(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
    tracker = carry["tracker"]
    return {"logits": {"mean": _means(tracker), "seen": _seen(tracker)}}, {"tracker": tracker}


def _means(tracker: Tensors) -> Tensor:
    return tracker["sums"] / tracker["counts"].clamp(min=1).unsqueeze(-1)


def _seen(tracker: Tensors) -> Tensor:
    return (tracker["counts"] > 0).to(tracker["sums"].dtype)


# --- the server's half


def _server(model: Model, state: Groups, collected: Groups, rates: Tensors) -> Groups:
    """Label by label the mean over the clients that have a say in it."""
    rows, seen = collected["logits"]["mean"], collected["logits"]["seen"]
    members = seen.sum(0)
    mean = (seen.unsqueeze(-1) * rows).sum(0) / members.clamp(min=1).unsqueeze(-1)
    return {
        **take_average(model, state, collected, rates),
        "logits": {"mean": mean, "members": members},
    }
