"""Recorded steps without a GPU, with substitutes for what only a GPU has.

A replayed graph calls its function, streams do not wait, and nothing is compiled. The buffers, and
the order in which they are written, are those on CUDA.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.func import vmap
from torch.utils._pytree import tree_leaves

from feddkd import functional, parse
from feddkd.engines.batched import choices, engine, strategies
from feddkd.engines.batched.engine import Batched
from feddkd.engines.batched.strategies import GRAPHS, StrategyChooser
from feddkd.engines.compile import cuda_folds, cuda_graph, trace
from feddkd.engines.compile.cuda_folds import GraphOptions, Recording, Recordings
from feddkd.engines.compile.cuda_graph import copies
from feddkd.engines.interface import Order
from feddkd.engines.serial import Serial
from feddkd.method import Collect
from feddkd.methods.optimisers import adam, sgd
from feddkd.rounds.evaluation import Evaluation
from feddkd.rounds.loop import Run, play
from test_engines import METHODS, apart, cohorts_of, distillations, network, oracle, run, world

# six lanes of which in every round one leaves first, whose place compiled programs keep
SEEDS, UNEQUAL = (0, 1), (28, 36, 8, 44)
# a step that reads the tensors that were sent
MOMENTUM = "fedprox(epochs=1, batch_size=8, lr=0.1, momentum=0.5, mu=1)"
ADAM = "fedavg(epochs=1, batch_size=8, optimiser='adam', lr=0.01, eps=0.001)"
FEDBN_DKD = METHODS[7]
TRACED, SETTLED = trace.traced, trace.settle_numbers
RECORD = cuda_graph.record_graph
norms = pytest.mark.parametrize("norm", [False, True], ids=["no batch norm", "batch norm"])
ways = pytest.mark.parametrize("way", GRAPHS)
two_ways = pytest.mark.parametrize("way", ["graph", "fused"])  # finished lanes leave, or go idly on


class Stream:
    """Everything is done at once: there is nothing to wait for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait_stream(self, other: "Stream") -> None:
        assert other.device == self.device


class Recorder(StrategyChooser):
    """Chooses on a CPU among what is there for CUDA."""

    def __init__(self, strategy: str, device: torch.device, identity: object = None) -> None:
        super().__init__("auto", device, identity)
        self.strategy, self.names = strategy, tuple(GRAPHS)


def recorded(function: Callable[[], None], pool: Any) -> Any:
    return SimpleNamespace(replay=function)


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, double in {
        "Stream": Stream,
        "current_stream": Stream,
        "stream": nullcontext,
        "graph_pool_handle": object,
    }.items():
        monkeypatch.setattr(torch.cuda, name, double)
    monkeypatch.setattr(cuda_folds, "STRIDE", 2)  # rounds are short here
    monkeypatch.setattr(cuda_graph, "WARM_UP", 1)
    # which takes most of the time
    monkeypatch.setattr(trace, "traced", lambda function, *_: function)
    monkeypatch.setattr(trace, "settle_numbers", lambda function: function)
    monkeypatch.setattr(torch, "compile", lambda module, **_: module)
    monkeypatch.setattr(cuda_graph, "record_graph", recorded)
    monkeypatch.setattr(cuda_folds, "record_graph", recorded)
    monkeypatch.setattr(engine, "StrategyChooser", Recorder)


@norms
@pytest.mark.parametrize("text", [MOMENTUM, ADAM], ids=["momentum", "adam"])
@ways
def test_recorded_steps_agree_with_serial(way: str, text: str, norm: bool) -> None:
    found, _ = run(Batched, text, norm, SEEDS, sizes=UNEQUAL, strategy=way)
    assert apart(found, oracle(text, norm, SEEDS, UNEQUAL)[0]) < 1e-12


@pytest.mark.parametrize("way", ["graph", "fused-streams"])
def test_so_do_private_tensors_and_distillation(way: str) -> None:
    found, _ = run(Batched, FEDBN_DKD, True, SEEDS, strategy=way)
    assert apart(found, oracle(FEDBN_DKD, True, SEEDS)[0]) < 1e-12


@pytest.mark.parametrize("way", [name for name, way in GRAPHS.items() if way.compiled])
def test_so_does_what_is_traced_before_it_is_recorded(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "traced", TRACED)
    monkeypatch.setattr(trace, "settle_numbers", SETTLED)
    found, _ = run(Batched, METHODS[1], False, strategy=way)
    assert apart(found, oracle(METHODS[1], False)[0]) < 1e-12


