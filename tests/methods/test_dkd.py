"""DKD's switches against plain PyTorch, and the rule that knows when to hold it back."""

import copy
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div, log_softmax, softmax

from feddkd import InputError, parse, simulate
from feddkd.data.batches import Reads, draw, spared
from feddkd.engines.batched.engine import Batched
from feddkd.engines.serial import Serial
from feddkd.rounds.loop import choose
from plain import Plain
from small import clients, distance, network, pooled, run
from test_engines import apart
from test_engines import run as run_on

DATA, NET = clients((12, 20, 33, 9)), network()
LOCAL = "fedavg(epochs=2, batch_size=8, lr=0.1)"


def divergence(kind: str, temperature: float, taught: Tensor, student: Tensor) -> Tensor:
    """A mean over the batch, by torch's own functions."""
    if kind == "squared":
        return (taught - student).square().sum(1).mean()
    p, q = log_softmax(taught / temperature, 1), log_softmax(student / temperature, 1)
    first, second = (q, p) if kind == "kl" else (p, q)
    return temperature**2 * kl_div(first, second, reduction="batchmean", log_target=True)


@dataclass
class Switched(Plain):
    """Plain DKD, client after client, with the given weights, divergence and momentum."""

    options: dict[str, Any] = field(default_factory=dict)
    velocity: dict[str, Tensor] = field(default_factory=dict)

    def gradient(self, student: nn.Module, teacher: nn.Module, x: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            taught = teacher(x)
        loss = divergence(
            self.options.get("divergence", "kl"),
            self.options.get("temperature", 1.0),
            taught,
            student(x),
        )
        names = [name for name, _ in student.named_parameters()]
        return dict(zip(names, torch.autograd.grad(loss, list(student.parameters())), strict=True))

    def distil(self, teachers: dict[int, nn.Module], t: int, j: int) -> None:
        many, lr = self.options.get("local_steps", 1), self.options["lr"]
        by_examples = self.options.get("weights") == "examples"
        sizes = {k: len(self.clients[k][1]) if by_examples else 1 for k in teachers}
        ways = {}
        for k, teacher in teachers.items():
            own = copy.deepcopy(self.net)
            for at in draw(
                Reads(self.options["batch_size"], steps=many),
                len(self.clients[k][1]),
                (self.seed, t, 1, j, k),
            ):
                slope = self.gradient(own, teacher, self.clients[k][0][at])
                own.load_state_dict(
                    {name: p - lr * slope[name] for name, p in own.named_parameters()}
                )
            ways[k] = {
                name: (p - own.state_dict()[name]) / lr for name, p in self.net.named_parameters()
            }
        state = {}
        for name, p in self.net.named_parameters():
            mean = sum(sizes[k] * way[name] for k, way in ways.items()) / sum(sizes.values())
            before = self.velocity[name] if j > 1 else torch.zeros_like(p)
            self.velocity[name] = mean + self.options.get("momentum", 0.0) * before
            state[name] = p - lr * self.velocity[name]
        self.net.load_state_dict(state)


@pytest.mark.parametrize(
    "options",
    [
        {"divergence": "reverse_kl"},
        {"divergence": "squared"},
        {"temperature": 3.0},
        {"divergence": "reverse_kl", "temperature": 0.5},
        {"divergence": "squared", "temperature": 2.0},
        {"momentum": 0.7},
        {"weights": "examples"},
        {"local_steps": 3},
        {"local_steps": 2, "momentum": 0.5, "weights": "examples", "divergence": "squared"},
    ],
    ids=str,
)
def test_every_switch_equals_the_plain_computation(options: dict[str, Any]) -> None:
    options = {"steps": 3, "batch_size": 7, "lr": 0.05, **options}
    plain = Switched(
        copy.deepcopy(NET),
        DATA,
        3,
        Reads(8, epochs=2),
        torch.optim.SGD,
        0.1,
        dkd={"steps": 3},
        options=options,
    )
    plain.run(rounds=2, cohort=3)
    text = ", ".join(f"{key}={value!r}" for key, value in options.items())
    expected = {name: p.detach() for name, p in plain.net.named_parameters()}
    for engine in ("serial", "batched"):
        result = run(f"{LOCAL} | dkd({text})", DATA, NET, cohort=3, engine=engine)
        assert distance(result.params, expected) < 1e-10
    assert (
        distance(
            run(f"{LOCAL} | dkd(steps=3, batch_size=7, lr=0.05)", DATA, NET, cohort=3).params,
            expected,
        )
        > 1e-6
    )


def test_teachers_may_drop_out_too() -> None:
    net = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.Linear(7, 3)).double()
    ends = [
        run(f"{LOCAL} | dkd(steps=2, teacher={mode!r})", DATA, net, rounds=1).params
        for mode in ("eval", "train", "train")
    ]
    assert distance(ends[1], ends[2]) == 0
    assert distance(ends[0], ends[1]) > 1e-6


# --- steps='auto'

AUTO = "dkd(steps='auto', limit=4, batch_size=7, spare=5, lr={lr})"


