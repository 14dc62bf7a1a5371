"""The functions of a distillation round, and their recordings.

There are two: the teachers' targets in all steps, and the gradients at shared weights in one step.
A recording loads the blocks of a round once; for each step only the sent tensors and the number of
the step are copied.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from feddkd.engines.batched.distil_batches import DistilBlock, DistilRound
from feddkd.engines.batched.folds import stacked
from feddkd.engines.compile.cuda_graph import Compiler, Replay, copies, fill, fill_all
from feddkd.gradient import grad
from feddkd.method import Batch, Gradient
from feddkd.models.functional import Model
from feddkd.tensors import Groups, Tensors


def looped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function mapped over the first axis, like vmap, but in a loop.

    This serves networks that vmap cannot take, and an axis of length one.
    """

    def call(*inputs: Any) -> Any:
        rows = range(len(tree_leaves(inputs)[0]))
        results = [function(*tree_map(itemgetter(row), inputs)) for row in rows]
        return tree_map(lambda *tensors: torch.stack(tensors), *results)

    return call


class DistilFunctions(NamedTuple):
    """The two functions of a round: the targets of all steps, and the gradients in one step."""

    targets: Callable[[list[DistilBlock]], list[Tensor]]
    gradients: Callable[[Groups, list[DistilBlock], list[Tensor], Tensor], list[Tensors]]


MapOver = Callable[[Callable[..., Any]], Callable[..., Any]]  # vmap, or looped


def distil_functions(
    model: Model, client: Gradient, mean: bool, over_runs: MapOver, over_clients: MapOver
) -> DistilFunctions:
    """Return the functions for rounds of this client half.

    If `mean`, the gradient is that of each run's mean, else there is one for each client, block by
    block.
    """

    def client_targets(memo: Groups, batches: Batch) -> Tensor:
        result: Tensor = over_clients(lambda batch: client.targets(model, memo, batch))(batches)
        return result

    def block_targets(block: DistilBlock) -> Tensor:
        memo = tree_map(lambda t: t.flatten(0, 1), block.memo)
        batches = tree_map(lambda t: t.flatten(1, 2).transpose(0, 1), block.batches)
        result: Tensor = over_clients(client_targets)(memo, batches)
        result = result.transpose(0, 1)
        return result.reshape(result.shape[0], *block.weight.shape, *result.shape[2:])

    def targets(blocks: list[DistilBlock]) -> list[Tensor]:
        return [block_targets(block) for block in blocks]

    def of_run(sent: Groups, blocks: list[tuple[Groups, Batch, Tensor, Tensor]]) -> list[Tensors]:
        def loss(w: Tensors, memo: Groups, batch: Batch, target: Tensor) -> Tensor:
            return client.loss(model, w, sent, memo, batch, target)

        def total(w: Tensors) -> Tensor:
            parts = [
                (weight * over_clients(partial(loss, w))(*inputs)).sum()
                for *inputs, weight in blocks
            ]
            return torch.stack(parts).sum()

        if mean:
            return [grad(total)(sent["params"])]
        each = over_clients(lambda *inputs: grad(loss)(sent["params"], *inputs))
        return [each(*inputs) for *inputs, _ in blocks]

    def gradients(
        sent: Groups, blocks: list[DistilBlock], targets: list[Tensor], step: Tensor
    ) -> list[Tensors]:
        def now(tensor: Tensor) -> Tensor:
            return tensor.index_select(0, step).squeeze(0)

        of_step = [
            (block.memo, tree_map(now, block.batches), now(target), block.weight)
            for block, target in zip(blocks, targets, strict=True)
        ]
        result: list[Tensors] = over_runs(of_run)(sent, of_step)
        return result

    return DistilFunctions(targets, gradients)


class RecordedRound:
    """The functions of a round as CUDA graphs.

    Blocks, targets, sent tensors and the number of the step lie in fixed tensors.
    """

    def __init__(
        self,
        round: DistilRound,
        sents: Sequence[Groups],
        functions: DistilFunctions,
        fuse: Compiler | None,
        pool: Any,
    ) -> None:
        self.blocks, self.sent = tree_map(torch.clone, round.blocks), stacked(list(sents))
        self.step = torch.zeros(1, dtype=torch.int64, device=round.blocks[0].weight.device)
        self.replay_targets = Replay(functions.targets, (self.blocks,), fuse, pool)
        self.targets = self.replay_targets()
        inputs = self.sent, self.blocks, self.targets, self.step
        self.replay_gradients = Replay(functions.gradients, inputs, fuse, pool)
        self.names = [(group, name) for group, tensors in self.sent.items() for name in tensors]
        self.sent_by_run = [
            self.sent[group][name][run] for run in range(len(sents)) for group, name in self.names
        ]
        self.round: DistilRound | None = round  # the one whose blocks and targets are loaded

    def load(self, round: DistilRound) -> None:
        """Copy the blocks of a round and compute their targets."""
        fill(self.blocks, round.blocks)
        self.replay_targets()
        self.round = round

    def gradients(self, round: DistilRound, sents: Sequence[Groups], step: int) -> list[Tensors]:
        """Return the gradients in one step of a round."""
        if self.round is not round:
            self.load(round)
        sent = [tensors[group][name] for tensors in sents for group, name in self.names]
        fill_all(self.sent_by_run, sent)
        self.step.fill_(step)
        result: list[Tensors] = copies(self.replay_gradients())
        return result