def test_so_do_chunks_of_lanes() -> None:
    found, _ = run(Batched, MOMENTUM, False, strategy="graph", lanes=2)
    assert apart(found, oracle(MOMENTUM, False)[0]) < 1e-12


def test_trials_leave_nothing_behind(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "SHARE", float("inf"))
    monkeypatch.setattr(strategies, "PIECE_SECONDS", 0.0)
    tried = trials_of(monkeypatch)
    found, _ = run(Batched, MOMENTUM, False, strategy="auto", sizes=(44, 44, 44, 44))
    assert apart(found, oracle(MOMENTUM, False, sizes=(44, 44, 44, 44))[0]) < 1e-12
    assert not [record for record in caplog.records if record.levelname == "WARNING"], (
        "every way works"
    )
    assert tried == set(GRAPHS) - {"graph"}, "the first one is in use"


def trials_of(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the set to which every strategy that is tried is added."""
    tried: set[str] = set()
    try_one = StrategyChooser._try

    def noted(self: Any, kind: str, choice: Any, name: str, *rest: Any) -> None:
        tried.add(name)
        try_one(self, kind, choice, name, *rest)

    monkeypatch.setattr(StrategyChooser, "_try", noted)
    return tried


class CaptureState:
    """What torch leaves behind when a capture fails: a pool that records, and another stream."""

    def __init__(self, fails: Callable[[], bool]) -> None:
        self.fails, self.open, self.graphs = fails, set[object](), list[Any]()

    def record(self, function: Callable[[], None], pool: Any) -> Any:
        if pool in self.open:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        if self.fails():
            self.open.add(pool)
            raise RuntimeError("operation failed due to a previous error during capture")
        self.graphs.append(pool)
        return SimpleNamespace(replay=function)


@pytest.mark.parametrize("way", [name for name in GRAPHS if name != "graph"])
def test_a_trial_that_fails_leaves_nothing_behind(
    way: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(choices, "SHARE", float("inf"))
    monkeypatch.setattr(strategies, "PIECE_SECONDS", 0.0)
    monkeypatch.setattr(choices, "BETTER", float("inf"))  # what is tried is also used
    monkeypatch.setattr(GraphOptions, "suits", lambda *_: True)
    trying: list[str] = []
    run_recorded = Recordings.run

    def run_named(self: Any, work: Any, carry: Any, steps: Any, options: GraphOptions) -> Any:
        trying[:] = [name for name, known in GRAPHS.items() if known == options]
        return run_recorded(self, work, carry, steps, options)

    state = CaptureState(lambda: trying == [way])
    monkeypatch.setattr(Recordings, "run", run_named)
    monkeypatch.setattr(cuda_folds, "record_graph", state.record)
    tried = trials_of(monkeypatch)
    sizes = (44, 44, 44, 44)
    found, _ = run(Batched, MOMENTUM, False, strategy="auto", sizes=sizes)
    assert apart(found, oracle(MOMENTUM, False, sizes=sizes)[0]) < 1e-12
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert tried == set(GRAPHS) - {"graph"}
    assert warnings
    assert all(f"{way} does not work" in message for message in warnings), "the others work"


def test_a_capture_that_fails_gives_back_the_stream_and_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[Any] = []
    device = torch.device("cuda", 0)

    class Capture:
        """torch's own context: if the capture cannot be ended, it leaves its stream current."""

        def __init__(self, graph: Any, pool: Any) -> None:
            self.pool = pool

        def __enter__(self) -> None:
            done.append(("begins", self.pool))

        def __exit__(self, *error: object) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    before = SimpleNamespace(device=device)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: before)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: done.append(("stream", stream)))
    monkeypatch.setattr(
        torch._C, "_cuda_endAllocateToPool", lambda index, pool: done.append((index, pool)), False
    )
    with pytest.raises(RuntimeError, match="operation failed"):
        RECORD(lambda: None, "pool")
    assert done == [("begins", "pool"), ("stream", before), (0, "pool")]


@two_ways
def test_runs_one_after_another_on_one_engine_are_what_each_is_alone(way: str) -> None:
    model, method = functional(network(True)), parse(MOMENTUM)
    starts = [method.start(model, *model.initial(("init", seed))) for seed in SEEDS]
    host = Batched(
        model,
        [world(seed) for seed in SEEDS],
        [memo for _, memo in starts],
        torch.float64,
        strategy=way,
    )
    runs = [Run(at, seed, starts[at][0], has_validation=True) for at, seed in enumerate(SEEDS)]
    for one in runs:
        list(play(method, model, host, [one], cohort=3, last=3, evaluation=Evaluation()))
    assert (
        apart(
            [one.state for one in runs], [oracle(MOMENTUM, True, (seed,))[0][0] for seed in SEEDS]
        )
        < 1e-12
    )


