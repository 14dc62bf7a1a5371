"""Every engine agrees with `serial` in float64 to 1e-12 after three rounds:

unequal clients, partial cohorts, partial batches.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

from feddkd import functional, parse
from feddkd.data.examples import Examples
from feddkd.data.federation import Federation, assemble
from feddkd.data.transforms import transform
from feddkd.engines.batched import choices, folds
from feddkd.engines.batched.engine import Batched
from feddkd.engines.batched.gradients import Gradients
from feddkd.engines.batched.memory import evenly
from feddkd.engines.compile.cuda_folds import program_lanes
from feddkd.engines.interface import Engine, Order
from feddkd.engines.serial import Serial
from feddkd.method import Collect
from feddkd.rounds.evaluation import Evaluation, Protocol
from feddkd.rounds.loop import Row, Run, play
from feddkd.tensors import to

METHODS = [
    "fedavg(epochs=2, batch_size=8, lr=0.1, momentum=0.5, nesterov=True, weight_decay=0.01)",
    # Adam magnifies the rounding of tiny gradients, hence eps
    "fedavg(steps=3, batch_size=8, optimiser='adam', lr=0.01, amsgrad=True, eps=0.001)",
    "fedprox(epochs=1, batch_size=8, mu=1)",
    "fedmax(epochs=1, batch_size=8, beta=10)",
    "fedbn(epochs=1, batch_size=8)",
    "fedavg(epochs=1, batch_size=8) | dkd(steps=3, batch_size=14, lr=0.3)",
    (
        "fedavg(epochs=1, batch_size=8) | dkd(steps=2, batch_size=14, lr=0.3, student='batch',"
        " teacher='batch')"
    ),
    "fedbn(epochs=1, batch_size=8) | dkd(steps=3, batch_size=14)",
    (
        "fedbn(epochs=1, batch_size=8, private='statistics') | dkd(steps=2, batch_size=14,"
        " student='batch')"
    ),
    "fedmax(epochs=1, batch_size=8) | dkd(steps=2, batch_size=8, warmup=1)",
]


@pytest.fixture(autouse=True)
def _trials_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `auto` try a strategy in every exchange, however short the run."""
    monkeypatch.setattr(choices, "SHARE", float("inf"))


def network(norm: bool) -> nn.Module:
    first: list[nn.Module] = [nn.BatchNorm2d(3)] if norm else []
    second: list[nn.Module] = [nn.BatchNorm1d(6)] if norm else [nn.Dropout(0.2)]
    conv = nn.Conv2d(1, 3, 3, padding=1, bias=False)
    return nn.Sequential(
        conv,
        *first,
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(12, 6, bias=False),
        *second,
        nn.Tanh(),
        nn.Linear(6, 3),
    ).double()


SIZES = (12, 28, 20, 14)


def world(seed: int, sizes: Sequence[int] = SIZES, text: str = "") -> Federation:
    draw = torch.Generator().manual_seed(seed)

    def examples(count: int) -> Examples:
        x = torch.randint(0, 256, (count, 1, 4, 4), generator=draw, dtype=torch.uint8)
        return Examples(x, torch.randint(0, 3, (count,), generator=draw))

    return assemble(
        [examples(n) for n in sizes], examples(25), examples(15), transform(text, 255.0)
    )


def run(
    engine: type[Any],
    text: str,
    norm: bool,
    seeds: Sequence[int] = (0,),
    augment: str = "",
    place: str = "cpu",
    dtype: torch.dtype = torch.float64,
    sizes: Sequence[int] = SIZES,
    shuffle: bool = True,
    **options: Any,
) -> tuple[list[Any], list[Row]]:
    model, device = functional(network(norm)), torch.device(place)
    method = parse(text) if shuffle else parse(text).in_stored_order()
    initial = [
        [to(group, device, dtype) for group in model.initial(("init", seed))] for seed in seeds
    ]
    starts = [method.start(model, params, buffers) for params, buffers in initial]
    worlds = [world(seed, sizes, augment).to(device) for seed in seeds]
    host: Engine = engine(model, worlds, [memo for _, memo in starts], dtype, **options)
    runs = [Run(at, seed, starts[at][0], has_validation=True) for at, seed in enumerate(seeds)]
    protocol = Protocol.GLOBAL if method.private == {"none"} else Protocol.CLIENT_MEAN
    *_, rows = play(method, model, host, runs, cohort=3, last=3, evaluation=Evaluation(protocol))
    host.close()
    return [one.state for one in runs], rows


