"""FedAvg and FedDKD with defences, attacks and compression, in plain PyTorch and NumPy.

Written from the papers: one vector for each update, loops over clients. Only the choice of clients,
of examples and of random numbers is the package's.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, softmax
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from feddkd.data.batches import Reads, draw
from feddkd.method.upload_changes import ATTACK, CODEC
from feddkd.randomness import step_keys, uniform
from feddkd.rounds.loop import choose

Vector = Any  # a numpy array
# (update, client, phase, number of the client's last step) -> update
Change = Callable[[Vector, int, int, int], Vector]


def plain_defence(gather: str, updates: Vector, last: Vector, **options: Any) -> Vector:
    m = len(updates)
    if gather in ("krum", "multi_krum"):
        f = options["faulty"]
        scores = []
        for i in range(m):
            others = sorted(
                float(((updates[i] - updates[j]) ** 2).sum()) for j in range(m) if j != i
            )
            scores.append(sum(others[: max(m - f - 2, 1)]))
        if gather == "krum":
            return updates[int(np.argmin(scores))]
        return np.mean([updates[i] for i in sorted(range(m), key=scores.__getitem__)[: m - f]], 0)
    if gather == "geometric":
        point = updates.mean(0)
        for _ in range(32):
            beta = [1 / max(1e-6, float(np.linalg.norm(point - u))) for u in updates]
            point = sum(b * u for b, u in zip(beta, updates, strict=True)) / sum(beta)
        return point
    if gather == "centred":
        total = np.zeros_like(last)
        for u in updates:
            distance = float(np.linalg.norm(u - last))
            total += (u - last) * (min(1, options["radius"] / distance) if distance else 1)
        return last + total / m
    raise ValueError(gather)


@dataclass
class PlainRobust:
    """One run on a network without buffers."""

    net: nn.Module
    clients: Sequence[tuple[Tensor, Tensor]]
    lr: float
    steps: int  # of DKD
    dkd_lr: float
    seed: int = 3
    batch_size: int = 8
    defence: dict[str, Any] = field(default_factory=dict)
    attack: Change = lambda update, client, phase, number: update
    compress: Change = lambda update, client, phase, number: update
    select: Callable[["PlainRobust", int, int], Sequence[int]] | None = None
    last: dict[int, Vector] = field(default_factory=dict)  # phase -> gathered update
    uploads: list[tuple[int, int, Vector]] = field(default_factory=list)  # (client, phase, update)
    cohorts: list[tuple[int, ...]] = field(default_factory=list)

    @classmethod
    def of(cls, net: nn.Module, clients: Sequence[Any], **options: Any) -> "PlainRobust":
        return cls(copy.deepcopy(net), clients, **options)

    @property
    def params(self) -> dict[str, Tensor]:
        return {name: tensor.detach() for name, tensor in self.net.named_parameters()}

    def run(self, rounds: int, cohort: int) -> None:
        for t in range(1, rounds + 1):
            if self.select is None:
                active: Sequence[int] = choose(self.seed, t, len(self.clients), cohort)
            else:
                active = self.select(self, t, cohort)
            self.cohorts.append(tuple(active))
            w = parameters_to_vector(self.net.parameters()).detach().numpy().copy()
            models = {k: self.trained(w, k, t) for k in active}
            sent = {
                k: self.upload(models[k] - w, k, 0, self.numbers(t, 0, 1, k)[-1]) for k in active
            }
            self.set(w + self.gather(sent, 0, by_examples=True))
            for j in range(1, self.steps + 1):
                w = parameters_to_vector(self.net.parameters()).detach().numpy().copy()
                gradients = {}
                for k in active:
                    g, number = self.gradient(models[k], k, t, j)
                    gradients[k] = self.upload(g, k, 1, number)
                self.set(w - self.dkd_lr * self.gather(gradients, 1, by_examples=False))

    def upload(self, update: Vector, k: int, phase: int, number: int) -> Vector:
        update = self.compress(self.attack(update, k, phase, int(number)), k, phase, int(number))
        self.uploads.append((k, phase, update))
        return update

    def gather(self, updates: dict[int, Vector], phase: int, by_examples: bool) -> Vector:
        stacked = np.stack(list(updates.values()))
        if not self.defence:
            sizes = [len(self.clients[k][1]) if by_examples else 1 for k in updates]
            return np.average(stacked, 0, weights=sizes)
        options = dict(self.defence)
        gather = options.pop("gather")
        if "faulty" in options:
            options["faulty"] = int(options["faulty"] * len(stacked) + 1e-9)
        before = self.last.get(phase, np.zeros(stacked.shape[1]))
        self.last[phase] = plain_defence(gather, stacked, before, **options)
        return self.last[phase]

    def set(self, w: Vector) -> None:
        vector_to_parameters(torch.from_numpy(np.asarray(w)).clone(), self.net.parameters())

    def key(self, t: int, phase: int, step: int, k: int) -> tuple[int, ...]:
        return (self.seed, t, phase, step, k)

    def numbers(self, t: int, phase: int, step: int, k: int) -> Any:
        reads = Reads(self.batch_size) if phase == 0 else Reads(self.batch_size, steps=1)
        n = len(self.clients[k][1])
        return step_keys(
            self.key(t, phase, step, k), len(draw(reads, n, self.key(t, phase, step, k)))
        )

    def trained(self, w: Vector, k: int, t: int) -> Vector:
        self.set(w)
        x, y = self.clients[k]
        optimiser = torch.optim.SGD(self.net.parameters(), lr=self.lr)
        for indices in draw(Reads(self.batch_size), len(y), self.key(t, 0, 1, k)):
            optimiser.zero_grad()
            loss: Any = cross_entropy(self.net(x[indices]), y[indices])
            loss.backward()
            optimiser.step()
        trained = parameters_to_vector(self.net.parameters()).detach().numpy().copy()
        self.set(w)
        return trained

    def gradient(self, teacher: Vector, k: int, t: int, j: int) -> tuple[Vector, int]:
        reads, (x, y) = Reads(self.batch_size, steps=1), self.clients[k]
        (indices,) = draw(reads, len(y), self.key(t, 1, j, k))
        w = parameters_to_vector(self.net.parameters()).detach().numpy().copy()
        self.set(teacher)
        with torch.no_grad():
            taught = softmax(self.net(x[indices]), 1)
        self.set(w)
        loss = -(taught * log_softmax(self.net(x[indices]), 1)).sum(1).mean()
        parameters = list(self.net.parameters())
        g = parameters_to_vector(torch.autograd.grad(loss, parameters)).numpy().copy()
        return g, int(self.numbers(t, 1, j, k)[-1])


# --- compression


def cut(update: Vector, like: dict[str, Tensor]) -> dict[str, Vector]:
    """Return the parts of a vector by the names of a network's parameters."""
    ends = np.cumsum([tensor.numel() for tensor in like.values()])
    return dict(zip(like, np.split(update, ends[:-1]), strict=True))


