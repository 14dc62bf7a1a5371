"""The plain loop: one module, torch.optim and autograd, one client after another.

Other packages simulate like this. The loop has every advantage that needs no other program: its
data are normalised and on the device before the clock starts, it draws its batches there, and it
never waits for a number.
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
    """A job in plain PyTorch."""

    net: nn.Module
    start: dict[str, Tensor]
    x: Tensor
    y: Tensor
    shards: list[list[Tensor]]  # run -> client -> its examples
    reads: Reads
    local: Local
    setting: BenchSetting
    tokens: bool  # the classes are on the last axis of the logits

    def loss(self, logits: Tensor, y: Tensor) -> Tensor:
        """Return the mean cross-entropy of examples, pixels or tokens."""
        return cross_entropy(logits.movedim(-1, 1) if self.tokens else logits, y)

    @classmethod
    def of(
        cls, job: BenchJob, setting: BenchSetting, federations: Sequence[Federation]
    ) -> "PlainLoop":
        """Return the loop for a job."""
        data, device, model = federations[0], setting.device, job.network()
        net = copy.deepcopy(model.net).to(device, setting.dtype)
        params, buffers = (to(group, device, setting.dtype) for group in model.initial(("init", 0)))
        chunks = [data.x[start : start + CHUNK] for start in range(0, len(data.x), CHUNK)]
        x = torch.cat([data.transform(chunk, setting.dtype) for chunk in chunks])
        shards = [
            [torch.from_numpy(indices).to(device) for indices in federation.train]
            for federation in federations
        ]
        start, tokens = {**params, **buffers}, job.task == "language"
        return cls(net, start, x, data.y, shards, job.reads, job.local, setting, tokens)

    def round(self, cohorts: Sequence[Sequence[int]]) -> list[dict[str, Tensor]]:
        """Train the cohort of every run, one client after another, and average."""
        return [
            self._average([shards[k] for k in cohort])
            for shards, cohort in zip(self.shards, cohorts, strict=True)
        ]

    def _average(self, shards: Sequence[Tensor]) -> dict[str, Tensor]:
        total = sum(map(len, shards))
        mean = {name: torch.zeros_like(tensor) for name, tensor in self.start.items()}
        for shard in shards:
            self.train(shard)
            trained = self.net.state_dict()
            for name in mean:
                share = trained[name] * (len(shard) / total)
                mean[name] += share.to(mean[name].dtype)  # counters are whole numbers
        return mean

    def train(self, shard: Tensor) -> None:
        """Train one client from the initial weights; the result is in `net`."""
        self.net.load_state_dict(self.start, strict=False)  # frozen tensors stay
        self.net.train()
        optimiser = make_optimiser(self.local, self.net)
        for batch in self._batches(shard):
            optimiser.zero_grad()
            with self.setting.cast():
                loss = self.loss(self.net(self.x[batch]), self.y[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()

    def _batches(self, shard: Tensor) -> Iterator[Tensor]:
        left, size = self.reads.count(len(shard)), self.reads.batch_size
        while left > 0:
            order = shard[torch.randperm(len(shard), device=shard.device)]
            for start in range(0, len(shard), size)[:left]:
                left -= 1
                yield order[start : start + size]

    def teachers(self) -> list[nn.Module]:
        """Return every client's trained model; their average is in `net` afterwards."""
        nets = []
        for shard in self.shards[0]:
            self.train(shard)
            nets.append(copy.deepcopy(self.net).eval())
        self.net.load_state_dict(self._average(self.shards[0]))
        return nets

    def distil(self, teachers: Sequence[nn.Module], steps: int) -> None:
        """Make the J steps of DKD: add the gradients of all clients, then step on the server."""
        student = self.net.eval()
        server = torch.optim.SGD(student.parameters(), lr=0.2)
        for _ in range(steps):
            server.zero_grad()
            for teacher, shard in zip(teachers, self.shards[0], strict=True):
                order = torch.randperm(len(shard), device=shard.device)
                x = self.x[shard[order[: self.reads.batch_size]]]
                with self.setting.cast():
                    with torch.no_grad():
                        taught = softmax(teacher(x), dim=1)
                    loss = cross_entropy(student(x), taught) / len(teachers)
                loss.backward()  # type: ignore[no-untyped-call]
            server.step()

    def passes(self, times: int, examples: int, classes: int) -> Callable[[int], None]:
        """Return a function that goes forward and backward `times` times with one large batch."""
        net = self.net.eval()
        parameters = list(net.parameters())
        x = self.x[torch.arange(examples, device=self.x.device) % len(self.x)]
        taught = torch.rand(examples, classes, device=x.device, dtype=x.dtype)

        def run(t: int) -> None:
            for _ in range(times):
                with self.setting.cast():
                    loss = cross_entropy(net(x), taught)
                torch.autograd.grad(loss, parameters)

        return run


def make_optimiser(local: Local, net: nn.Module) -> torch.optim.Optimizer:
    """Return torch's optimiser with the options of local training."""
    if local.optimiser == "sgd":
        return torch.optim.SGD(
            net.parameters(),
            lr=local.lr,
            momentum=local.momentum,
            nesterov=local.nesterov,
            weight_decay=local.weight_decay,
        )
    adam = torch.optim.AdamW if local.optimiser == "adamw" else torch.optim.Adam
    return adam(
        net.parameters(),
        lr=local.lr,
        betas=(local.beta1, local.beta2),
        eps=local.eps,
        weight_decay=local.weight_decay,
        amsgrad=local.amsgrad,
    )


def recorded(action: Callable[[int], None]) -> Callable[[int], None]:
    """Return the same work as a CUDA graph, without the cost of launching it."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for t in range(3):
            action(t)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action(0)
    return lambda t: graph.replay()
