"""What one client does in an exchange, and how uploads are gathered:

the parts that all engines share.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.func import grad

from feddkd.data.batches import Indices, draw
from feddkd.data.federation import Federation
from feddkd.method import Batch, Collect, Fold, Phase, probing
from feddkd.models.functional import Model
from feddkd.randomness import Key, fold, step_keys
from feddkd.tensors import Groups, Tensors, weighted_mean

Memos = dict[tuple[int, int], Groups]  # (run, client) -> memo
ALL = slice(None)
# (model, client, sent, carry, batches) -> carry
Walk = Callable[[Model, Fold, Groups, Groups, Iterable[Batch]], Groups]


@contextmanager
def seeded(key: Key, device: torch.device) -> Iterator[None]:
    """torch's own generators as a function of the key, for networks that draw from them (F.dropout,
    say); put back afterwards.
    """
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        # not torch.manual_seed: without a GPU it keeps a stack trace of every call for the day when
        # there is one
        source = (
            torch.cuda.default_generators[device.index or 0] if on_gpu else torch.default_generator
        )
        source.manual_seed(fold(key))
        yield


def step_by_step(
    model: Model, client: Fold, sent: Groups, carry: Groups, batches: Iterable[Batch]
) -> Groups:
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
    walk: Walk = step_by_step,
    which: slice = ALL,
) -> tuple[Groups, Groups]:
    """What one client does in an exchange, or with `which` of its batches: (upload, memo). `walk`
    carries a fold through them.
    """
    indices = federation.indices(phase.reads.source, client)
    drawn = draw(phase.reads, len(indices), key)
    drawn, numbers = drawn[which], step_keys(key, len(drawn))[which]
    batches = (
        read(federation, indices[d], int(n), dtype, phase.reads.random)
        for d, n in zip(drawn, numbers, strict=True)
    )
    client_half = phase.client
    if isinstance(client_half, Fold):
        carry = walk(model, client_half, sent, client_half.start(model, sent, memo), batches)
        return client_half.finish(model, sent, carry, memo)
    assert client_half is not None, "a phase without a client half never reaches an engine"
    (batch,) = batches

    def loss(w: Tensors, batch: Batch) -> Tensor:
        return client_half.loss(
            model, w, sent, memo, batch, client_half.targets(model, memo, batch)
        )

    upload: dict[str, Tensors] = {"gradient": grad(loss)(sent["params"], batch)}
    if probe := probing(phase):
        upload |= answer(model, probe, sent, memo, federation, client, key, dtype)[0]
    return upload, memo


def read(
    federation: Federation, indices: Indices, number: int, dtype: torch.dtype, random: bool
) -> Batch:
    """A mini-batch as the network sees it, all examples with the same share."""
    device = federation.x.device
    at = torch.from_numpy(indices).to(device)
    step_key = torch.tensor(number, device=device)
    x = federation.transform(federation.x[at], dtype, step_key if random else None)
    share: Tensor = torch.full((len(indices),), 1 / len(indices), dtype=dtype, device=device)
    return Batch(x, federation.y[at], share, step_key)


def gather(phase: Phase, stacked: Groups, examples: Sequence[int]) -> Groups:
    """Uploads, stacked over clients, each group by its rule."""

    def one(group: str, rule: Collect) -> Tensors:
        if rule is Collect.EVERY:
            return stacked[group]
        return weighted_mean(
            stacked[group], examples if rule is Collect.MEAN_BY_EXAMPLES else [1] * len(examples)
        )

    gathered = {group: one(group, rule) for group, rule in phase.collect.items()}
    return {**gathered, **{name: stacked[group] for name, group in phase.every.items()}}


def restored(held: Memos, run: int, memos: Mapping[int, Groups]) -> Memos:
    """One run's memos in place of those it held."""
    others = {at: memo for at, memo in held.items() if at[0] != run}
    return {**others, **{(run, client): memo for client, memo in memos.items()}}


def retained(memo: Groups, names: frozenset[str] | None) -> Groups:
    return memo if names is None else {name: group for name, group in memo.items() if name in names}