def rounded(to: str, like: dict[str, Tensor]) -> Change:
    """Return a change that rounds an update at random, by numbers drawn with the key."""

    def change(update: Vector, client: int, phase: int, number: int) -> Vector:
        parts = cut(update, like)
        drawn = {
            name: uniform(torch.tensor(number), (len(parts[name]),), CODEC + at).numpy()
            for at, name in enumerate(sorted(parts))
        }
        rule = {"int8": _int8, "bf16": _bf16}[to]
        return np.concatenate([rule(parts[name], drawn[name]) for name in parts])

    return change


def _int8(part: Vector, drawn: Vector) -> Vector:
    scale = np.abs(part).max() / 127
    return scale * np.clip(np.floor(part / scale + drawn.astype(np.float64)), -127, 127)


def _bf16(part: Vector, drawn: Vector) -> Vector:
    bits = part.astype(np.float32).view(np.uint32)
    carried = bits + np.floor(drawn * 2.0**16).astype(np.uint32)
    return (carried & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


@dataclass
class Largest:
    """A change that sends the largest entries and remembers the rest."""

    share: float
    rest: dict[tuple[int, int], Vector] = field(default_factory=dict)

    def __call__(self, update: Vector, client: int, phase: int, number: int) -> Vector:
        whole = update + self.rest.get((client, phase), 0)
        count = max(int(self.share * len(whole) + 1e-9), 1)
        message = np.zeros_like(whole)
        places = np.argsort(-np.abs(whole))[:count]
        message[places] = whole[places]
        self.rest[client, phase] = whole - message
        return message


# --- attacks


def lying(kind: str, liars: Sequence[int], like: dict[str, Tensor], much: float) -> Change:
    """Return a change by which some clients send something else than their update."""

    def change(update: Vector, client: int, phase: int, number: int) -> Vector:
        if client not in liars:
            return update
        if kind == "sign_flip":
            return -much * update
        if kind == "scaling":
            return much * update
        parts = cut(update, like)
        drawn = {}
        for at, name in enumerate(sorted(parts)):
            first, second = (
                uniform(torch.tensor(number), (len(parts[name]),), ATTACK + 2 * at + n).double()
                for n in range(2)
            )
            radius = np.sqrt(-2 * np.log(first.numpy() + 2.0**-25))
            drawn[name] = much * radius * np.cos(2 * np.pi * second.numpy())
        return np.concatenate([drawn[name] for name in parts])

    return change