@cache
def oracle(
    text: str, norm: bool, seeds: tuple[int, ...] = (0,), sizes: tuple[int, ...] = SIZES
) -> tuple[list[Any], list[Row]]:
    """Return the result of `serial`, computed once for all comparisons."""
    return run(Serial, text, norm, seeds, sizes=sizes)


def apart(first: Sequence[Any], second: Sequence[Any]) -> float:
    pairs = (
        (a[group][name], b[group][name])
        for a, b in zip(first, second, strict=True)
        for group in a
        for name in a[group]
    )
    return max(float((a.double().cpu() - b.double().cpu()).abs().max()) for a, b in pairs)


WAYS: dict[str, dict[str, Any]] = {
    "auto": {},
    "vmap": {"strategy": "vmap"},
    "traced": {"strategy": "traced"},
    "loop": {"strategy": "loop"},
    "vmap in chunks": {"strategy": "vmap", "lanes": 2},
}


@pytest.mark.parametrize("norm", [False, True], ids=["no batch norm", "batch norm"])
@pytest.mark.parametrize(
    ("way", "text"),
    # auto tries them all
    [
        (way, text)
        for way in WAYS
        for text in METHODS
        if way != "auto" or text in (METHODS[0], METHODS[7])
    ],
)
def test_batched_agrees_with_serial(text: str, norm: bool, way: str) -> None:
    expected, rows = oracle(text, norm)
    found, same = run(Batched, text, norm, **WAYS[way])
    assert apart(expected, found) < 1e-12
    for key, value in rows[0].items():
        assert same[0][key] == pytest.approx(value, abs=1e-10), key


@pytest.mark.parametrize("text", [METHODS[0], METHODS[7]])
@pytest.mark.parametrize("norm", [False, True], ids=["no batch norm", "batch norm"])
def test_several_seeds_in_one_program_are_the_seeds_one_by_one(text: str, norm: bool) -> None:
    together, _ = run(Batched, text, norm, seeds=(0, 1, 2), strategy="vmap")
    alone = [oracle(text, norm, (seed,))[0][0] for seed in (0, 1, 2)]
    assert apart(together, alone) < 1e-12


def test_what_clients_keep_takes_no_more_memory_than_its_numbers() -> None:
    kept: list[torch.Tensor] = []

    class Spied(Batched):
        def close(self) -> None:
            groups = (group for memo in self.memos.values() for group in memo.values())
            kept.extend(tensor for group in groups for tensor in group.values())
            super().close()

    run(Spied, "scaffold(epochs=1, batch_size=8)", False, strategy="vmap", sizes=[9] * 5)
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in kept}
    needed = {tensor.data_ptr(): tensor.nbytes for tensor in kept}
    assert len(needed) > 5
    assert sum(storage.nbytes() for storage in held.values()) <= sum(needed.values())


@pytest.mark.parametrize(
    "places", [program_lanes, lambda active: 99], ids=["those of compiled programs", "all lanes"]
)
@pytest.mark.parametrize("text", [METHODS[0], METHODS[1]], ids=["momentum", "adam"])
@pytest.mark.parametrize("norm", [False, True], ids=["no batch norm", "batch norm"])
def test_lanes_that_go_idly_on_after_they_have_finished_change_nothing(
    places: Callable[[int], int], text: str, norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folds, "run_spans", partial(folds.run_spans, program_lanes=places))
    found, _ = run(Batched, text, norm, seeds=(0, 1, 2), strategy="vmap")
    assert apart(found, oracle(text, norm, (0, 1, 2))[0]) < 1e-12


def test_programs_are_made_for_few_numbers_of_lanes() -> None:
    assert [program_lanes(lanes) for lanes in range(1, 18)] == [
        1,
        2,
        3,
        4,
        6,
        6,
        8,
        8,
        12,
        12,
        12,
        12,
        16,
        16,
        16,
        16,
        24,
    ]


Cohorts = Sequence[Sequence[tuple[int, ...]]]  # step -> run -> who answers


