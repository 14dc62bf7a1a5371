"""Checks of a job that need its network and its data, before the first round."""

import logging

import numpy as np
import torch

from feddkd.data.federation import Federation
from feddkd.data.index_lists import IndexLists
from feddkd.errors import InputError
from feddkd.method import Method
from feddkd.models.functional import Model
from feddkd.tensors import Tensors
from feddkd.trees import take

log = logging.getLogger(__name__)


def check_classes(output: torch.Tensor, classes: int) -> None:
    """Raise InputError if there are fewer logits than classes; warn of probabilities."""
    if output.shape[1] < classes:
        raise InputError(
            f"labels go up to {classes - 1}, so an example needs {classes} logits or more; the"
            f" network returns {output.shape[1]}"
        )
    if bool((output >= 0).all()) and torch.allclose(output.sum(1), output.new_ones(len(output))):
        log.warning(
            "the network's outputs are probabilities, such as those of a softmax; the loss takes"
            " logits: leave the softmax out"
        )


def check_counted(federation: Federation) -> None:
    """Raise InputError if nothing counts in the targets of a client, or of the server's tests."""
    if federation.units is None:
        return
    clients = {
        "training": federation.train,
        "test": federation.own_test,
        "validation": federation.own_validation,
    }
    server = {"test": [federation.test], "validation": [federation.validation]}
    for owner, parts in (("client {}'s", clients), ("the", server)):
        for part, given in parts.items():
            lists = IndexLists.of(given or ())
            counted = np.bincount(lists.owners, federation.units[lists.values], len(lists))
            empty = np.flatnonzero((counted == 0) & (lists.sizes > 0))
            if len(empty):
                whose = owner.format(empty[0])
                raise InputError(f"none of the targets of {whose} {part} examples counts")


def check_batches(
    model: Model,
    params: Tensors,
    buffers: Tensors,
    federation: Federation,
    method: Method,
    dtype: torch.dtype,
    whole: bool,
) -> None:
    """Raise InputError if a client trains on one example and batch norm cannot.

    Log a warning instead if cohorts are not `whole`: that client may never be asked.
    """
    trains = [p.reads for p in method.phases if p.reads.random and p.reads.source == "train"]
    if not model.norm_names or not any(
        1 in reads.sizes(count) for reads in trains for count in set(federation.sizes) - {0}
    ):
        return
    x = federation.transform(take(federation.x, slice(1)), dtype)
    try:
        model(params, buffers, x, mode="train", key=torch.tensor(0, device=federation.device))
    except ValueError as error:
        problem = (
            f"a client has a mini-batch of one example, and batch norm needs more ({error}): set"
            " drop_last=True or another batch_size"
        )
        if whole:
            raise InputError(problem) from error
        log.warning("%s", problem)


def warn_of_nothing_private(model: Model, method: Method) -> None:
    """Log a warning if a method keeps batch norm with its clients and there is none."""
    if method.private & {"norm", "statistics"} and not model.norm_names:
        log.warning(
            "%s keeps batch norm with its clients, and the network has none: nothing stays there",
            method,
        )


def check_models_left(method: Method) -> None:
    """Raise InputError if clients hold no model after a round, as diagnostics need it."""
    if not any("model" in phase.leaves | phase.keeps for phase in method.phases):
        raise InputError(
            f"diagnostics compares the models that clients train, and in {method} they train none"
        )


def check_computes(method: Method) -> None:
    """Raise InputError if a method has no phase."""
    if not method.phases:
        raise InputError(f"{method} alone computes nothing: put it after a method, as in fedavg()")


def check_public(method: Method, federation: Federation) -> None:
    reading = [phase for phase in method.phases if "public" in phase.reads.source]
    if reading and not len(federation.public):
        raise InputError(
            f"{method} reads public data, and there is none: set a part of the training set aside,"
            " as in public = 0.05, or give public=..."
        )
