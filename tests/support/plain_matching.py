"""FedMA once more, in plain PyTorch, from the paper's Algorithm 1: modules, torch.optim, state
dicts, and every permutation tried. Nothing here calls the package's mathematics.
"""

import copy
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, softmax

from feddkd.data.batches import Reads, draw
from feddkd.rounds.loop import choose

Pair = tuple[Tensor, Tensor]


@dataclass
class PlainFedMA:
    """One run. `layers` says, layer by layer, which modules belong together: a full or
    convolutional one and its batch norm.
    """

    net: nn.Sequential
    clients: list[Pair]
    seed: int
    layers: list[list[str]]
    settings: dict[str, Any]  # of torch.optim.SGD
    reads: Reads
    once: bool = False
    by_examples: bool = False
    by_labels: bool = True
    sweeps: int = 5
    dkd_steps: int = 0
    # how many units changed places: a test of matching where none does would show little
    moved: int = 0
    nets: dict[int, nn.Sequential] = field(default_factory=dict)

    def run(self, rounds: int, cohort: int) -> None:
        for t in range(1, rounds + 1):
            active = choose(self.seed, t, len(self.clients), cohort)
            self.nets = {k: copy.deepcopy(self.net) for k in active}
            if self.once:
                self.match_after_one_training(t)
            else:
                self.match_layer_by_layer(t)
            for j in range(1, self.dkd_steps + 1):
                phase = 1 if self.once else len(self.layers)
                distil(self.net, self.nets, self.clients, (self.seed, t, phase, j), lr=0.3, size=5)

    def match_layer_by_layer(self, t: int) -> None:
        orders: dict[int, list[int]] = {}
        for at in range(len(self.layers)):
            for k, net in self.nets.items():
                if at > 0:
                    for name in self.layers[at - 1]:
                        net.get_submodule(name).load_state_dict(
                            self.net.get_submodule(name).state_dict()
                        )
                    self.permute_inputs(net, at, orders[k])
                self.train(net, k, t, at)
            orders = self.take_average(self.nets, at)

    def match_after_one_training(self, t: int) -> None:
        for k, net in self.nets.items():
            self.train(net, k, t, 0)
        taken_apart = copy.deepcopy(self.nets)
        orders: dict[int, list[int]] = {}
        for at in range(len(self.layers)):
            for k, net in taken_apart.items():
                if at > 0:
                    self.permute_inputs(net, at, orders[k])
            orders = self.take_average(taken_apart, at)

    def train(self, net: nn.Sequential, k: int, t: int, at: int) -> None:
        frozen = [net.get_submodule(name) for names in self.layers[:at] for name in names]
        held = [
            {key: tensor.clone() for key, tensor in module.state_dict().items()}
            for module in frozen
        ]
        still = {id(parameter) for module in frozen for parameter in module.parameters()}
        optimiser = torch.optim.SGD(
            [p for p in net.parameters() if id(p) not in still], **self.settings
        )
        x, y = self.clients[k]
        net.train()
        for indices in draw(self.reads, len(y), (self.seed, t, at, 1, k)):
            loss, free = (
                cross_entropy(net(x[indices]), y[indices]),
                optimiser.param_groups[0]["params"],
            )
            for parameter, gradient in zip(free, torch.autograd.grad(loss, free), strict=True):
                parameter.grad = gradient
            optimiser.step()
            for module, state in zip(frozen, held, strict=True):  # running statistics too
                module.load_state_dict(state)
        net.zero_grad()

    def permute_inputs(self, net: nn.Sequential, at: int, order: list[int]) -> None:
        weight = net.get_submodule(self.layers[at][0]).weight
        assert isinstance(weight, Tensor)
        block = weight.shape[1] // len(order)
        columns = [unit * block + i for unit in order for i in range(block)]
        with torch.no_grad():
            weight.copy_(weight[:, columns].clone())

    def take_average(self, nets: dict[int, nn.Sequential], at: int) -> dict[int, list[int]]:
        """Layer `at` of the global net becomes the matched average; returns the clients' orders."""
        weights = {k: len(self.clients[k][1]) if self.by_examples else 1 for k in nets}
        shares = {k: weight / sum(weights.values()) for k, weight in weights.items()}
        units = {k: self.units(net, at) for k, net in nets.items()}
        width = len(next(iter(units.values())))
        if at < len(self.layers) - 1:
            orders = best_orders(units, shares, self.sweeps)
            per_unit = {k: [shares[k]] * width for k in nets}
        else:
            orders = {k: list(range(width)) for k in nets}
            per_unit = {k: [self.output_share(k, c) for c in range(width)] for k in nets}
        self.moved += sum(unit != i for order in orders.values() for i, unit in enumerate(order))
        for name in self.layers[at]:
            states = {k: net.get_submodule(name).state_dict() for k, net in nets.items()}
            average = {}
            for key, tensor in self.net.get_submodule(name).state_dict().items():
                if tensor.dim() == 0:  # batch norm's counter
                    average[key] = torch.stack([state[key] for state in states.values()]).max()
                    continue
                average[key] = torch.zeros_like(tensor)
                for i in range(width):
                    for k, state in states.items():
                        average[key][i] += per_unit[k][i] * state[key][orders[k][i]]
            self.net.get_submodule(name).load_state_dict(average)
        return orders

    def output_share(self, k: int, c: int) -> float:
        holds = {j: int((self.clients[j][1] == c).sum()) for j in self.nets}
        if not self.by_labels or sum(holds.values()) == 0:
            holds = {j: len(self.clients[j][1]) for j in self.nets}
        return holds[k] / sum(holds.values())

    def units(self, net: nn.Sequential, at: int) -> Tensor:
        module = net.get_submodule(self.layers[at][0])
        return torch.cat(
            [parameter.detach().reshape(len(parameter), -1) for parameter in module.parameters()],
            dim=1,
        )