def distillations(
    engine: type[Any],
    cohorts: Cohorts,
    rule: Collect,
    norm: bool = True,
    place: str = "cpu",
    **options: Any,
) -> list[Any]:
    """Return what the distillation steps of a round gather, by step and run.

    The clients of each step are given.
    """
    model, method = (
        functional(network(norm)),
        parse("fedavg(epochs=1, batch_size=8) | dkd(steps=2, batch_size=14)"),
    )
    device, runs = torch.device(place), range(len(cohorts[0]))
    initial = [
        [to(group, device, torch.float64) for group in model.initial(("init", run))] for run in runs
    ]
    starts = [method.start(model, params, buffers) for params, buffers in initial]
    worlds = [world(run).to(device) for run in runs]
    host: Engine = engine(model, worlds, [memo for _, memo in starts], torch.float64, **options)
    gathered: list[Any] = []
    for exchange, asked in zip(method.plan(1), ([(0, 1, 2)] * len(runs), *cohorts), strict=True):
        phase = (
            exchange.phase
            if exchange.index == 0
            else replace(exchange.phase, collect={"gradient": rule})
        )
        rates = exchange.rates(1, starts[0][0]["params"]["0.weight"])
        orders = [
            Order(
                run,
                {**starts[run][0], "rates": rates},
                asked[run],
                (run, 1, exchange.index, exchange.step),
            )
            for run in runs
        ]
        replies = host.exchange(replace(exchange, phase=phase), orders)
        gathered += [reply.collected for reply in replies if exchange.index > 0]
    return gathered


def cohorts_of(*steps: Sequence[tuple[int, ...]]) -> Cohorts:
    return steps


SILENT = cohorts_of([(0, 1, 2)], [(0, 2)])
ALIKE = cohorts_of([(0, 1, 2)] * 3, [(0, 1, 2)] * 3)
UNLIKE = cohorts_of([(0, 1, 2), (0, 2), (0, 1, 2)], [(0, 1, 2), (2,), (0, 2)])


@pytest.mark.parametrize("rule", list(Collect))
def test_distillation_goes_on_when_a_client_falls_silent_between_its_steps(rule: Collect) -> None:
    assert apart(distillations(Serial, SILENT, rule), distillations(Batched, SILENT, rule)) < 1e-12


@pytest.mark.parametrize("norm", [False, True], ids=["no batch norm", "batch norm"])
@pytest.mark.parametrize("cohorts", [ALIKE, UNLIKE], ids=["equal cohorts", "unequal cohorts"])
@pytest.mark.parametrize("rule", list(Collect))
@pytest.mark.parametrize("way", ["vmap", "loop"])
def test_distillation_of_several_runs_in_one_program_is_theirs_one_by_one(
    norm: bool, cohorts: Cohorts, rule: Collect, way: str
) -> None:
    expected = distillations(Serial, cohorts, rule, norm)
    assert apart(expected, distillations(Batched, cohorts, rule, norm, strategy=way)) < 1e-12


@pytest.mark.parametrize("way", ["auto", "traced"])
def test_so_it_is_where_strategies_are_timed_or_traced(way: str) -> None:
    rule = Collect.MEAN_BY_CLIENTS
    assert (
        apart(distillations(Serial, ALIKE, rule), distillations(Batched, ALIKE, rule, strategy=way))
        < 1e-12
    )


def test_runs_of_equal_shape_are_taught_together() -> None:
    model, method = (
        functional(network(False)),
        parse("fedavg(epochs=1, batch_size=8) | dkd(steps=2, batch_size=8)"),
    )
    starts = [method.start(model, *model.initial(("init", run))) for run in range(3)]
    host = Batched(
        model,
        [world(run) for run in range(3)],
        [memo for _, memo in starts],
        torch.float64,
        strategy="vmap",
    )
    runs = [Run(run, run, starts[run][0], has_validation=False) for run in range(3)]
    next(play(method, model, host, runs, cohort=2, last=1, evaluation=Evaluation()))
    assert host.facts()["strategy"]["distil, 3 x 2 clients of 8"] == "vmap"


