"""The choice of a strategy while a run goes on: when trials are made, what they cost and change."""

import json
import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from feddkd import functional, parse
from feddkd.engines.batched import choices, strategies
from feddkd.engines.batched.choices import Choice
from feddkd.engines.batched.engine import Batched
from feddkd.engines.batched.strategies import StrategyChooser
from feddkd.engines.choice_cache import MOST_FILES, keep_choice, kept_choice
from feddkd.engines.interface import Order
from test_engines import METHODS, apart, network, oracle, run, world

NAMES = ("loop", "vmap", "traced")


class Machine:
    """A machine on which every strategy takes a known time, for preparing and for a step."""

    def __init__(self, steps: dict[str, float], prepares: dict[str, float]) -> None:
        self.steps, self.prepares, self.now = steps, prepares, 0.0
        self.ready: set[str] = set()

    def work(self, name: str, steps: int) -> None:
        self.now += self.steps[name] * steps
        if name not in self.ready:
            self.ready.add(name)
            self.now += self.prepares.get(name, 0.0)


def play(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, rounds: int, steps: int = 10
) -> tuple[StrategyChooser, list[float]]:
    """Return a chooser after some rounds, and the machine's clock at the end of each round."""
    monkeypatch.setattr(time, "perf_counter", lambda: machine.now)
    chooser, ends = StrategyChooser("auto", torch.device("cpu"), "a machine"), []
    for _ in range(rounds):
        chooser.compute(
            "work",
            NAMES,
            lambda name: machine.work(name, steps),
            machine.work,
            most=steps,
            steps=steps,
        )
        ends.append(machine.now)
    return chooser, ends


@pytest.mark.parametrize("step", [1e-4, 0.01, 1.0])
@pytest.mark.parametrize("gain", [0.1, 0.5, 3.0, 20.0])
def test_a_run_of_any_length_takes_at_most_a_tenth_longer_than_the_loop(
    step: float, gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = {"loop": step, "vmap": 2 * step / gain, "traced": step / gain}
    machine = Machine(seconds, {"traced": 100 * seconds["vmap"]})
    _, ends = play(machine, monkeypatch, 2000)
    assert all(end <= 1.1 * 10 * step * (t + 1) for t, end in enumerate(ends))


def test_the_fastest_strategy_is_found_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine({"loop": 0.02, "vmap": 0.01, "traced": 0.002}, {"traced": 1.0})
    chooser, ends = play(machine, monkeypatch, 400)
    assert chooser.chosen == {"work": "traced"}
    assert ends[-1] - ends[-2] == pytest.approx(0.02)
    (changes,) = chooser.facts()["since"].values()
    assert [name for _, name in changes] == ["vmap", "traced"]


def test_a_slower_strategy_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine({"loop": 0.01, "vmap": 0.02, "traced": 0.03}, {"traced": 1.0})
    chooser, _ = play(machine, monkeypatch, 2000)
    assert chooser.chosen == {"work": "loop"}
    assert chooser.facts()["since"] == {}
    assert set(chooser.facts()["tried"]["work"]) == set(NAMES)


def test_the_next_run_begins_with_what_the_last_one_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FEDDKD_CACHE", str(tmp_path))
    seconds = {"loop": 0.02, "vmap": 0.01, "traced": 0.002}
    first, _ = play(Machine(seconds, {"traced": 0.5}), monkeypatch, 400)
    first.close()
    _, ends = play(Machine(seconds, {"traced": 0.5}), monkeypatch, 20)
    cold = 20 * 10 * seconds["loop"]
    assert ends[-1] < 0.5 * cold
    assert ends[-1] - ends[-2] == pytest.approx(0.02)
    monkeypatch.setenv("FEDDKD_CACHE", "off")
    _, ends = play(Machine(seconds, {"traced": 0.5}), monkeypatch, 2)
    assert ends[0] == pytest.approx(0.2), "nothing is read if it is switched off"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"strategy": 1}', '{"seconds": 3}', "\x00"])
def test_a_damaged_file_is_no_knowledge(
    text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FEDDKD_CACHE", str(tmp_path))
    keep_choice("kind", {"strategy": "vmap", "seconds": {"vmap": 1.0}, "costs": {}})
    assert kept_choice("kind")["strategy"] == "vmap"
    (tmp_path / "choices" / "kind.json").write_text(text)
    assert kept_choice("kind") == {}
    assert Choice.first("kind", NAMES, "loop").name == "loop"


def test_a_folder_that_cannot_be_written_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDDKD_CACHE", str(tmp_path / "file"))
    keep_choice("kind", {"strategy": "vmap", "seconds": {}, "costs": {}})
    assert kept_choice("kind") == {}


def write_many(folder: str) -> None:
    import os

    os.environ["FEDDKD_CACHE"] = folder
    for number in range(60):
        keep_choice(f"kind{number % 3}", {"strategy": "x" * 500, "seconds": {}, "costs": {}})


def test_several_processes_may_write_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FEDDKD_CACHE", str(tmp_path))
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_many, args=(str(tmp_path),)) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert sorted(path.name for path in (tmp_path / "choices").iterdir()) == [
        f"kind{number}.json" for number in range(3)
    ]
    assert kept_choice("kind0")["strategy"] == "x" * 500


