"""FedAvg, SCAFFOLD and DKD once more for any module, in plain PyTorch: the module itself,
torch.optim, autograd, loops.

Nothing here calls the package's mathematics. Who reads which examples in which order is taken from
it, and so are the random numbers that a module draws in forward (`keyed`): these are choices and
not formulas.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, softmax

from feddkd.data.batches import Reads, draw
from feddkd.models.keyed_draws import keyed
from feddkd.randomness import step_keys
from feddkd.rounds.loop import choose

Pair = tuple[Tensor, Tensor]
State = dict[str, Tensor]
Logits = Callable[[Any], Tensor]  # what the network returns -> logits


@dataclass
class PlainNetworks:
    """One federated run of FedAvg or SCAFFOLD, with DKD steps behind it where `distil` says how
    many.
    """

    net: nn.Module  # the global model
    clients: list[Pair]
    seed: int
    reads: Reads
    lr: float
    scaffold: bool = False
    distil: int = 0
    gamma: float = 0.3
    logits: Logits = lambda found: found
    own_names: Callable[[str], bool] = lambda name: False  # which tensors a client keeps
    own: dict[int, State] = field(default_factory=dict)
    controls: dict[int, State] = field(default_factory=dict)
    control: State = field(default_factory=dict)

    def run(self, rounds: int, cohort: int) -> None:
        for t in range(1, rounds + 1):
            active = choose(self.seed, t, len(self.clients), cohort)
            trained = {k: self.train(k, t) for k in active}
            if self.scaffold:
                self.renew_controls(trained)
            self.average(trained)
            for j in range(1, self.distil + 1):
                self.teach(trained, t, j)

    def view(self, k: int) -> nn.Module:
        """The global model with client k's own tensors in place."""
        net = copy.deepcopy(self.net)
        net.load_state_dict({**net.state_dict(), **self.own.get(k, {})})
        return net

    def train(self, k: int, t: int) -> nn.Module:
        net, (x, y) = self.view(k).train(), self.clients[k]
        trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
        optimiser = torch.optim.SGD(trained, lr=self.lr)
        batches = draw(self.reads, len(y), (self.seed, t, 0, 1, k))
        for indices, number in zip(
            batches, step_keys((self.seed, t, 0, 1, k), len(batches)), strict=True
        ):
            optimiser.zero_grad()
            with keyed(net, torch.tensor(int(number))):
                found = self.logits(net(x[indices]))
            cross_entropy(found, y[indices]).backward()  # type: ignore[no-untyped-call]
            if self.scaffold:
                for name, parameter in trainable(net).items():
                    if not self.own_names(name):
                        assert parameter.grad is not None
                        zero = torch.zeros_like(parameter)
                        parameter.grad += self.control.get(name, zero) - self.controls.get(
                            k, {}
                        ).get(name, zero)
            optimiser.step()
        return net

    def renew_controls(self, trained: Mapping[int, nn.Module]) -> None:
        sent, changes = trainable(self.net), []
        for k, net in trained.items():
            steps, change = self.reads.count(len(self.clients[k][1])), {}
            for name, parameter in trainable(net).items():
                if not self.own_names(name):
                    slope = (sent[name].detach() - parameter.detach()) / (steps * self.lr)
                    change[name] = slope - self.control.get(name, torch.zeros_like(slope))
            old = self.controls.get(k, {})
            self.controls[k] = {
                name: old.get(name, torch.zeros_like(tensor)) + tensor
                for name, tensor in change.items()
            }
            changes.append(change)
        for name in changes[0]:
            mean = sum(change[name] for change in changes) / len(self.clients)
            self.control[name] = self.control.get(name, torch.zeros_like(changes[0][name])) + mean

    def average(self, trained: Mapping[int, nn.Module]) -> None:
        total = sum(len(self.clients[k][1]) for k in trained)
        state = self.net.state_dict()
        for name in state:
            every = {k: net.state_dict()[name].clone() for k, net in trained.items()}
            if self.own_names(name):
                for k, tensor in every.items():
                    self.own.setdefault(k, {})[name] = tensor
            elif state[name].is_floating_point():
                state[name] = sum(
                    len(self.clients[k][1]) / total * tensor for k, tensor in every.items()
                )
            else:
                state[name] = torch.stack(list(every.values())).amax(0)
        self.net.load_state_dict(state)

    def teach(self, trained: Mapping[int, nn.Module], t: int, j: int) -> None:
        sums = {
            name: torch.zeros_like(w)
            for name, w in trainable(self.net).items()
            if not self.own_names(name)
        }
        for k, teacher in trained.items():
            key = (self.seed, t, 1, j, k)
            (indices,) = draw(Reads(5, steps=1), len(self.clients[k][1]), key)
            x, student, number = (
                self.clients[k][0][indices],
                self.view(k).eval(),
                torch.tensor(int(step_keys(key, 1)[0])),
            )
            with torch.no_grad(), keyed(teacher.eval(), number):
                taught = softmax(self.logits(teacher(x)), dim=1)
            with keyed(student, number):
                said = self.logits(student(x))
            loss: Tensor = -(taught * log_softmax(said, dim=1)).sum(dim=1).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            for name, parameter in trainable(student).items():
                if name in sums and parameter.grad is not None:
                    sums[name] += parameter.grad
        with torch.no_grad():
            for name, parameter in trainable(self.net).items():
                if name in sums:
                    parameter -= self.gamma * sums[name] / len(trained)


def trainable(net: nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter for name, parameter in net.named_parameters() if parameter.requires_grad
    }