class Branching(nn.Module):
    """Looks at its numbers, which vmap does not allow."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layer(x.flatten(1))
        return logits if float(logits.detach().sum()) > 0 else 2 * logits


def test_a_network_that_vmap_cannot_take_is_looped_over_with_a_line_that_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    method, model = parse(METHODS[5]), functional(Branching().double())
    found = []
    for engine in (Serial, Batched):
        state, memo = method.start(model, *model.initial(("init", 0)))
        run = Run(0, 0, state, has_validation=True)
        host: Engine = engine(model, [world(0)], [memo], torch.float64)
        list(play(method, model, host, [run], cohort=3, last=2, evaluation=Evaluation()))
        found.append(run.state)
    assert apart(found[:1], found[1:]) < 1e-12
    assert "distil, 1 x 3 clients of 14: vmap does not work for this network" in caplog.text


@pytest.mark.parametrize("text", [METHODS[0], METHODS[7]])
def test_lanes_go_in_equal_chunks_where_memory_is_short_and_the_numbers_stay(
    text: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = oracle(text, True, (0, 1))
    with caplog.at_level("INFO", logger="feddkd"):
        found, _ = run(Batched, text, True, seeds=(0, 1), strategy="vmap", memory=160_000)
    assert apart(expected, found) < 1e-12
    plan = re.search(
        r"local, batches of 8: 6 lanes in (\d) chunks of (\d) \(a lane takes .* KiB, 156 KiB"
        r" free\)",
        caplog.text,
    )
    assert plan is not None, caplog.text
    assert int(plan[1]) * int(plan[2]) == 6


def test_lanes_that_fit_go_at_once_and_the_plan_is_recorded() -> None:
    model, method = functional(network(False)), parse(METHODS[0])
    state, memo = method.start(model, *model.initial(("init", 0)))
    host = Batched(model, [world(0)], [memo], torch.float64, strategy="vmap")
    next(
        play(
            method,
            model,
            host,
            [Run(0, 0, state, has_validation=False)],
            cohort=3,
            last=1,
            evaluation=Evaluation(),
        )
    )
    assert host.facts()["memory"][0].startswith(
        "local, batches of 8: 3 lanes at once (a lane takes "
    )


def test_chunks_are_as_equal_as_can_be() -> None:
    assert [evenly(50, most) for most in (50, 49, 25, 24, 17, 1)] == [50, 25, 25, 17, 17, 1]


def allocator() -> None:
    raise torch.OutOfMemoryError("no")


def driver() -> None:
    raise RuntimeError("CUDA error: out of memory")


def recording() -> None:
    try:
        driver()
    finally:
        raise RuntimeError("the recording was ended by an earlier error")


@pytest.mark.parametrize("complain", [allocator, driver, recording])
def test_halving_is_the_last_resort(
    complain: Callable[[], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seeds = (0, 1)
    expected, _ = oracle(METHODS[5], False, seeds)
    chunk, gather = Batched._fold_chunk, Gradients._gather

    def short_of_memory(self: Batched, exchange: Any, client: Any, orders: Any, lanes: Any) -> Any:
        if len(lanes) > 1:
            complain()
        return chunk(self, exchange, client, orders, lanes)

    def in_dkd(self: Gradients, exchange: Any, client: Any, orders: Any, memo: Any) -> Any:
        if self.most > 1:
            complain()
        return gather(self, exchange, client, orders, memo)

    monkeypatch.setattr(Batched, "_fold_chunk", short_of_memory)
    monkeypatch.setattr(Gradients, "_gather", in_dkd)
    found, _ = run(Batched, METHODS[5], False, seeds, strategy="vmap")
    assert apart(expected, found) < 1e-12
    assert "6 lanes do not fit in memory" in caplog.text
    assert "distil: 2 runs do not fit in memory" in caplog.text


def test_no_other_failure_is_taken_for_a_lack_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(Batched, "_fold_chunk", fails)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        run(Batched, METHODS[0], False, strategy="vmap")


def test_random_crops_and_flips_are_the_same_on_every_engine() -> None:
    text, augment = METHODS[5], "crop(padding=1) | flip() | normalise(mean=0.4, std=0.3)"
    assert (
        apart(
            run(Serial, text, False, augment=augment)[0],
            run(Batched, text, False, augment=augment)[0],
        )
        < 1e-12
    )


@pytest.mark.parametrize("norm", [False, True], ids=["no batch norm", "batch norm"])
def test_unshuffled_examples_are_read_alike_by_every_engine_and_make_a_difference(
    norm: bool,
) -> None:
    (found, _), (same, _) = (
        run(engine, METHODS[5], norm, shuffle=False) for engine in (Serial, Batched)
    )
    assert apart(found, same) < 1e-12
    assert apart(found, oracle(METHODS[5], norm)[0]) > 1e-3


def test_two_runs_of_the_batched_engine_give_identical_bits() -> None:
    first, second = (run(Batched, METHODS[5], False, strategy="vmap")[0] for _ in range(2))
    assert apart(first, second) == 0


ON_CUDA: dict[str, dict[str, Any]] = {
    **{name: way for name, way in WAYS.items() if name != "traced"},  # that one is for CPUs
    "graph": {"strategy": "graph"},
    "streams": {"strategy": "streams"},
    "fused": {"strategy": "fused"},
    "fused-streams": {"strategy": "fused-streams"},
    "kernels": {"strategy": "kernels"},
    "graph in chunks": {"strategy": "graph", "lanes": 2},
}
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_cuda
@pytest.mark.filterwarnings("ignore")  # compilers give warnings
@pytest.mark.parametrize("text", METHODS)
@pytest.mark.parametrize("norm", [False, True], ids=["no batch norm", "batch norm"])
@pytest.mark.parametrize("way", ON_CUDA)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 2e-4)],
    ids=["float64", "float32"],
)
def test_batched_on_cuda_agrees_with_serial_on_the_cpu(
    text: str, norm: bool, way: str, dtype: torch.dtype, tolerance: float
) -> None:
    expected, _ = oracle(text, norm)
    found, _ = run(Batched, text, norm, place="cuda", dtype=dtype, precision="fp32", **ON_CUDA[way])
    assert apart(expected, found) < tolerance


@needs_cuda
@pytest.mark.parametrize("way", ["graph", "streams"])
def test_two_runs_on_cuda_give_identical_bits(way: str) -> None:
    first, second = (
        run(Batched, METHODS[5], False, place="cuda", dtype=torch.float32, strategy=way)[0]
        for _ in range(2)
    )
    assert apart(first, second) == 0


@needs_cuda
@pytest.mark.parametrize("way", ["graph", "streams"])
def test_several_seeds_on_cuda_are_the_seeds_one_by_one(way: str) -> None:
    together, _ = run(Batched, METHODS[5], False, seeds=(0, 1, 2), place="cuda", strategy=way)
    alone = [oracle(METHODS[5], False, (seed,))[0][0] for seed in (0, 1, 2)]
    assert apart(together, alone) < 1e-12


@needs_cuda
@pytest.mark.filterwarnings("ignore")  # compilers give warnings
@pytest.mark.parametrize("norm", [False, True], ids=["no batch norm", "batch norm"])
@pytest.mark.parametrize(
    "cohorts", [SILENT, ALIKE, UNLIKE], ids=["one falls silent", "equal cohorts", "unequal cohorts"]
)
@pytest.mark.parametrize("rule", list(Collect))
@pytest.mark.parametrize("way", ["auto", "vmap", "graph", "streams", "fused", "kernels"])
def test_distillation_of_several_runs_on_cuda_is_theirs_one_by_one(
    norm: bool, cohorts: Cohorts, rule: Collect, way: str
) -> None:
    expected = distillations(Serial, cohorts, rule, norm)
    found = distillations(
        Batched, cohorts, rule, norm, place="cuda", strategy=way, precision="fp32"
    )
    assert apart(expected, found) < 1e-12


@needs_cuda
def test_a_gradient_handed_out_is_not_written_over_by_later_replays() -> None:
    cohorts = cohorts_of([(0, 1, 2)], [(0, 1, 2)])
    first, second = distillations(
        Batched, cohorts, Collect.MEAN_BY_CLIENTS, False, place="cuda", strategy="graph"
    )
    expected = distillations(Serial, cohorts, Collect.MEAN_BY_CLIENTS, False)
    assert apart([first, second], expected) < 1e-12
    assert apart([first], [second]) > 1e-6  # other batches, so other gradients


@needs_cuda
def test_the_memory_plan_on_cuda_holds_where_memory_is_short() -> None:
    expected, _ = oracle(METHODS[0], False)
    found, _ = run(
        Batched, METHODS[0], False, place="cuda", strategy="graph", precision="fp32", memory=100_000
    )
    assert apart(expected, found) < 1e-12
