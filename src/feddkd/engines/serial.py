"""One client after another, one step after another:

the oracle every other engine is tested against.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from feddkd.data.batches import Source
from feddkd.data.federation import Federation
from feddkd.engines.client import (
    ALL,
    Memos,
    Walk,
    answer,
    gather,
    restored,
    retained,
    seeded,
    step_by_step,
)
from feddkd.engines.interface import Order, Reply
from feddkd.errors import ClientError, InputError
from feddkd.method import Exchange, Phase
from feddkd.models.functional import Model
from feddkd.tensors import Groups, stack


@dataclass
class Serial:
    """An engine over federations in memory, one for each run, with the memo every client begins
    with.
    """

    remote: ClassVar[bool] = False
    model: Model
    federations: Sequence[Federation]
    first_memos: Sequence[Groups]
    dtype: torch.dtype = torch.float32
    memos: Memos = field(default_factory=dict)

    def sizes(self, run: int, source: Source = "train") -> Sequence[int]:
        return self.federations[run].counts(source)

    def memos_of(self, run: int) -> Mapping[int, Groups]:
        return {client: memo for (own, client), memo in self.memos.items() if own == run and memo}

    def restore(self, run: int, memos: Mapping[int, Groups]) -> None:
        self.memos = restored(self.memos, run, memos)

    def facts(self) -> dict[str, Any]:
        return {}

    def adopt(self, facts: Mapping[str, Any]) -> None:
        pass

    def exchange(self, exchange: Exchange, orders: Sequence[Order]) -> list[Reply]:
        return [self._perform(exchange, order) for order in orders]

    def close(self) -> None:
        self.memos.clear()

    @property
    def _walk(self) -> Walk:
        return step_by_step

    def _perform(self, exchange: Exchange, order: Order) -> Reply:
        uploads = []
        for client in order.cohort:
            memo = self.memos.get((order.run, client), self.first_memos[order.run])
            upload, memo = self._ask(exchange.phase, order, client, memo)
            uploads.append(upload)
            self.memos[order.run, client] = retained(memo, exchange.retain)
        federation, source = self.federations[order.run], exchange.phase.reads.source
        examples = [len(federation.indices(source, client)) for client in order.cohort]
        stacked = {group: stack([upload[group] for upload in uploads]) for group in uploads[0]}
        return Reply(order.cohort, gather(exchange.phase, stacked, examples))

    def _ask(
        self, phase: Phase, order: Order, client: int, memo: Groups, which: slice = ALL
    ) -> tuple[Groups, Groups]:
        key = (*order.key, client)
        try:
            with seeded(key, self.federations[order.run].x.device):
                own = self.federations[order.run]
                return answer(
                    self.model,
                    phase,
                    order.sent,
                    memo,
                    own,
                    client,
                    key,
                    self.dtype,
                    self._walk,
                    which,
                )
        except InputError:
            raise
        except Exception as error:
            raise ClientError(
                f"client {client} failed in phase {phase.name!r}, key {key}: {error}"
            ) from error
