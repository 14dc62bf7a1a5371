"""The pool engine: the numbers of serial, failures reported at once, no process left behind."""

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout

from feddkd import ClientError, InputError, fedavg, functional, parse
from feddkd.data.federation import SERVER
from feddkd.engines.compile import step_cache
from feddkd.engines.compile.simplify import trimmed
from feddkd.engines.interface import Order, Reply
from feddkd.engines.pool.engine import Pool
from feddkd.engines.pool.messages import pack
from feddkd.engines.serial import Serial
from feddkd.method import Batch, Exchange, Fold, Method
from feddkd.models.functional import Model
from feddkd.rounds.evaluation import Evaluation, fitting_protocol
from feddkd.rounds.evaluation_phases import judging
from feddkd.rounds.loop import Row, Run, play
from feddkd.tensors import Groups
from small import Pair, federation

SIZES = (10, 14, 22, 18)
LOCAL = "epochs=2, batch_size=8, lr=0.05"
DKD = "dkd(steps=3, batch_size=5, lr=0.3)"


def images(seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Pair]:
    draw = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(n, 1, 6, 6, generator=draw, dtype=dtype) + k,
            torch.randint(0, 3, (n,), generator=draw),
        )
        for k, n in enumerate(SIZES)
    ]


def network(norm: bool = False) -> nn.Module:
    torch.manual_seed(1)
    first = [nn.BatchNorm2d(4)] if norm else []
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        *first,
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 3),
    ).double()


class End(NamedTuple):
    states: list[Groups]
    rows: list[list[Row]]
    memos: dict[tuple[int, int], Groups]


def played(
    make: Callable[..., Serial],
    method: Method,
    *,
    norm: bool = False,
    seeds: Sequence[int] = (3,),
    rounds: int = 3,
    cohort: int = 3,
    dtype: torch.dtype = torch.float64,
) -> End:
    """Some rounds on an engine: what the server and the clients hold in the end, and the rows."""
    model = functional(network(norm))
    initial = [model.initial(("init", seed)) for seed in seeds]
    starts = [
        method.start(model, _as(params, dtype), _as(buffers, dtype)) for params, buffers in initial
    ]
    engine = make(
        model,
        [federation(images(seed, dtype)) for seed in seeds],
        [memo for _, memo in starts],
        dtype,
    )
    runs = [Run(at, seed, starts[at][0], has_validation=False) for at, seed in enumerate(seeds)]
    evaluation = Evaluation(fitting_protocol(method, own_tests=False))
    try:
        rows = list(
            play(method, model, engine, runs, cohort=cohort, last=rounds, evaluation=evaluation)
        )
        return End([run.state for run in runs], rows, dict(engine.memos))
    finally:
        engine.close()


def _as(group: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in group.items()
    }


def flat(groups: Groups) -> dict[str, Tensor]:
    return {
        f"{group}.{name}": tensor
        for group, tensors in groups.items()
        for name, tensor in tensors.items()
    }


def apart(a: Groups, b: Groups) -> float:
    left, right = flat(a), flat(b)
    assert list(left) == list(right)
    return max(((left[name] - right[name]).abs().max().item() for name in left), default=0.0)


two_workers = partial(Pool, workers=2)


def processes() -> set[int]:
    """Return the ids of all child processes of this process."""
    return {
        int(pid)
        for task in Path("/proc/self/task").iterdir()
        for pid in (task / "children").read_text().split()
    }


def open_files() -> set[str]:
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return {f"{link} {os.readlink(link)}" for link in links if os.path.islink(link)}


def mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:feddkd")


def shared_files() -> set[str]:
    """The files in /dev/shm; folders there belong to other programs."""
    return {entry.name for entry in os.scandir("/dev/shm") if not entry.is_dir()}


@pytest.fixture(autouse=True)
def _nothing_stays_behind() -> Iterator[None]:
    """No test leaves processes, open files, memory files or files in /dev/shm."""
    before = processes(), open_files(), shared_files()
    yield
    gc.collect()  # tracebacks hold what a failed exchange had received
    assert processes() <= before[0]
    assert open_files() <= before[1]
    assert shared_files() <= before[2]
    assert mapped() == 0


# --- the same numbers


@pytest.mark.parametrize(
    ("text", "norm"),
    [
        (f"fedavg({LOCAL}, momentum=0.9, nesterov=True)", False),
        (f"fedavg({LOCAL}, optimiser='adam')", True),
        (f"fedprox({LOCAL}, mu=2)", False),
        (f"fedmax({LOCAL}, beta=10)", False),
        (f"fedbn({LOCAL})", True),
        (f"fedavg({LOCAL}) | {DKD}", False),
        (f"fedbn({LOCAL}) | {DKD}", True),
    ],
)
def test_three_rounds_equal_serial(text: str, norm: bool) -> None:
    ours, theirs = (played(make, parse(text), norm=norm) for make in (two_workers, Serial))
    assert apart(ours.states[0], theirs.states[0]) < 1e-12
    assert ours.rows == theirs.rows
    assert set(ours.memos) == set(theirs.memos)
    for whose, memo in theirs.memos.items():
        assert apart(ours.memos[whose], memo) < 1e-12


