"""Engines and functions that observe a method: clients that stop answering, bytes that are sent,
draws from global generators, tensors that are changed in place.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from feddkd.data.batches import Source
from feddkd.data.federation import SERVER
from feddkd.engines.client import ALL, answer
from feddkd.engines.interface import Engine, Order, Reply
from feddkd.engines.serial import Serial
from feddkd.method import Batch, Exchange, Fold, Gradient, Method, Phase
from feddkd.models.functional import Model
from feddkd.randomness import Key
from feddkd.tensors import Groups, bytes_of


def is_the_methods(order: Order) -> bool:
    """Return whether the order belongs to an exchange of the method, not to an evaluation."""
    return order.purpose == "train"


@dataclass(frozen=True)
class FallsSilent:
    """Wraps an engine: in every round the cohort's first client answers only `after` exchanges."""

    after: int

    def __call__(self, engine: Engine) -> Engine:
        return Silent(engine, self.after)


@dataclass
class Silent:
    """The engine around another that FallsSilent makes."""

    remote: ClassVar[bool] = False
    engine: Engine
    after: int
    # (run, round) -> its exchanges so far
    _keys: dict[tuple[int, Any], list[Key]] = field(default_factory=dict)
    _who: dict[tuple[int, Any], int] = field(default_factory=dict)  # (run, round) -> the client

    def sizes(self, run: int, source: Source = "train") -> Sequence[int]:
        return self.engine.sizes(run, source)

    def weights(self, run: int, source: Source = "train") -> Sequence[int]:
        return self.engine.weights(run, source)

    def memos_of(self, run: int) -> Mapping[int, Groups]:
        return self.engine.memos_of(run)

    def restore(self, run: int, memos: Mapping[int, Groups]) -> None:
        self.engine.restore(run, memos)

    def facts(self) -> dict[str, Any]:
        return self.engine.facts()

    def adopt(self, facts: Mapping[str, Any]) -> None:
        self.engine.adopt(facts)

    def close(self) -> None:
        self.engine.close()

    def exchange(self, exchange: Exchange, orders: Sequence[Order]) -> list[Reply]:
        orders = [self._thinned(order) for order in orders]
        replies = iter(self.engine.exchange(exchange, [order for order in orders if order.cohort]))
        return [next(replies) if order.cohort else Reply((), {}) for order in orders]

    def _thinned(self, order: Order) -> Order:
        if order.cohort == (SERVER,) or not is_the_methods(order):
            return order
        place = order.run, order.key[1]
        silent = self._who.setdefault(place, order.cohort[0])
        keys = self._keys.setdefault(place, [])
        if order.key not in keys:
            keys.append(order.key)
        if len(keys) <= self.after:
            return order
        return order._replace(cohort=tuple(client for client in order.cohort if client != silent))


@dataclass
class Counting(Serial):
    """A serial engine that counts the bytes that are really sent to and from each client."""

    keys: set[Key] = field(default_factory=set)
    bytes_up: int = 0
    bytes_down: int = 0

    @property
    def totals(self) -> dict[str, int]:
        """The counts, named as the columns of a row."""
        return {
            "communications": len(self.keys),
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
        }

    def _ask(
        self, phase: Phase, order: Order, client: int, memo: Groups, which: slice = ALL
    ) -> tuple[Groups, Groups]:
        upload, after = super()._ask(phase, order, client, memo, which)
        if client != SERVER and is_the_methods(order):
            self.keys.add(order.key)
            self.bytes_up += bytes_of(upload)
            self.bytes_down += bytes_of(order.sent)
        return upload, after


class Unseeded(Serial):
    """A serial engine whose clients draw from torch's own generator, so that it is noticed."""

    def _ask(
        self, phase: Phase, order: Order, client: int, memo: Groups, which: slice = ALL
    ) -> tuple[Groups, Groups]:
        key, data = (*order.key, client), self.federations[order.run]
        return answer(
            self.model, phase, order.sent, memo, data, client, key, self.dtype, which=which
        )