def test_the_folder_does_not_grow_without_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FEDDKD_CACHE", str(tmp_path))
    folder = tmp_path / "choices"
    folder.mkdir()
    for number in range(MOST_FILES):
        (folder / f"{number}.json").write_text("{}")
    keep_choice("last", {"strategy": "vmap", "seconds": {}, "costs": {}})
    assert len(list(folder.iterdir())) <= MOST_FILES
    assert kept_choice("last")


@pytest.fixture
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try everything as soon as possible, and cut every exchange into single steps."""
    monkeypatch.setattr(choices, "SHARE", float("inf"))
    monkeypatch.setattr(strategies, "PIECE_SECONDS", 0.0)


@pytest.mark.usefixtures("_eager")
@pytest.mark.parametrize("norm", [False, True], ids=["no batch norm", "batch norm"])
@pytest.mark.parametrize("text", [METHODS[0], METHODS[7]], ids=["fedavg", "fedbn, dkd"])
@pytest.mark.parametrize("better", [0.0, float("inf")], ids=["keeps the loop", "takes everything"])
def test_trials_and_changes_between_steps_leave_the_numbers(
    better: float, text: str, norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choices, "BETTER", better)
    found, _ = run(Batched, text, norm)
    expected = oracle(text, norm)[0]
    assert apart(found, expected) < 1e-12
    if not better and text == METHODS[0]:
        alone, _ = run(Batched, text, norm, strategy="loop")
        assert apart(found, alone) == 0, "trials change no bit"


@pytest.mark.usefixtures("_eager")
@pytest.mark.parametrize("broken", ["vmap", "traced"])
def test_a_strategy_that_fails_in_its_trial_is_left_out(
    broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    work = StrategyChooser._run

    def breaks(self: Any, fold: Any, carry: Any, steps: Any, name: str) -> Any:
        if name == broken:
            raise RuntimeError("no rule for this operation")
        return work(self, fold, carry, steps, name)

    monkeypatch.setattr(StrategyChooser, "_run", breaks)
    found, _ = run(Batched, METHODS[0], False)
    assert apart(found, oracle(METHODS[0], False)[0]) < 1e-12
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert any(f"{broken} does not work" in line and "no rule" in line for line in warnings)


def uploads(host: Batched, rounds: Sequence[int]) -> list[Any]:
    method = parse(METHODS[0])
    model = functional(network(False))
    state, _ = method.start(model, *model.initial(("init", 0)))
    found = []
    for t in rounds:
        [exchange] = method.plan(t)
        sent = {**state, "rates": exchange.rates(t, state["params"]["0.weight"])}
        random = torch.get_rng_state()
        found.append(host.exchange(exchange, [Order(0, sent, (0, 1, 2), (0, t, 0, 1))])[0])
        assert torch.equal(torch.get_rng_state(), random), "no draw from torch's generator"
    return [reply.collected for reply in found]


def engine() -> Batched:
    model = functional(network(False))
    memo = parse(METHODS[0]).start(model, *model.initial(("init", 0)))[1]
    return Batched(model, [world(0)], [memo], torch.float64)


@pytest.mark.usefixtures("_eager")
def test_a_resumed_run_computes_as_it_would_have_gone_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices, "BETTER", float("inf"))
    whole = engine()
    expected = uploads(whole, range(1, 9))[-2:]
    facts = json.loads(json.dumps(whole.facts()))
    assert facts["since"], "there were changes"
    resumed = engine()
    resumed.adopt(facts)
    assert apart(uploads(resumed, (7, 8)), expected) == 0
    assert resumed.facts()["since"] == whole.facts()["since"]


@pytest.mark.usefixtures("_eager")
def test_an_old_record_is_repeated_without_trials() -> None:
    (kind,) = (old := _facts_of_old_record())["strategy"]
    resumed = engine()
    resumed.adopt(old)
    uploads(resumed, (1, 2))
    assert resumed.facts()["strategy"] == {kind: "vmap"}
    assert resumed.facts()["since"] == {}


def _facts_of_old_record() -> dict[str, Any]:
    probe = engine()
    uploads(probe, (1,))
    return {"strategy": dict.fromkeys(probe.facts()["strategy"], "vmap")}
