"""Replies that the server expects in an exchange, and the log of those that are missing."""

import logging
from dataclasses import replace

import numpy as np
import torch

from feddkd.data.federation import Federation
from feddkd.engines.client import answer
from feddkd.engines.interface import Order
from feddkd.flower.wire import printable
from feddkd.method import Exchange, Phase
from feddkd.models.functional import Model
from feddkd.models.own_generator import OwnGenerator
from feddkd.tensors import Groups

log = logging.getLogger(__name__)


def tried(
    model: Model,
    phase: Phase,
    sent: Groups,
    memo: Groups,
    federation: Federation,
    dtype: torch.dtype,
) -> tuple[Groups, Groups]:
    """Return (upload, memo) of a client with four examples that does one step here.

    They have the names, shapes and types of every client's.
    """
    four = np.resize(federation.test, 4)
    small = replace(federation, train=(four,), own_test=None, validation=four, test=four)
    one_step = replace(phase, reads=replace(phase.reads, steps=1))
    key = ("pattern", 1, 0, 1, 0)
    with OwnGenerator(key, federation.device):
        return answer(model, one_step, sent, memo, small, 0, key, dtype)


def log_no_answer(client: int, exchange: Exchange, order: Order, why: object) -> None:
    """Log that a client has not answered, and why."""
    log.warning(
        "client %s has not answered phase %r, key %s: %s",
        client,
        exchange.phase.name,
        (*order.key, client),
        printable(why),
    )
