"""The common part of the engines whose clients compute on this machine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from feddkd.data.batches import Source
from feddkd.data.federation import Federation
from feddkd.models.functional import Model
from feddkd.tensors import Groups


@dataclass
class LocalEngine:
    """Federations in memory, one for each run, and the memos of their clients."""

    remote: ClassVar[bool] = False
    model: Model
    federations: Sequence[Federation]
    first_memos: Sequence[Groups]  # for each run, the memo that every client begins with
    dtype: torch.dtype = torch.float32
    # (run, client) -> memo, if it is another than the first one
    memos: dict[tuple[int, int], Groups] = field(default_factory=dict, init=False)

    def sizes(self, run: int, source: Source = "train") -> Sequence[int]:
        return self.federations[run].counts(source)

    def weights(self, run: int, source: Source = "train") -> Sequence[int]:
        return self.federations[run].weights(source)

    def memo(self, run: int, client: int) -> Groups:
        """Return the memo that a client holds now."""
        return self.memos.get((run, client), self.first_memos[run])

    def memos_of(self, run: int) -> Mapping[int, Groups]:
        return {client: memo for (of, client), memo in self.memos.items() if of == run and memo}

    def restore(self, run: int, memos: Mapping[int, Groups]) -> None:
        others = {owner: memo for owner, memo in self.memos.items() if owner[0] != run}
        self.memos = {**others, **{(run, client): memo for client, memo in memos.items()}}

    def facts(self) -> dict[str, Any]:
        return {}

    def adopt(self, facts: Mapping[str, Any]) -> None:
        pass

    def close(self) -> None:
        self.memos.clear()
