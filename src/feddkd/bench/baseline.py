"""The plain loop: one module, torch.optim, autograd, client after client. This is how the other
packages simulate.

It is given every advantage that needs no other program: its data are normalised and on the device
before the clock starts, it draws its batches there, and it never waits for a number.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softmax

from feddkd.bench.jobs import BenchJob
from feddkd.bench.setting import BenchSetting
from feddkd.data.batches import Reads
from feddkd.data.federation import Federation
from feddkd.methods.local import Local
from feddkd.tensors import to

CHUNK = 4096  # examples normalised at a time


@dataclass
class PlainLoop:
    net: nn.Module
    start: dict[str, Tensor]
    x: Tensor
    y: Tensor
    shards: list[list[Tensor]]  # run -> client -> its examples
    reads: Reads
    local: Local
    setting: BenchSetting

    @classmethod
    def of(
        cls, job: BenchJob, setting: BenchSetting, federations: Sequence[Federation]
    ) -> "PlainLoop":
        one, device, model = federations[0], setting.device, job.network()
        net = copy.deepcopy(model.net).to(device, setting.dtype)
        params, buffers = (to(group, device, setting.dtype) for group in model.initial(("init", 0)))
        x = torch.cat(
            [
                one.transform(one.x[at : at + CHUNK], setting.dtype)
                for at in range(0, len(one.x), CHUNK)
            ]
        )
        shards = [
            [torch.from_numpy(own).to(device) for own in federation.train]
            for federation in federations
        ]
        return cls(net, {**params, **buffers}, x, one.y, shards, job.reads, job.local, setting)

    def round(self, cohorts: Sequence[Sequence[int]]) -> list[dict[str, Tensor]]:
        """Train the cohort of every run, one client after another, and average."""
        return [
            self._average([own[k] for k in cohort])
            for own, cohort in zip(self.shards, cohorts, strict=True)
        ]

    def _average(self, shards: Sequence[Tensor]) -> dict[str, Tensor]:
        total = sum(map(len, shards))
        mean = {name: torch.zeros_like(tensor) for name, tensor in self.start.items()}
        for shard in shards:
            self.train(shard)
            for name, tensor in self.net.state_dict().items():
                mean[name] += tensor * (len(shard) / total)
        return mean

    def train(self, shard: Tensor) -> None:
        """Local training of one client, from the weights everybody starts with; the result is in
        `net`.
        """
        self.net.load_state_dict(self.start)
        self.net.train()
        optimiser = make_optimiser(self.local, self.net)
        for batch in self._batches(shard):
            optimiser.zero_grad()
            with self.setting.cast():
                loss = cross_entropy(self.net(self.x[batch]), self.y[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()

    def _batches(self, shard: Tensor) -> Iterator[Tensor]:
        left = self.reads.count(len(shard))
        while left > 0:
            order, size = (
                shard[torch.randperm(len(shard), device=shard.device)],
                self.reads.batch_size,
            )
            for at in range(0, len(shard), size)[:left]:
                left -= 1
                yield order[at : at + size]

    def teachers(self) -> list[nn.Module]:
        """Everybody's trained model; their average is left in `net`."""
        nets = []
        for shard in self.shards[0]:
            self.train(shard)
            nets.append(copy.deepcopy(self.net).eval())
        self.net.load_state_dict(self._average(self.shards[0]))
        return nets

    def distil(self, teachers: Sequence[nn.Module], steps: int) -> None:
        """J steps of DKD: each client's gradient in turn, added up, then one step of the server."""
        student = self.net.eval()
        server = torch.optim.SGD(student.parameters(), lr=0.2)
        for _ in range(steps):
            server.zero_grad()
            for teacher, shard in zip(teachers, self.shards[0], strict=True):
                x = self.x[
                    shard[torch.randperm(len(shard), device=shard.device)[: self.reads.batch_size]]
                ]
                with self.setting.cast():
                    with torch.no_grad():
                        taught = softmax(teacher(x), dim=1)
                    loss = cross_entropy(student(x), taught) / len(teachers)
                loss.backward()  # type: ignore[no-untyped-call]
            server.step()

    def passes(self, times: int, examples: int, classes: int) -> Callable[[int], None]:
        """Forward and backward through the network for one large batch, so many times, and nothing
        else.
        """
        net = self.net.eval()
        parameters = list(net.parameters())
        at = torch.arange(examples, device=self.x.device) % len(self.x)
        x, taught = (
            self.x[at],
            torch.rand(examples, classes, device=self.x.device, dtype=self.x.dtype),
        )

        def run(t: int) -> None:
            for _ in range(times):
                with self.setting.cast():
                    loss = cross_entropy(net(x), taught)
                torch.autograd.grad(loss, parameters)

        return run


def make_optimiser(local: Local, net: nn.Module) -> torch.optim.Optimizer:
    if local.optimiser == "sgd":
        return torch.optim.SGD(
            net.parameters(),
            lr=local.lr,
            momentum=local.momentum,
            nesterov=local.nesterov,
            weight_decay=local.weight_decay,
        )
    return torch.optim.Adam(
        net.parameters(),
        lr=local.lr,
        betas=(local.beta1, local.beta2),
        eps=local.eps,
        weight_decay=local.weight_decay,
        amsgrad=local.amsgrad,
    )


def recorded(action: Callable[[int], None]) -> Callable[[int], None]:
    """The same work as a CUDA graph: without the cost of launching it."""
    beside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for t in range(3):
            action(t)
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action(0)
    return lambda t: graph.replay()
