"""RegMean and CCVR once more, in plain PyTorch (see plain.py), from the papers' formulas. What is
drawn is taken from the package's keys.
"""

import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from feddkd.randomness import step_keys, uniform
from plain_drift import Hooked, features


class FixedNormal:
    """Stands for a random generator: the same normal numbers each time."""

    def standard_normal(self, shape: tuple[int, ...]) -> "np.typing.NDArray[np.float64]":
        return np.random.default_rng(7).standard_normal(shape)


@dataclass
class RegMean(Hooked):
    regress_alpha: float = 0.9
    epsilon: float = 1e-6
    dkd_phase: int = 2

    def average(self, teachers: dict[int, nn.Module]) -> None:
        super().average(teachers)
        shared = self.net.state_dict()
        linear = [n for n, layer in self.net.named_modules() if isinstance(layer, nn.Linear)]
        for name in linear:
            gram, wanted = torch.zeros(()), torch.zeros(())
            for k, net in teachers.items():
                x = self.inputs(net, name, self.clients[k][0])
                own = x.T @ x
                for i in range(len(own)):
                    for j in range(len(own)):
                        own[i, j] *= 1.0 if i == j else self.regress_alpha
                gram = gram + own
                wanted = wanted + own @ net.state_dict()[f"{name}.weight"].T
            ridge = self.epsilon * gram.diagonal().mean()
            before = shared[f"{name}.weight"].T
            solved = torch.linalg.inv(gram + ridge * torch.eye(len(gram), dtype=torch.float64)) @ (
                wanted + ridge * before
            )
            shared[f"{name}.weight"] = solved.T.clone()
        self.net.load_state_dict(shared)

    def inputs(self, net: nn.Module, name: str, x: Tensor) -> Tensor:
        net, found = copy.deepcopy(net).eval(), []
        net.get_submodule(name).register_forward_pre_hook(lambda _, given: found.append(given[0]))
        with torch.no_grad():
            net(x)
        (rows,) = found
        return rows  # type: ignore[no-any-return]


@dataclass
class CCVR(Hooked):
    samples: int = 100
    server_steps: int = 4
    server_size: int = 16
    server_lr: float = 0.1
    warmup: int = 0
    dkd_phase: int = 3
    now: int = 1

    def train_locally(self, k: int, t: int) -> nn.Module:
        self.now = t
        return super().train_locally(k, t)

    def average(self, teachers: dict[int, nn.Module]) -> None:
        super().average(teachers)
        if self.now <= self.warmup:
            return
        z = torch.cat([features(self.client_view(k), self.clients[k][0]) for k in teachers])
        y = torch.cat([self.clients[k][1] for k in teachers])
        some, labels = self.virtual(z, y)
        assert isinstance(self.net, nn.Sequential)
        head = self.net[-1]
        optimiser = torch.optim.SGD(head.parameters(), lr=self.server_lr)
        for number in step_keys((self.seed, self.now, 2, 1, -1), self.server_steps):
            drawn = uniform(torch.tensor(int(number)), (self.server_size,), 2000).double()
            at = [int(u * len(labels)) for u in drawn.tolist()]
            optimiser.zero_grad()
            cross_entropy(head(some[at]), labels[at]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()

    def virtual(self, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Draw features from the normal distribution of each class of all examples together."""
        classes = [c for c in range(3) if int((y == c).sum()) > 1]
        size = 3 * self.samples
        normal = torch.from_numpy(FixedNormal().standard_normal((size, z.shape[1])))
        rows, labels = [], []
        for i in range(size):
            c = classes[i % len(classes)]
            values, vectors = torch.linalg.eigh(torch.cov(z[y == c].T))
            root = vectors @ torch.diag(values.clamp(min=0).sqrt()) @ vectors.T
            rows.append(z[y == c].mean(0) + root @ normal[i])
            labels.append(c)
        return torch.stack(rows), torch.tensor(labels)
