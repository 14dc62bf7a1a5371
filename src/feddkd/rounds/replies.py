"""Replies in one exchange: who did not answer, whose numbers are bad, and all of them as one."""

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from feddkd.engines.interface import Reply
from feddkd.errors import DivergedError, NobodyAnsweredError
from feddkd.method import Collect, Exchange, Phase
from feddkd.rounds.turns import Asked, Turn
from feddkd.tensors import Groups, Tensors, combine, is_finite, stack, weighted_mean

log = logging.getLogger(__name__)


def bad_clients(asked: Asked, replies: Sequence[Reply], memos: Mapping[int, Groups]) -> set[int]:
    """Return the clients whose upload or memo is not finite."""
    uploads: dict[int, Groups] = {k: reply.collected for reply in replies for k in reply.clients}
    for client, why in asked.absent.items():
        if why == "late":
            uploads[client] = {}
    return {
        client
        for client, upload in uploads.items()
        if not (is_finite(upload) and is_finite(memos.get(client, {})))
    }


def note_missing(exchange: Exchange, asked: Asked, replies: Sequence[Reply]) -> None:
    """Remove the clients that did not reply from the cohort, and record them under `missing`.

    An engine may have lost further clients. Raise an error if no client is left, unless the engine
    says that the round alone ends.
    """
    turn = asked.turn
    expected = {client for order in asked.orders for client in order.cohort}
    answered = {client for reply in replies for client in reply.clients}
    missing = sorted(expected - answered)
    if missing:
        before = turn.row.get("missing", [])
        phase, step = exchange.phase.name, exchange.step
        lines = [[phase, step, client, asked.absent.get(client, "drop")] for client in missing]
        turn.row["missing"] = [*before, *lines]
    turn.cohort = tuple(client for client in turn.cohort if client not in missing)
    if any(reply.short for reply in replies):
        return
    if not (turn.cohort if exchange.phase.at == "clients" else answered):
        if "not finite" in asked.absent.values():
            raise DivergedError(f"no client sent finite numbers in {turn.where(exchange)}")
        raise NobodyAnsweredError(f"no client answered {turn.where(exchange)}")


def end_round(exchange: Exchange, turn: Turn, answered: int, least: int) -> None:
    """End the round of a run because too few clients answered."""
    turn.over = True
    turn.row["ended"] = {
        "phase": exchange.phase.name,
        "step": exchange.step,
        "answered": answered,
        "min_clients": least,
    }
    log.warning(
        "too few clients answered %s: %d of at least %d; the round ends there",
        turn.where(exchange),
        answered,
        least,
    )


@lru_cache(maxsize=256)
def who_answered(
    clients: tuple[int, ...],
    examples: tuple[int, ...],
    total: int,
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Tensor]:
    """Return tensors about the clients that answered, for the server.

    They are cached: through the J steps of a round they are the same, and so are copied to the
    device once.
    """
    share = torch.tensor(len(clients) / total, dtype=dtype, device=device)
    return {
        "clients": torch.tensor(clients, device=device),
        "examples": torch.tensor(examples, device=device),
        "share": share,
    }


def joined(phase: Phase, replies: Sequence[Reply], sizes: Sequence[int]) -> Groups:
    """Return the uploads of the parts of a cohort as one, as if the cohort had not been divided."""
    if len(replies) == 1:
        return replies[0].collected

    def gathered(group: str, rule: Collect) -> Tensors:
        parts = [reply.collected[group] for reply in replies]
        if rule is Collect.EVERY:
            return combine(lambda *tensors: torch.cat(tensors), *parts)
        by_examples = rule is Collect.MEAN_BY_EXAMPLES
        weights = [sum(sizes[k] if by_examples else 1 for k in reply.clients) for reply in replies]
        return weighted_mean(stack(parts), weights)

    rules = {**phase.collect, **dict.fromkeys(phase.every, Collect.EVERY)}
    return {group: gathered(group, rule) for group, rule in rules.items()}