def distil(
    net: nn.Module,
    teachers: dict[int, nn.Sequential],
    clients: list[Pair],
    path: Any,
    lr: float,
    size: int,
) -> None:
    """One DKD step; `path` is (seed, round, phase, step)."""
    sums = [torch.zeros_like(parameter) for parameter in net.parameters()]
    for k, teacher in teachers.items():
        (indices,) = draw(Reads(size, steps=1), len(clients[k][1]), (*path, k))
        x, student = clients[k][0][indices], copy.deepcopy(net).eval()
        with torch.no_grad():
            taught = softmax(copy.deepcopy(teacher).eval()(x), dim=1)
        loss = -(taught * log_softmax(student(x), dim=1)).sum(dim=1).mean()
        for total, gradient in zip(
            sums, torch.autograd.grad(loss, list(student.parameters())), strict=True
        ):
            total += gradient
    with torch.no_grad():
        for parameter, total in zip(net.parameters(), sums, strict=True):
            parameter.sub_(lr * total / len(teachers))


def best_orders(
    units: dict[int, Tensor], shares: dict[int, float], sweeps: int
) -> dict[int, list[int]]:
    """One client after another, heaviest first, put in the order nearest to the average of the
    others, by trying all orders.
    """
    turns = sorted(units, key=lambda k: -shares[k])
    width = len(units[turns[0]])
    orders = {turns[0]: list(range(width))}

    def nearest(k: int, others: list[int]) -> list[int]:
        total = sum(shares[j] for j in others)
        mean = torch.stack([shares[j] / total * units[j][orders[j]] for j in others]).sum(0)
        distances = ((mean[:, None] - units[k][None]) ** 2).sum(2).tolist()
        return list(
            min(
                permutations(range(width)),
                key=lambda order: sum(distances[i][u] for i, u in enumerate(order)),
            )
        )

    for k in turns[1:]:
        orders[k] = nearest(k, list(orders))
    for _ in range(sweeps if len(turns) > 1 else 0):
        for k in turns:
            orders[k] = nearest(k, [j for j in turns if j != k])
    return orders
