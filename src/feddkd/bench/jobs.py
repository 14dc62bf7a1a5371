"""The jobs to measure: models, clients and sizes.

The data are random bytes from a fixed key; no files are needed.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from feddkd.bench.networks import (
    CharacterModel,
    RecurrentModel,
    UNet,
    VisionTransformer,
    group_norm,
    resnet18,
)
from feddkd.data.batches import Indices, Reads, draw
from feddkd.data.federation import Federation
from feddkd.data.partitions.registry import PARTITIONS, Table
from feddkd.data.transforms import transform
from feddkd.methods.local import Local
from feddkd.models.functional import Model, built, functional
from feddkd.models.registry import MODELS
from feddkd.randomness import generator
from feddkd.tasks.lookup import find_task

NORMALISE = "normalise(mean=0.5, std=0.5)"


@dataclass(frozen=True)
class BenchJob:
    """A job; its time is counted per step of all clients, or per round."""

    name: str
    model: str
    shape: tuple[int, ...]
    classes: int
    clients: int
    images: int  # of all clients together
    local: Local
    unit: Literal["step", "round"]
    active: int | None = None  # clients in a round; default: all
    alpha: float | None = None  # of a Dirichlet split; default: clients of equal size
    seeds: int = 1
    distil: int = 0  # the number of DKD steps, J
    # what builds the network, if `model` is not the text of a registered one
    build: Callable[[], nn.Module] | None = None
    task: str = "classification"

    @property
    def cohort(self) -> int:
        """The number of clients in a round."""
        return self.clients if self.active is None else self.active

    @property
    def what(self) -> str:
        """The job and its size in one line."""
        each = f"{min(self.sizes):,}" + (f" to {max(self.sizes):,}" if self.alpha else "")
        parts = [
            f"{self.clients:,} clients with {each} examples",
            f"{self.cohort} in a round" if self.active else "",
            f"{self.model}, B={self.local.batch_size}",
            f"{self.seeds} seeds at once" if self.seeds > 1 else "",
            self._work,
        ]
        return ", ".join(filter(None, parts))

    @property
    def _work(self) -> str:
        if self.distil:
            return f"J={self.distil}"
        return f"{self.local.steps} steps" if self.local.steps else f"E={self.local.epochs}"

    @property
    def method(self) -> str:
        """The text of the method, without options that have their default."""
        given = {field.name: getattr(self.local, field.name) for field in fields(Local)}
        options = ", ".join(
            f"{name}={value!r}" for name, value in given.items() if value != getattr(Local(), name)
        )
        text = f"fedavg({options})"
        if self.distil:
            text += f" | dkd(steps={self.distil}, batch_size={self.local.batch_size})"
        return text

    @cached_property
    def sizes(self) -> list[int]:
        """n_k, the number of examples of each client."""
        if self.alpha is None:
            return [self.images // self.clients] * self.clients
        labels = np.arange(self.images) % self.classes
        split = PARTITIONS.one(f"dirichlet(alpha={self.alpha})")
        table = Table(labels, labels, None, None, self.classes)
        return [len(indices) for indices in split(table, self.clients, ("bench", 0)).train]

    @property
    def reads(self) -> Reads:
        """The batches that a client reads in local training."""
        return Reads(self.local.batch_size, self.local.epochs, self.local.steps)

    @property
    def client_steps(self) -> int:
        """The number of steps that all clients of a round make."""
        return self.seeds * sum(self.reads.count(n) for n in self.sizes[: self.cohort])

    @property
    def images_read(self) -> int:
        """The number of images that local training reads in a round; with DKD, that it reads."""
        if self.distil:
            return self.distil * sum(min(self.local.batch_size, n) for n in self.sizes)
        images = 0
        for size in self.sizes[: self.cohort]:
            images += sum(map(len, draw(self.reads, size, ("count",))))
        return self.seeds * images

    @property
    def units(self) -> int:
        """The number of units (steps or rounds) in a timed round."""
        return 1 if self.unit == "round" else self.distil or self.local.steps or 1

    def network(self) -> Model:
        """Return the network."""
        if self.build is None:
            net = MODELS.one(self.model).build(self.shape, self.classes)
        else:
            net = built(self.build, ("bench", self.name)).net
        return replace(functional(net), task=find_task(self.task))

    def example(self) -> Tensor:
        """Return one example on the meta device, as the network sees it."""
        dtype = torch.int64 if self.task == "language" else torch.float32
        return torch.empty(self.shape, dtype=dtype, device="meta")

    def federations(self, device: torch.device) -> list[Federation]:
        """Return one federation per seed: the same images, divided in different ways."""
        random = generator(("bench", self.name))
        tokens = self.task == "language"
        most, kind = (self.classes, np.int64) if tokens else (256, np.uint8)
        inputs = random.integers(0, most, (self.images, *self.shape), kind)
        of_each = () if self.task == "classification" else self.shape[-2:]  # pixels, or tokens
        labels = random.integers(0, self.classes, (self.images, *of_each))
        x, y = torch.from_numpy(inputs).to(device), torch.from_numpy(labels).to(device)
        normalise, none = transform("" if tokens else NORMALISE, 255.0), np.arange(0)
        return [
            Federation(
                x, y, self.classes, normalise, self._division(seed), None, none, np.arange(1)
            )
            for seed in range(self.seeds)
        ]

    def _division(self, seed: int) -> tuple[Indices, ...]:
        order = generator(("bench", self.name, "division", seed)).permutation(self.images)
        return tuple(np.split(order, np.cumsum(self.sizes))[: self.clients])


# The optimisers of the FedDKD paper's FEMNIST and CIFAR-10 experiments, and of pfl's benchmark.
PAPER_FEMNIST = Local(steps=100, lr=0.1, momentum=0.1, nesterov=True, weight_decay=0.0005)
PAPER_CIFAR = Local(steps=30, lr=0.001, optimiser="adam", weight_decay=0.0001)
ONE_EPOCH = Local(epochs=1, batch_size=10, lr=0.1)

FEMNIST = BenchJob("femnist", "femnist_cnn", (1, 32, 32), 26, 10, 31_200, PAPER_FEMNIST, "step")
VGG9 = BenchJob("vgg9", "vgg9", (3, 32, 32), 10, 16, 45_000, PAPER_CIFAR, "step")
# pfl's headline job
MANY_SMALL = BenchJob(
    "many-small", "small_cnn", (3, 32, 32), 10, 1000, 50_000, ONE_EPOCH, "round", active=50
)
MLP = BenchJob("mlp", "mlp(hidden='64')", (64,), 10, 100, 5_000, ONE_EPOCH, "round", active=50)
DIRICHLET = replace(
    VGG9,
    name="dirichlet",
    local=replace(PAPER_CIFAR, steps=None, epochs=1),
    unit="round",
    alpha=0.1,
)
SEEDS = replace(FEMNIST, name="seeds", seeds=10)
DKD = replace(FEMNIST, name="dkd", distil=10, local=replace(PAPER_FEMNIST, steps=1))
# Everyday networks, ten clients with ten batches each.
PLAIN_SGD = Local(epochs=1, batch_size=64, lr=0.05, momentum=0.9)
ADAMW = Local(epochs=1, batch_size=64, lr=0.0003, optimiser="adamw", weight_decay=0.01)


def _everyday(name: str, build: Callable[[], nn.Module], local: Local, **changes: Any) -> BenchJob:
    job = BenchJob(name, name, (3, 32, 32), 10, 10, 6_400, replace(local, steps=10), "step")
    return replace(job, build=build, **changes)


TOKENS = {"task": "language", "shape": (80,), "classes": 80}
EVERYDAY = (
    _everyday("resnet18", partial(resnet18, group_norm), PLAIN_SGD),
    _everyday("resnet18-bn", partial(resnet18, nn.BatchNorm2d), PLAIN_SGD),
    _everyday("vit-tiny", partial(VisionTransformer, 192, 12, 3), ADAMW),
    _everyday("gpt-mini", partial(CharacterModel, 256, 6, 8, 80, 80), ADAMW, **TOKENS),
    _everyday("lstm", partial(RecurrentModel, 256, 80), PLAIN_SGD, **TOKENS),
    _everyday("unet", partial(UNet, 32), ADAMW, task="segmentation", classes=2),
    _everyday("lora", partial(VisionTransformer, 384, 12, 6, rank=8), ADAMW),
)
JOBS = {job.name: job for job in (FEMNIST, VGG9, MANY_SMALL, MLP, DIRICHLET, SEEDS, DKD, *EVERYDAY)}

# Smaller sizes for a CPU: the same clients, fewer steps or images.
ON_CPU: dict[str, dict[str, Any]] = {
    "femnist": {"steps": 5},
    "vgg9": {"steps": 2},
    "dirichlet": {"images": 4_500},
    "seeds": {"steps": 2},
    **{
        job.name: {"clients": 2, "images": 64, "steps": 2, "batch_size": 16, "build": build}
        for job, build in zip(
            EVERYDAY,
            (
                partial(resnet18, group_norm, 16),
                partial(resnet18, nn.BatchNorm2d, 16),
                partial(VisionTransformer, 64, 4, 2),
                partial(CharacterModel, 64, 2, 4, 80, 80),
                partial(RecurrentModel, 64, 80),
                partial(UNet, 8),
                partial(VisionTransformer, 64, 4, 2, rank=4),
            ),
            strict=True,
        )
    },
}
# Sizes for a quick test: every job within a second.
SMALL: dict[str, dict[str, Any]] = {
    "femnist": {"clients": 2, "images": 22, "steps": 2, "batch_size": 8},
    "vgg9": {"clients": 2, "images": 16, "steps": 1, "batch_size": 8},
    "many-small": {"clients": 6, "images": 90, "active": 2},
    "mlp": {"clients": 6, "images": 90, "active": 3},
    "dirichlet": {"clients": 2, "images": 30, "batch_size": 8},
    "seeds": {"clients": 2, "images": 22, "steps": 2, "seeds": 2, "batch_size": 8},
    "dkd": {"clients": 2, "images": 22, "distil": 2, "batch_size": 8},
    **{
        job.name: {"clients": 2, "images": 8, "steps": 1, "batch_size": 4, "build": build}
        for job, build in zip(
            EVERYDAY,
            (
                partial(resnet18, group_norm, 2),
                partial(resnet18, nn.BatchNorm2d, 2),
                partial(VisionTransformer, 8, 1, 2),
                partial(CharacterModel, 8, 1, 2, 80, 80),
                partial(RecurrentModel, 4, 80),
                partial(UNet, 2),
                partial(VisionTransformer, 8, 1, 2, rank=2),
            ),
            strict=True,
        )
    },
}


def sized(
    *, device: torch.device, small: bool = False, steps: int | None = None
) -> dict[str, BenchJob]:
    """Return the jobs in a size that suits the device.

    `steps` changes the jobs that are timed per step (J for dkd).
    """
    sizes = SMALL if small else ON_CPU if device.type == "cpu" else {}
    return {name: _steps(_changed(job, **sizes.get(name, {})), steps) for name, job in JOBS.items()}


def _changed(job: BenchJob, **changes: Any) -> BenchJob:
    local = {name: value for name, value in changes.items() if hasattr(job.local, name)}
    others = {name: value for name, value in changes.items() if name not in local}
    return replace(job, local=replace(job.local, **local), **others)


def _steps(job: BenchJob, steps: int | None) -> BenchJob:
    if steps is None or job.unit == "round":
        return job
    return replace(job, distil=steps) if job.distil else _changed(job, steps=steps)
