"""An engine that computes one client after another, one step after another.

All other engines are tested against it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from feddkd.engines.client import (
    ALL,
    RunFold,
    answer,
    client_weights,
    gather,
    retained,
    run_fold,
)
from feddkd.engines.interface import Order, Reply
from feddkd.engines.local import LocalEngine
from feddkd.errors import ClientError, InputError
from feddkd.method import Exchange, Phase
from feddkd.method.compression import opened
from feddkd.models.own_generator import OwnGenerator
from feddkd.tensors import Groups, bytes_of, stack


@dataclass
class Serial(LocalEngine):
    """An engine that computes one client after another."""

    def exchange(self, exchange: Exchange, orders: Sequence[Order]) -> list[Reply]:
        return [self._perform(exchange, order) for order in orders]

    @property
    def _fold_runner(self) -> RunFold:
        return run_fold

    def _perform(self, exchange: Exchange, order: Order) -> Reply:
        uploads = []
        for client in order.cohort:
            memo = self.memo(order.run, client)
            upload, memo = self._ask(exchange.phase, order, client, memo)
            uploads.append(upload)
            self.memos[order.run, client] = retained(memo, exchange.retain)
        return self._gathered(exchange.phase, order, uploads)

    def _gathered(self, phase: Phase, order: Order, uploads: Sequence[Groups]) -> Reply:
        examples = client_weights(self.federations[order.run], phase, order.cohort)
        size = None if phase.codec is None else sum(map(bytes_of, uploads))
        uploads = [opened(phase, upload, order.sent) for upload in uploads]
        stacked = {group: stack([upload[group] for upload in uploads]) for group in uploads[0]}
        return Reply(order.cohort, gather(phase, stacked, examples), uploaded=size)

    def _ask(
        self, phase: Phase, order: Order, client: int, memo: Groups, which: slice = ALL
    ) -> tuple[Groups, Groups]:
        """Return (upload, memo) of one client, or raise a ClientError that names it."""
        key = (*order.key, client)
        federation = self.federations[order.run]
        given = (self.model, phase, order.sent, memo, federation, client, key, self.dtype)
        try:
            with OwnGenerator(key, federation.device):  # for methods whose own step draws
                return answer(*given, self._fold_runner, which)
        except InputError:
            raise
        except Exception as error:
            raise ClientError(
                f"client {client} failed in phase {phase.name!r}, key {key}:"
                f" {error or type(error).__name__}"
            ) from error