def test_runs_in_lock_step_equal_serial() -> None:
    method = parse(f"fedbn({LOCAL}) | {DKD}")
    ours, theirs = (played(make, method, norm=True, seeds=(3, 4)) for make in (two_workers, Serial))
    assert max(apart(a, b) for a, b in zip(ours.states, theirs.states, strict=True)) < 1e-12
    assert apart(*ours.states) > 1e-3


@pytest.mark.parametrize("workers", [1, 3, 7])
def test_the_number_of_workers_changes_not_a_bit(workers: int) -> None:
    method = parse(f"fedavg({LOCAL}) | {DKD}")
    ours = played(partial(Pool, workers=workers), method)
    assert apart(ours.states[0], played(Serial, method).states[0]) == 0


def test_in_single_precision_channels_last_stays_within_rounding() -> None:
    method = parse(f"fedavg({LOCAL}) | {DKD}")
    ours, theirs = (played(make, method, dtype=torch.float32) for make in (two_workers, Serial))
    assert 0 <= apart(ours.states[0], theirs.states[0]) < 1e-5


def test_images_reach_the_network_in_channels_last() -> None:
    (phase,) = fedavg().phases
    assert isinstance(phase.client, Fold)
    start = phase.client.step

    def watched(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        if batch.x.stride(1) != 1:
            raise ValueError("not in channels_last")
        return start(model, sent, carry, batch)

    played(two_workers, changed(watched), dtype=torch.float32, rounds=1)


def test_a_method_of_ones_own_needs_no_spelling() -> None:
    """Workers are forked, so a closure reaches them that no pickle would carry."""
    own = replace(parse(f"fedavg({LOCAL})"), calls=())
    assert apart(played(two_workers, own).states[0], played(Serial, own).states[0]) < 1e-12


# --- who works, and for how long


def test_workers_are_forked_once_for_each_phase() -> None:
    # for local training, and for the first evaluation
    assert len(crews(fedavg(epochs=1), rounds=3)) == 1 + 1
    # that of the average comes before distillation
    assert len(crews(parse(f"fedavg() | {DKD}"), rounds=3)) == 1 + 1 + 1


def crews(method: Method, rounds: int) -> set[tuple[int, ...]]:
    """The sets of workers that took part."""
    seen = set()

    class Noting(Pool):
        def exchange(self, exchange: Exchange, orders: Sequence[Order]) -> list[Reply]:
            replies = super().exchange(exchange, orders)
            assert self._processes is not None
            seen.add(tuple(worker.process.pid or 0 for worker in self._processes.workers))
            return replies

    played(partial(Noting, workers=2), method, rounds=rounds)
    return seen


def test_workers_hear_of_memos_that_are_taken_back() -> None:
    """Every local exchange is done without memos first, and then with those held before: what
    counts is as on serial.
    """
    method = parse(f"fedbn({LOCAL}) | {DKD}")

    class Undoing(Pool):
        def exchange(self, exchange: Exchange, orders: Sequence[Order]) -> list[Reply]:
            held = self.memos_of(0)
            self.restore(0, {})
            bare = super().exchange(exchange, orders) if exchange.phase.name == "local" else []
            self.restore(0, held)
            replies = super().exchange(exchange, orders)
            bares.extend(
                apart(a.collected, b.collected) for a, b in zip(bare, replies, strict=False)
            )
            return replies

    bares: list[float] = []
    ours, theirs = (
        played(make, method, norm=True) for make in (partial(Undoing, workers=2), Serial)
    )
    assert apart(ours.states[0], theirs.states[0]) == 0
    assert (bares[0], bares[1] > 1e-3) == (0, True)  # to have no memo is to have the first


def test_workers_that_have_nothing_to_do_hear_of_memos_all_the_same() -> None:
    model, method = functional(network(norm=True)), parse("fedbn()")
    state, first = method.start(model, *model.initial(("init", 0)))
    other = {"private": {name: tensor + 1 for name, tensor in first["private"].items()}}

    def judged(make: Callable[..., Serial]) -> list[Tensor]:
        engine = make(model, [federation(images())], [first], torch.float64)
        found, sent = [], {name: state[name] for name in ("params", "buffers")}
        for cohort in ((0, 1, 2, 3), (0,), (0, 1, 2, 3)):
            if cohort == (0,):
                engine.restore(0, {0: other})
            found += engine.exchange(
                Exchange(judging("test")), [Order(0, sent, cohort, ("evaluate",))]
            )
        engine.close()
        return [reply.collected["tally"]["loss.sum"] for reply in found]

    ours, theirs = judged(partial(Pool, workers=4)), judged(Serial)
    assert all(map(torch.equal, ours, theirs))
    assert ours[0][0] != ours[1][0] == ours[2][0]


def test_an_evaluation_is_shared_out_batch_by_batch_and_adds_up_to_the_same_bits() -> None:
    model = functional(network())
    params, buffers = model.initial(("init", 0))
    few = replace(judging("test"), reads=replace(judging("test").reads, batch_size=3))
    order = Order(0, {"params": params, "buffers": buffers}, (SERVER, 0, 1, 2), ("evaluate",))
    held = [replace(federation(images()), own_test=tuple(np.arange(n) for n in (5, 1, 10, 1)))]
    pool, serial = (
        two_workers(model, held, [{}], torch.float64),
        Serial(model, held, [{}], torch.float64),
    )
    assert [task.batch for task in pool._longest_first(few, [order]) if task.client == SERVER] == [
        0,
        1,
        2,
        3,
    ]
    ours, theirs = (
        engine.exchange(Exchange(few), [order])[0].collected["tally"] for engine in (pool, serial)
    )
    pool.close()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("norm", [False, True])
def test_steps_that_come_often_are_traced_which_changes_no_bit(
    norm: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    method = parse(f"fedprox({LOCAL}, momentum=0.9) | {DKD}")
    usual = played(two_workers, method, norm=norm, dtype=dtype)
    trace_from(2, monkeypatch, tmp_path / "traced")
    traced = played(two_workers, method, norm=norm, dtype=dtype)
    assert (tmp_path / "traced").exists()
    assert apart(traced.states[0], usual.states[0]) == 0
    assert traced.rows == usual.rows


def trace_from(steps: int, monkeypatch: pytest.MonkeyPatch, told: Path) -> None:
    """Trace after this number of steps; make a file at each try, since workers try it."""

    def noting(
        function: Callable[..., list[Tensor]], *example: Tensor
    ) -> Callable[..., list[Tensor]]:
        told.touch()
        return trimmed(function, *example)

    monkeypatch.setattr(step_cache, "TRACE_AFTER", steps)
    monkeypatch.setattr(step_cache, "trimmed", noting)


class Odd(nn.Module):
    """A network that draws in forward and may branch on what it has computed."""

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.looks, self.inner, self.last = looks, nn.Conv2d(1, 4, 3), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = dropout(self.inner(x), 0.3, self.training)
        x = dropout(x, 0.3, self.training)
        if self.looks and x.mean() > 0:
            x = 2 * x
        out: Tensor = self.last(x.flatten(1))
        return out


@pytest.mark.parametrize("looks", [False, True])
def test_networks_that_draw_or_branch_by_themselves_are_what_they_were(
    looks: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "network", lambda norm: Odd(looks).double())
    trace_from(2, monkeypatch, tmp_path / "tried")
    ours, theirs = (played(make, parse(f"fedavg({LOCAL})")) for make in (two_workers, Serial))
    assert (tmp_path / "tried").exists()
    assert apart(ours.states[0], theirs.states[0]) == 0


def test_the_longest_client_goes_first() -> None:
    model, method = functional(network()), fedavg(batch_size=4)
    engine = two_workers(model, [federation(images())], [{}], torch.float64)
    tasks = engine._longest_first(method.phases[0], [Order(0, {}, (0, 1, 2, 3), ())])
    assert [task.client for task in tasks] == [2, 3, 1, 0]


def test_a_tensor_that_is_sent_twice_is_written_once() -> None:
    one = torch.zeros(1000)
    sizes = []
    for message in (one, [one, one], [one, one.clone()]):
        _, memory = pack(message)
        assert memory is not None
        sizes.append(os.fstat(memory).st_size)
        os.close(memory)
    assert sizes[0] == sizes[1] < sizes[2]


# --- failures


def changed(step: Callable[[Model, Groups, Groups, Batch], Groups]) -> Method:
    """FedAvg with another step."""
    (phase,) = fedavg(epochs=1, batch_size=8).phases
    assert isinstance(phase.client, Fold)
    return replace(fedavg(), phases=(replace(phase, client=replace(phase.client, step=step)),))


def failing(act: Callable[[], object]) -> Method:
    """FedAvg in which client 2, the one with 22 examples, does something else in its last batch."""

    def step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        if len(batch.y) == 6 and batch.x.mean() > 1.5:
            act()
        return carry

    return changed(step)


def refuse() -> None:
    raise ValueError("no power")


def misread() -> None:
    raise InputError("no such thing")


def test_a_failing_client_is_reported_as_by_serial() -> None:
    for make in (two_workers, Serial):
        with pytest.raises(
            ClientError,
            match=r"^client 2 failed in phase 'local', key \(3, 1, 0, 1, 2\): no power$",
        ):
            played(make, failing(refuse), cohort=4)


def test_a_users_mistake_stays_one() -> None:
    with pytest.raises(InputError, match=r"^no such thing$"):
        played(two_workers, failing(misread), cohort=4)


@pytest.mark.parametrize(
    ("act", "fate"),
    [
        (
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            "SIGKILL.* memory ran out",
        ),
        (lambda: os._exit(7), r"ended \(exit status 7\)"),
        (lambda: sys.exit(3), r"ended \(exit status 1\)"),
    ],
)
def test_a_worker_that_dies_is_an_error_that_names_its_client(
    act: Callable[[], object], fate: str
) -> None:
    began = time.monotonic()
    with pytest.raises(
        ClientError,
        match=rf"^client 2 failed in phase 'local', key \(3, 1, 0, 1, 2\): its worker .* {fate}$",
    ):
        played(two_workers, failing(act), cohort=4)
    assert time.monotonic() - began < 5


def disturbed(method: Method, act: Callable[[], object]) -> Method:
    """The method, whose client 2 does something else before its last batch."""
    phase, *others = method.phases
    assert isinstance(phase.client, Fold)
    compute = phase.client.step

    def step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        if len(batch.y) == 6 and batch.x.mean() > 1.5:
            act()
        return compute(model, sent, carry, batch)

    first = replace(phase, client=replace(phase.client, step=step))
    return replace(method, phases=(first, *others))


@pytest.mark.parametrize("text", [f"scaffold({LOCAL})", f"fedavg({LOCAL}) | {DKD}"])
def test_the_client_of_a_worker_that_dies_is_computed_again_to_the_same_numbers(
    text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def die_twice() -> None:
        for name in ("first", "second"):
            if not (tmp_path / name).exists():
                (tmp_path / name).touch()
                os.kill(os.getpid(), signal.SIGKILL)

    ours = played(two_workers, disturbed(parse(text), die_twice), cohort=4)
    serial = played(Serial, parse(text), cohort=4)
    assert apart(ours.states[0], serial.states[0]) == 0
    assert ours.rows == serial.rows
    assert caplog.text.count("it is computed again") == 2
    assert not processes()


def test_workers_that_died_while_idle_are_replaced() -> None:
    class Unlucky(Pool):
        def exchange(self, exchange: Exchange, orders: Sequence[Order]) -> list[Reply]:
            for worker in self._processes.workers if self._processes else []:
                os.kill(worker.process.pid or 0, signal.SIGKILL)
                worker.process.join()
            return super().exchange(exchange, orders)

    method = parse(f"fedavg({LOCAL})")
    ours = played(partial(Unlucky, workers=2), method)
    assert apart(ours.states[0], played(Serial, method).states[0]) < 1e-12


def test_an_interrupt_ends_the_workers() -> None:
    def interrupt() -> None:
        time.sleep(0.5)  # by then the parent has dealt out its tasks and waits
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(60)

    with pytest.raises(KeyboardInterrupt):
        played(two_workers, failing(interrupt), cohort=4)


# --- other processes

PROGRAM = """
import os, sys, time
sys.path[:0] = {folders!r}
import torch
from torch import nn
from test_pool import *
torch.set_num_threads(2)
convolution = nn.Conv2d(3, 16, 3)
convolution(torch.randn(64, 3, 32, 32)).relu().sum().backward()
torch.randn(300, 300) @ torch.randn(300, 300)
"""


FOLDERS = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]


def program(text: str) -> list[str]:
    return [sys.executable, "-c", PROGRAM.format(folders=FOLDERS) + text]


def test_a_program_that_used_torch_with_two_threads_before_does_not_hang() -> None:
    text = (
        "played(two_workers, parse('fedavg(epochs=1) | dkd(steps=2)'));"
        " print(torch.get_num_threads())"
    )
    done = subprocess.run(program(text), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "2"), done.stderr


def test_workers_leave_when_the_engines_process_is_killed() -> None:
    text = """
def show():
    print(os.getpid(), flush=True)
    time.sleep(60)
played(two_workers, failing(show), cohort=4)
"""
    with subprocess.Popen(program(text), stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        parent.kill()
    until = time.monotonic() + 5
    while lives(worker) and time.monotonic() < until:
        time.sleep(0.05)
    assert not lives(worker)


def lives(pid: int) -> bool:
    """Neither gone nor a zombie that waits to be fetched by its new parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


# --- refusals


def test_it_says_what_it_cannot_use() -> None:
    model = functional(network())
    with pytest.raises(InputError, match="at least one worker, not 0"):
        Pool(model, [federation(images())], [{}], workers=0)
    there = federation(images()).to(torch.device("meta"))
    with pytest.raises(InputError, match="computes on the CPU, and the data is on meta"):
        Pool(model, [there], [{}])