# --- functions that must not change their arguments


class TensorBefore(NamedTuple):
    """A tensor and its numbers before a call."""

    holder: Any
    name: Any
    path: str
    tensor: Tensor
    version: int
    copy: Tensor

    @property
    def changed(self) -> bool:
        """True if the tensor has been replaced or changed since."""
        now = self.holder[self.name] if self.name in _names(self.holder) else None
        return (
            now is not self.tensor
            or now._version != self.version
            or not torch.equal(now, self.copy)
        )


def guarded(method: Method, report: Callable[[str], None]) -> Method:
    """Return the same method; `report` is called for every function that changes its arguments."""

    def watch(phase: Phase, name: str, names: str, function: Any) -> Any:
        if function is None:
            return None

        def call(*inputs: Any) -> Any:
            arguments = zip(names.split(), inputs, strict=True)
            groups = {key: value for key, value in arguments if isinstance(value, Mapping | tuple)}
            before, keys = list(_tensors(groups)), list(_keys(groups))
            result = function(*inputs)
            changed = [f": {tensor.path}" for tensor in before if tensor.changed]
            if not changed and keys != list(_keys(groups)):
                changed = [""]
            for path in changed:
                report(f"{name} of phase {phase.name!r} changes its arguments{path}")
            return result

        return call

    def guard(phase: Phase) -> Phase:
        client = phase.client
        if isinstance(client, Fold):
            client = Fold(
                watch(phase, "start", "model sent memo", client.start),
                watch(phase, "step", "model sent carry batch", client.step),
                watch(phase, "finish", "model sent carry memo", client.finish),
            )
        elif isinstance(client, Gradient):
            client = replace(
                client,
                targets=watch(phase, "targets", "model memo batch", client.targets),
                loss=watch(phase, "loss", "model _ sent memo batch _", client.loss),
            )
        return replace(
            phase,
            client=client,
            server=watch(phase, "server", "model state collected rates", phase.server),
            over=watch(phase, "over", "state", phase.over),
            opens=watch(phase, "opens", "model state _", phase.opens),
            brings=watch(phase, "brings", "model state _", phase.brings),
        )

    return replace(method, phases=tuple(guard(phase) for phase in method.phases))


def watched(method: Method, moved: set[str]) -> Method:
    """Return the same method; it adds the parameters that clients' steps change to `moved`."""

    def watch(phase: Phase) -> Phase:
        client = phase.client
        if not isinstance(client, Fold) or phase.at == "server":
            return phase
        step = client.step

        def watched_step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
            after = step(model, sent, carry, batch)
            before = carry.get("params", {})
            for name, tensor in after.get("params", {}).items():
                if name in before and not torch.equal(tensor, before[name]):
                    moved.add(name)
            return after

        return replace(phase, client=replace(client, step=watched_step))

    return replace(method, phases=tuple(map(watch, method.phases)))


def _names(holder: Any) -> Sequence[Any]:
    return list(holder) if isinstance(holder, Mapping) else range(len(holder))


def _tensors(holder: Any, path: str = "") -> Iterator[TensorBefore]:
    """Yield every tensor in nested mappings and tuples.

    Arguments named _ are left out: they are inside a transformation of torch.func, or no tensors.
    """
    for name in _names(holder):
        value = holder[name]
        if isinstance(value, Tensor):
            yield TensorBefore(
                holder, name, f"{path}[{name!r}]", value, value._version, value.clone()
            )
        elif isinstance(value, Mapping | tuple) and name != "_":
            yield from _tensors(value, f"{path}[{name!r}]" if path else str(name))


def _keys(holder: Any) -> Iterator[Any]:
    for name in _names(holder):
        yield name, id(holder[name])
        if isinstance(holder[name], Mapping | tuple) and name != "_":
            yield from _keys(holder[name])
