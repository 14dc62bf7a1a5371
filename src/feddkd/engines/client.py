"""One client's computation in an exchange, and the gathering of uploads: shared by all engines."""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from feddkd.data.batches import Indices, draw
from feddkd.data.federation import Federation
from feddkd.gradient import grad
from feddkd.method import Batch, Collect, Fold, Phase, probing
from feddkd.models.functional import Model
from feddkd.randomness import Key, step_keys
from feddkd.tensors import Groups, Tensors, weighted_mean
from feddkd.trees import take

ALL = slice(None)
# (model, client half, sent, carry, batches) -> carry
RunFold = Callable[[Model, Fold, Groups, Groups, Iterable[Batch]], Groups]


def run_fold(
    model: Model, client: Fold, sent: Groups, carry: Groups, batches: Iterable[Batch]
) -> Groups:
    """Return the carry after one step for each batch."""
    for batch in batches:
        carry = client.step(model, sent, carry, batch)
    return carry


def answer(
    model: Model,
    phase: Phase,
    sent: Groups,
    memo: Groups,
    federation: Federation,
    client: int,
    key: Key,
    dtype: torch.dtype,
    fold_runner: RunFold = run_fold,
    which: slice = ALL,
) -> tuple[Groups, Groups]:
    """Return (upload, memo) of one client after an exchange, or after some of its batches.

    `which` selects the batches; `fold_runner` carries a fold through them.
    """
    memo = with_facts(phase, memo, federation, client)
    indices = federation.indices(phase.reads.source, client)
    drawn = draw(phase.reads, len(indices), key)
    numbers = step_keys(key, len(drawn))
    batches = (
        read(federation, indices[positions], int(number), dtype, phase.reads.random)
        for positions, number in zip(drawn[which], numbers[which], strict=True)
    )
    client_half = phase.client
    if isinstance(client_half, Fold):
        start = client_half.start(model, sent, memo)
        carry = fold_runner(model, client_half, sent, start, batches)
        return client_half.finish(model, sent, carry, memo)
    assert client_half is not None, "a phase without a client half never reaches an engine"
    (batch,) = batches

    def loss(w: Tensors, batch: Batch) -> Tensor:
        targets = client_half.targets(model, memo, batch)
        return client_half.loss(model, w, sent, memo, batch, targets)

    upload: dict[str, Tensors] = {"gradient": grad(loss)(sent["params"], batch)}
    if probe := probing(phase):
        upload |= answer(model, probe, sent, memo, federation, client, key, dtype)[0]
    return upload, memo


def with_facts(phase: Phase, memo: Groups, federation: Federation, client: int) -> Groups:
    """Return a client's memo with the facts of its examples that the phase asks for."""
    if not phase.facts:
        return memo
    indices, device = federation.indices(phase.reads.source, client), federation.device
    facts: dict[str, Tensor] = {}
    if "batches" in phase.facts:
        facts["batches"] = torch.tensor(phase.reads.batches_an_epoch(len(indices)), device=device)
    if "labels" in phase.facts:
        labels = take(federation.y, torch.from_numpy(indices).to(device))
        facts["labels"] = torch.bincount(labels, minlength=federation.classes)
    return {**memo, "facts": facts}


def read(
    federation: Federation, indices: Indices, number: int, dtype: torch.dtype, random: bool
) -> Batch:
    """Return a mini-batch as the network sees it; every example has the same share."""
    device = federation.device
    positions = torch.from_numpy(indices).to(device)
    step_key = torch.tensor(number, device=device)
    x = federation.transform(take(federation.x, positions), dtype, step_key if random else None)
    share: Tensor = torch.full((len(indices),), 1 / len(indices), dtype=dtype, device=device)
    return Batch(x, take(federation.y, positions), share, step_key)


def client_weights(federation: Federation, phase: Phase, cohort: Sequence[int]) -> list[int]:
    """Return the weight of each client of a cohort in means: how many of its examples count."""
    return [federation.weight(phase.reads.source, client) for client in cohort]


def gather(phase: Phase, stacked: Groups, examples: Sequence[int]) -> Groups:
    """Return the uploads, stacked over clients, gathered: each group by the phase's rule for it.

    `examples` are the clients' weights in means by examples.
    """
    gathered: dict[str, Tensors] = {}
    for group, rule in phase.collect.items():
        if rule is Collect.EVERY:
            gathered[group] = stacked[group]
        else:
            weights = examples if rule is Collect.MEAN_BY_EXAMPLES else [1] * len(examples)
            gathered[group] = weighted_mean(stacked[group], weights)
    return {**gathered, **{name: stacked[group] for name, group in phase.every.items()}}


def retained(memo: Groups, names: frozenset[str] | None) -> Groups:
    """Return the groups of a memo that have one of these names; all of them for None."""
    return memo if names is None else {name: group for name, group in memo.items() if name in names}
