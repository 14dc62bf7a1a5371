"""A small federation to try a method on: clients of different sizes and labels, partial batches and
public data.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from feddkd.data.examples import Examples
from feddkd.data.federation import Federation, assemble
from feddkd.data.transforms import transform
from feddkd.engines.interface import Engine
from feddkd.engines.select import open_engine
from feddkd.method import Method
from feddkd.methods import parse
from feddkd.models.functional import Model, functional
from feddkd.rounds.availability import Tolerance
from feddkd.rounds.evaluation import Evaluation, fitting_protocol
from feddkd.rounds.loop import Row
from feddkd.simulation import Job, Simulation, Start
from feddkd.tensors import Groups, to

Network = Literal["plain", "batch norm"]
NETWORKS: tuple[Network, ...] = ("plain", "batch norm")
CLASSES = 3
# no round is played twice, so that a method's mistakes show
BARE = Tolerance(on_divergence="continue")


class Played(NamedTuple):
    """The result of a rehearsal: the servers' states, the clients' memos by (run, client), and the
    last round's rows.
    """

    states: list[Groups]
    memos: dict[tuple[int, int], Groups]
    rows: list[Row]


def rehearse(
    method: Method | str,
    *,
    network: Network = "plain",
    engine: str | Callable[..., Engine] = "serial",
    seeds: Sequence[int] = (0,),
    worlds: Sequence[int] | None = None,
    rounds: int = 3,
    cohort: int = 3,
    device: str = "cpu",
    around: Callable[[Engine], Engine] = lambda engine: engine,
    dress: Callable[[Method], Method] = lambda method: method,
    **options: Any,
) -> Played:
    """Play a method in float64 with four clients, one run for each seed, all runs at once.

    `worlds` are the seeds of data and initial weights (default: `seeds`); `around` wraps the engine
    in another; `dress` wraps the method's functions; `options` are the engine's.
    """
    chosen = parse(method) if isinstance(method, str) else method
    chosen.check_order()
    model = _model(network)
    chosen = dress(chosen.fitted(model))
    starts = [
        Start(seed, federation(chosen, world), *model.initial(("init", world)))
        for world, seed in zip(worlds or seeds, seeds, strict=True)
    ]
    job = Job(
        model,
        chosen,
        starts,
        torch.float64,
        rounds=rounds,
        cohort=cohort,
        evaluation=Evaluation(fitting_protocol(chosen, own_tests=False)),
        tolerance=BARE,
    )
    workers, make = list[Engine](), partial(open_engine, engine, options=options)

    def factory(*parts: Any) -> Engine:
        workers.append(make(*parts))
        return around(workers[0])

    with Simulation(job, factory, device) as simulation:
        *_, rows = simulation.play(chosen, 1, rounds)
        if ended := next((run.error for run in simulation.runs if run.error), None):
            raise ended
        # the engine has fallen back to the loop, which would hide the mistake
        for kind, why in simulation.engine.facts().get("failed", {}).items():
            raise RuntimeError(f"{kind}: {why}")
        return Played(
            [run.state for run in simulation.runs], dict(getattr(workers[0], "memos", {})), rows
        )


@cache
def _model(network: Network) -> Model:
    """Return the network as a model; it holds no numbers, so it is made once."""
    with torch.random.fork_rng(devices=[]):  # new layers draw their weights
        return functional(build(network))


def first_weights(network: Network) -> dict[str, Tensor]:
    """Return the parameters that runs on the network begin with."""
    return to(_model(network).initial(("init", 0))[0], "cpu", torch.float64)


def build(network: Network) -> nn.Module:
    """Return a network: one with dropout, so that keys matter, or one with batch norm.

    There is no bias before batch norm, because its gradient would be only rounding errors.
    """
    if network == "plain":
        first = nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        return nn.Sequential(
            *first, nn.Linear(12, 6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, CLASSES)
        ).double()
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(16, 6, bias=False),
        nn.BatchNorm1d(6),
        nn.Tanh(),
        nn.Linear(6, CLASSES),
    ).double()


def federation(method: Method, seed: int) -> Federation:
    """Return four clients with about as many examples as the method's batches have.

    So some batches are partial, and one client has a single batch.
    """
    draw = torch.Generator().manual_seed(seed)
    reads = [phase.reads for phase in method.phases if phase.client is not None]
    widths = {read.batch_size for read in reads} - {1}
    size = max([8, *(read.batch_size for read in reads if read.random)])
    public = _fitting(20, widths)
    sizes = [_fitting(max(int(share * size), 4), widths, public) for share in (0.6, 2.3, 1.5, 1.0)]
    clients = [_examples(draw, n, k, (k % CLASSES, (k + 1) % CLASSES)) for k, n in enumerate(sizes)]
    everything = tuple(range(CLASSES))
    test, validation, common = (_examples(draw, n, 1, everything) for n in (25, 15, public))
    return assemble(clients, test, validation, transform(""), common)


def _fitting(wanted: int, widths: set[int], besides: int = 0) -> int:
    """Return the smallest number from `wanted` on for which no batch has fewer than four examples.

    Batch norm magnifies the rounding errors of small batches.
    """

    def suits(n: int) -> bool:
        return all(
            (n + more) % width not in range(1, min(4, width))
            for width in widths
            for more in {0, besides}
        )

    return next(filter(suits, range(wanted, wanted + 1000)), wanted)


def _examples(draw: torch.Generator, number: int, centre: float, labels: Sequence[int]) -> Examples:
    x: Tensor = torch.randn(number, 1, 4, 4, generator=draw, dtype=torch.float64) + 0.3 * centre
    picked = torch.randint(0, len(labels), (number,), generator=draw)
    return Examples(x, torch.tensor(labels)[picked])