def probe(net: nn.Module, teachers: dict[int, nn.Module], t: int) -> float:
    """The mean over clients of the cross-entropy with their teachers on the examples they set
    aside.
    """
    total = 0.0
    for k, teacher in teachers.items():
        x = DATA[k][0][spared(Reads(7, steps=1, spare=5), len(DATA[k][1]), (3, t, 1, 1, k))]
        with torch.no_grad():
            total += float(-(softmax(teacher(x), 1) * log_softmax(net(x), 1)).sum(1).mean()) / len(
                teachers
            )
    return total


@dataclass
class Careful(Switched):
    """Goes on while the probe falls; else back to the best so far."""

    exchanges: int = 0

    def run(self, rounds: int, cohort: int) -> None:
        for t in range(1, rounds + 1):
            teachers = {k: self.train_locally(k, t) for k in self.active(t, cohort)}
            self.average(teachers)
            self.exchanges += 1
            best, lowest = copy.deepcopy(self.net), float("inf")
            for j in range(1, 6):
                self.exchanges += 1
                found = probe(self.net, teachers, t)
                if not found < lowest:
                    break
                best, lowest = copy.deepcopy(self.net), found
                if j < 5:
                    self.distil(teachers, t, j)
            self.net = best

    def active(self, t: int, cohort: int) -> tuple[int, ...]:
        return choose(self.seed, t, len(self.clients), cohort)

    def distil(self, teachers: dict[int, nn.Module], t: int, j: int) -> None:
        slopes = []
        for k, teacher in teachers.items():
            (at,) = draw(
                Reads(7, steps=1, spare=5), len(self.clients[k][1]), (self.seed, t, 1, j, k)
            )
            slopes.append(self.gradient(self.net, teacher, self.clients[k][0][at]))
        means = {name: torch.stack([slope[name] for slope in slopes]).mean(0) for name in slopes[0]}
        self.net.load_state_dict(
            {name: p - self.options["lr"] * means[name] for name, p in self.net.named_parameters()}
        )


@pytest.mark.parametrize("lr", [0.05, 0.6, 3.0, 100.0])
@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_auto_goes_on_while_the_divergence_falls_and_keeps_the_best(lr: float, engine: str) -> None:
    plain = Careful(
        copy.deepcopy(NET), DATA, 3, Reads(8, epochs=2), torch.optim.SGD, 0.1, options={"lr": lr}
    )
    plain.run(rounds=2, cohort=3)
    result = run(f"{LOCAL} | {AUTO.format(lr=lr)}", DATA, NET, cohort=3, engine=engine)
    assert (
        distance(result.params, {name: p.detach() for name, p in plain.net.named_parameters()})
        < 1e-10
    )
    assert result.history[-1]["communications"] == plain.exchanges


def test_auto_keeps_the_average_where_every_step_hurts() -> None:
    average = run(LOCAL, DATA, NET, rounds=1)
    kept = run(f"{LOCAL} | {AUTO.format(lr=1e4)}", DATA, NET, rounds=1)
    assert distance(average.params, kept.params) == 0
    assert kept.history[0]["communications"] == 1 + 2
    assert kept.history[0]["test_accuracy"] == kept.history[0]["average_test_accuracy"]


def test_auto_uses_all_its_steps_while_they_help_and_one_exchange_more() -> None:
    assert (
        run(f"{LOCAL} | {AUTO.format(lr=1e-3)}", DATA, NET, rounds=1).history[0]["communications"]
        == 1 + 4 + 1
    )


def test_runs_side_by_side_stop_each_in_its_own_time() -> None:
    text = (
        "fedavg(epochs=1, batch_size=8) | dkd(steps='auto', limit=6, batch_size=6, spare=4, lr=1.5)"
    )
    together, rows = run_on(Batched, text, False, seeds=(0, 1, 2), strategy="vmap")
    alone = [run_on(Serial, text, False, seeds=(seed,)) for seed in (0, 1, 2)]
    assert len({row["communications"] for row in rows}) > 1, (
        "else nothing was shown: choose another rate"
    )
    assert [row["communications"] for row in rows] == [own[0]["communications"] for _, own in alone]
    assert apart(together, [states[0] for states, _ in alone]) < 1e-12


def test_options_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(InputError, match="do not go"):
        parse("fedavg() | dkd(steps='auto', local_steps=2)")
    with pytest.raises(InputError, match="steps must be a whole number or 'auto'"):
        parse("dkd(steps='some')")


def test_a_probe_costs_its_number_and_nothing_else() -> None:
    plain, auto = (
        simulate(
            model=NET, clients=DATA, test=pooled(DATA), method=f"{LOCAL} | dkd({steps})", rounds=1
        ).history[0]
        for steps in ("steps=1", "steps='auto', limit=1, lr=0.0001")
    )
    weights, number = sum(p.numel() for p in NET.parameters()) * 8, 8
    assert auto["bytes_up"] - plain["bytes_up"] == len(DATA) * (weights + 2 * number)
