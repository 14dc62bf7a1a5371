"""DKD's controls, other teachers than the client's own model: against plain PyTorch and by laws."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, softmax

from feddkd import InputError, parse
from feddkd.engines.serial import Serial
from feddkd.method import Method
from feddkd.methods import teachers
from feddkd.testing import rehearse
from plain_comparison import compare_rounds
from plain_drift import Hooked
from small import clients, distance, network, run
from test_engines import apart
from test_engines import run as engine_run
from test_methods_drift import ENGINES
from test_reference import DKD, DKD_TEXT, LOCAL

DATA, NET = clients(), network()
SMALL = "fedavg(epochs=1, batch_size=8, lr=0.1)"


@dataclass
class Labels(Hooked):
    def taught(self, teachers: Mapping[int, nn.Module], k: int, j: int, indices: Any) -> Tensor:
        return one_hot(self.clients[k][1][indices], 3).double()


@dataclass
class Shuffled(Hooked):
    """Each client is taught by the one before it in the cohort."""

    def taught(self, teachers: Mapping[int, nn.Module], k: int, j: int, indices: Any) -> Tensor:
        active = list(teachers)
        other = active[active.index(k) - 1]
        return super().taught({k: teachers[other]}, k, j, indices)


@dataclass
class Average(Hooked):
    def taught(self, teachers: Mapping[int, nn.Module], k: int, j: int, indices: Any) -> Tensor:
        if j == 1:
            self.average_of_round = getattr(self, "average_of_round", {})
            self.average_of_round[k] = self.client_view(k)
        x = self.clients[k][0][indices]
        return softmax(self.average_of_round[k].eval()(x), dim=1)


class Descending:
    """Stands for a random generator: the cycle through the cohort is the cohort backwards."""

    def permutation(self, n: int) -> Any:
        return torch.arange(n).flip(0).numpy()


@pytest.mark.parametrize(
    ("teacher", "make", "phase", "kind", "more"),
    [
        ("labels", Labels, 1, "plain", {}),
        ("labels", Labels, 1, "bn", {"student": "batch"}),
        ("shuffled", Shuffled, 3, "plain", {}),
        ("shuffled", Shuffled, 3, "bn", {}),
        ("average", Average, 2, "plain", {}),
        ("average", Average, 2, "bn", {"student": "batch"}),
    ],
)
def test_two_rounds_equal_the_plain_computation(
    teacher: str,
    make: type[Hooked],
    phase: int,
    kind: str,
    more: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(teachers, "generator", lambda key: Descending())
    options = "".join(f", {name}={value!r}" for name, value in {"teacher": teacher, **more}.items())
    text = f"fedavg({LOCAL}, lr=0.05) | " + DKD_TEXT.format(options)
    settings = {"dkd": {**DKD, **more}, "dkd_phase": phase}
    compare_rounds(text, make, settings, kind)


# --- laws


def test_the_average_as_teacher_changes_nothing() -> None:
    """Student and teacher agree: with this control every other effect of DKD is left out."""
    found, expected = (
        run(SMALL + tail, DATA, NET, rounds=3).params
        for tail in (" | dkd(steps=3, teacher='average')", "")
    )
    assert distance(found, expected) < 1e-12


def test_the_average_as_teacher_of_a_student_that_normalises_by_the_batch_moves_it() -> None:
    texts = [f"{SMALL} | dkd(steps=2, teacher='average', student='batch')", SMALL]
    states = [rehearse(text, network="batch norm").states[0]["params"] for text in texts]
    assert distance(*map(dict, states)) > 1e-4


def test_labels_in_the_teachers_place_need_no_teacher() -> None:
    assert parse("dkd(teacher='labels')").phases[0].needs == frozenset()


def test_nobody_teaches_itself_and_the_order_changes_with_the_round() -> None:
    seen: list[tuple[int, ...]] = []
    method = parse(f"{SMALL} | dkd(steps=1, teacher='shuffled')")
    draw = method.phases[2].parts
    assert draw is not None

    def spied(state: Any, cohort: Any, step: int) -> Any:
        found = draw(state, cohort, step)
        seen.append(tuple(state[teachers.DRAWS]["rows"].tolist()))
        return found

    phases = [*method.phases]
    phases[2] = replace(phases[2], parts=spied)
    rehearse(Method(tuple(phases)), rounds=6, cohort=4)
    assert len(set(seen)) > 1
    for rows in seen:
        assert sorted(rows) == [0, 1, 2, 3]
        assert all(row != teacher for row, teacher in enumerate(rows))


def test_a_single_client_is_its_own_teacher() -> None:
    ends = [
        run(f"{SMALL} | dkd(steps=2, batch_size=100, teacher={teacher!r})", DATA, NET, cohort=1)
        for teacher in ("eval", "shuffled")
    ]
    assert distance(ends[0].params, ends[1].params) < 1e-12


P = sum(parameter.numel() for parameter in NET.parameters())


@pytest.mark.parametrize(
    ("teacher", "up", "down", "communications"),
    [("eval", 0, 0, 0), ("labels", 0, 0, 0), ("shuffled", P, P, 2), ("average", 0, P, 1)],
)
def test_models_that_are_sent_for_a_control_are_counted(
    teacher: str, up: int, down: int, communications: int
) -> None:
    row = run(f"{SMALL} | dkd(steps=2, teacher={teacher!r})", DATA, NET, rounds=1).history[0]
    clients, steps = 3, 2
    assert row["communications"] == 1 + steps + communications
    assert row["bytes_up"] == clients * 8 * ((1 + steps) * P + up)
    assert row["bytes_down"] == clients * 8 * ((1 + steps) * (P + 1) + down)
    assert row["local_steps"] == sum(-(-len(y) // 8) for _, y in DATA) / clients + steps


def test_old_texts_keep_their_canonical_text() -> None:
    text = "fedavg() | dkd(teacher='batch')"
    assert parse(text).canonical == parse("fedavg() | dkd(teacher = 'batch')").canonical
    assert str(parse("dkd()")) == "dkd()"


@pytest.mark.parametrize("option", ["temperature=2.0", "divergence='squared'"])
def test_labels_have_no_temperature_and_no_other_divergence(option: str) -> None:
    with pytest.raises(InputError, match="teacher='labels'"):
        parse(f"dkd(teacher='labels', {option})")


@pytest.mark.parametrize("teacher", ["labels", "shuffled", "average"])
def test_every_engine_agrees_with_serial_over_several_seeds_at_once(teacher: str) -> None:
    text = f"fedavg(epochs=1, batch_size=8) | dkd(steps=2, batch_size=14, teacher={teacher!r})"
    for norm in (False, True):
        expected, _ = engine_run(Serial, text, norm, seeds=(0, 1))
        for name, (engine, options, nets) in ENGINES.items():
            if norm in nets and name != "traced":
                found, _ = engine_run(engine, text, norm, seeds=(0, 1), **options)
                assert apart(expected, found) < 1e-12, name