def uploads(
    engine: type[Any], sizes: tuple[int, ...], cohorts: Sequence[tuple[int, ...]], **options: Any
) -> list[Any]:
    """Return what is gathered from cohorts, one after another, each from the same start."""
    model, method = functional(network(False)), parse(MOMENTUM)
    state, memo = method.start(model, *model.initial(("init", 0)))
    host = engine(model, [world(0, sizes)], [memo], torch.float64, **options)
    [exchange] = method.plan(1)
    sent = {**state, "rates": exchange.rates(1, state["params"]["0.weight"])}
    orders = (Order(0, sent, cohort, (0, at, 0, 1)) for at, cohort in enumerate(cohorts))
    return [host.exchange(exchange, [order])[0].collected for order in orders]


def noting(
    function: Callable[..., Any], notes: list[Any], note: Callable[..., Any]
) -> Callable[..., Any]:
    """The function, with a note of what it was given and found at every call."""

    def call(*given: Any) -> Any:
        found = function(*given)
        notes.append(note(found, *given))
        return found

    return call


@two_ways
def test_a_round_that_is_longer_than_the_recorded_one_is_recorded_anew(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []
    monkeypatch.setattr(
        Recording,
        "_record",
        noting(Recording._record, rows, lambda _, self, *given: len(self.indices)),
    )
    sizes, alone = (8, 40, 16, 64), [(0,), (1,), (2,), (3,)]  # of one batch, five, two and eight
    assert (
        apart(uploads(Batched, sizes, alone, strategy=way), uploads(Serial, sizes, alone)) < 1e-12
    )
    assert rows == [1, 8], "there is room for longer ones"


def test_only_where_steps_go_on_elsewhere_are_they_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    starts: list[int] = []
    monkeypatch.setattr(
        Recording,
        "_load",
        noting(Recording._load, starts, lambda _, self, work, carry, start: start),
    )
    # at every step one more has finished
    sizes, everybody = (8, 16, 24, 32, 40, 48), tuple(range(6))
    found = uploads(Batched, sizes, [everybody] * 2, strategy="fused")
    assert apart(found, uploads(Serial, sizes, [everybody] * 2)) < 1e-12
    assert starts[-5:] == [0, 2, 3, 4, 5], "five lanes go on in the places of six"


def test_no_later_replay_changes_a_gradient() -> None:
    cohorts = cohorts_of([(0, 1, 2)], [(0, 1, 2)])
    found = distillations(Batched, cohorts, Collect.MEAN_BY_CLIENTS, False, strategy="graph")
    assert apart(found, distillations(Serial, cohorts, Collect.MEAN_BY_CLIENTS, False)) < 1e-12


@pytest.mark.parametrize("text", [MOMENTUM, METHODS[1]], ids=["some leave", "all end together"])
@two_ways
def test_no_later_replay_changes_a_result(
    way: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    results: list[tuple[Any, Any]] = []
    monkeypatch.setattr(
        Recordings, "run", noting(Recordings.run, results, lambda found, *_: (found, copies(found)))
    )
    run(Batched, text, False, SEEDS, sizes=UNEQUAL, strategy=way)
    found, at_once = zip(*results, strict=True)
    assert apart(found, at_once) == 0


def test_adams_float64_part_is_written_out_for_each_lane_and_nothing_else_changes() -> None:
    random = torch.Generator().manual_seed(0)
    w, g = (
        {"a": torch.randn(3, 4, 5, generator=random), "b": torch.randn(3, 7, generator=random)}
        for _ in range(2)
    )
    for optimiser, numbers in ((adam(weight_decay=0.01), 2), (sgd(momentum=0.9), 0)):
        step, given = (
            vmap(optimiser.update, (0, 0, 0, None)),
            (w, g, vmap(optimiser.init)(w), torch.tensor(0.01)),
        )
        module = SETTLED(TRACED(step, *given))
        settled = [
            node for node in module.graph.nodes if node.target is torch.ops.feddkd.settled.default
        ]
        assert [node.meta["val"].shape for node in (node.args[0] for node in settled)] == [
            (3,)
        ] * numbers
        assert all(node.args[0].users == {node: None} for node in settled), (
            "a value that would be computed again is read"
        )
        pairs = zip(tree_leaves(module(*given)), tree_leaves(step(*given)), strict=True)
        assert all(torch.equal(found, expected) for found, expected in pairs)
