"""Laws that methods, engine and rounds obey, each a sentence."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, softmax

from feddkd import ClientError, InputError, NobodyAnsweredError, dkd, fedavg, functional, parse
from feddkd.data.batches import Reads, draw
from feddkd.engines.interface import Order, Reply
from feddkd.engines.serial import Serial
from feddkd.method import NOWHERE, Batch, Exchange, Fold, Method, World
from feddkd.models.functional import Model
from feddkd.rounds.evaluation import Evaluation
from feddkd.rounds.loop import Run, choose, play
from feddkd.tensors import Groups, bytes_of
from small import clients, distance, federation, network, pooled, run

DATA, NET = clients(), network()
LOCAL = "epochs=2, batch_size=8, lr=0.1"


def test_one_full_batch_step_of_fedavg_is_gradient_descent_on_the_pooled_data() -> None:
    x, y = pooled(DATA)
    net = network()
    grads = torch.autograd.grad(cross_entropy(net(x), y), list(net.parameters()))
    expected = {
        name: (p - 0.3 * g).detach()
        for (name, p), g in zip(net.named_parameters(), grads, strict=True)
    }
    result = run("fedavg(epochs=1, batch_size=100, lr=0.3)", DATA, NET, rounds=1)
    assert distance(result.params, expected) < 1e-12


def test_distilling_from_a_single_client_changes_nothing() -> None:
    alone = run(f"fedavg({LOCAL})", DATA, NET, cohort=1, rounds=1)
    taught = run(f"fedavg({LOCAL}) | dkd(steps=5, lr=1.0)", DATA, NET, cohort=1, rounds=1)
    assert distance(alone.params, taught.params) < 1e-12


def test_clients_with_the_same_data_have_nothing_to_teach_each_other() -> None:
    same = [DATA[2]] * 3
    plain = run("fedavg(epochs=3, batch_size=100)", same, NET)
    taught = run(
        "fedavg(epochs=3, batch_size=100) | dkd(steps=5, batch_size=100, lr=1.0)", same, NET
    )
    assert distance(plain.params, taught.params) < 1e-12


def test_one_dkd_step_is_a_gradient_step_on_the_pooled_cross_entropy_with_the_teachers() -> None:
    data = clients((20, 20, 20))
    model, method = functional(NET), parse("fedavg(epochs=1, batch_size=100, lr=0.5)")
    teachers = [run(str(method), [pair], NET, rounds=1).params for pair in data]
    student = {
        name: torch.stack([w[name] for w in teachers]).mean(0).requires_grad_()
        for name in teachers[0]
    }
    x = pooled(data)[0]
    taught = torch.cat(
        [
            model(w, {}, part, mode="eval").logits
            for w, (part, _) in zip(teachers, data, strict=True)
        ]
    )
    loss = (
        -(softmax(taught, 1) * log_softmax(model(student, {}, x, mode="eval").logits, 1))
        .sum(1)
        .mean()
    )
    grads = torch.autograd.grad(loss, list(student.values()))
    expected = {
        name: (w - 0.7 * g).detach() for (name, w), g in zip(student.items(), grads, strict=True)
    }
    result = run(f"{method} | dkd(steps=1, batch_size=100, lr=0.7)", data, NET, rounds=1)
    assert distance(result.params, expected) < 1e-12


@pytest.mark.parametrize("tail", ["", " | dkd(steps=2)"])
@pytest.mark.parametrize(
    "head",
    ["fedprox(mu=0, {})", "fedprox(mu=0, form='mean', {})", "fedmax(beta=0, {})", "fedbn({})"],
)
def test_fedprox_without_mu_fedmax_without_beta_and_fedbn_without_batch_norm_are_fedavg(
    head: str, tail: str
) -> None:
    other, average = (run(text.format(LOCAL) + tail, DATA, NET) for text in (head, "fedavg({})"))
    assert distance(other.params, average.params) < 1e-12


def test_dkd_that_never_warms_up_is_not_there() -> None:
    plain = run(f"fedavg({LOCAL})", DATA, NET)
    waiting = run(f"fedavg({LOCAL}) | dkd(warmup=2)", DATA, NET)
    assert distance(plain.params, waiting.params) == 0
    assert waiting.history[-1]["communications"] == plain.history[-1]["communications"] == 2
    assert "average_test_accuracy" not in waiting.history[-1]


def test_the_order_of_clients_does_not_matter() -> None:
    text = "fedavg(epochs=2, batch_size=100) | dkd(steps=3, batch_size=100)"
    assert distance(run(text, DATA, NET).params, run(text, DATA[::-1], NET).params) < 1e-12


def test_the_average_weighs_clients_by_examples_and_distillation_weighs_them_alike() -> None:
    # the same data, counted twice
    doubled = [DATA[0], (torch.cat([DATA[1][0]] * 2), torch.cat([DATA[1][1]] * 2))]
    tripled = [DATA[0], DATA[1], DATA[1]]  # the same client, three of them
    local = "fedavg(epochs=1, batch_size=100, lr=0.5)"
    assert (
        distance(
            run(local, doubled, NET, rounds=1).params, run(local, tripled, NET, rounds=1).params
        )
        < 1e-12
    )
    taught = [
        run(f"{local} | dkd(steps=1, batch_size=100, lr=1.0)", data, NET, rounds=1).params
        for data in (doubled, tripled)
    ]
    assert distance(*taught) > 1e-3  # in DKD a client counts once, however much it holds


def test_fedprox_pulls_the_harder_the_larger_mu() -> None:
    start = {name: tensor.detach() for name, tensor in NET.named_parameters()}
    moved = [
        distance(run(f"fedprox(mu={mu}, {LOCAL})", DATA, NET, rounds=1).params, start)
        for mu in (0, 1, 5)
    ]
    assert moved[0] > moved[1] > moved[2]


def test_fedmax_raises_the_entropy_of_the_activations() -> None:
    x, _ = pooled(DATA)

    def entropy(text: str) -> float:
        model = functional(NET)
        log_p = log_softmax(
            model(run(text, DATA, NET, rounds=4).params, {}, x, mode="eval").features, 1
        )
        return -(log_p.exp() * log_p).sum(1).mean().item()

    assert entropy(f"fedmax(beta=50, {LOCAL})") > entropy(f"fedavg({LOCAL})") + 0.01


def test_the_same_seed_gives_the_same_bits_and_another_seed_other_ones() -> None:
    text = f"fedavg({LOCAL}) | dkd(steps=2, batch_size=4)"
    first, again, other = (run(text, DATA, NET, seed=seed).params for seed in (1, 1, 2))
    assert distance(first, again) == 0
    assert distance(first, other) > 0


def test_methods_read_the_same_batches_and_cohorts_for_the_same_seed() -> None:
    """So that two methods are compared on the same luck: in round one DKD's average is FedAvg's
    result.
    """
    average = run(f"fedavg({LOCAL})", DATA, NET, cohort=2)
    taught = run(f"fedavg({LOCAL}) | dkd(steps=2)", DATA, NET, cohort=2)
    assert [row["clients"] for row in average.history] == [row["clients"] for row in taught.history]
    assert taught.history[0]["average_test_loss"] == average.history[0]["test_loss"]


# --- costs


def test_costs_are_those_of_the_papers_tables() -> None:
    """FEMNIST: 3,120 images a client, B = 64, E = 5: 49 batches an epoch, the last of 48 kept; J =
    10.
    """
    reads = Reads(64, epochs=5)
    assert reads.count(3120) == 245
    assert len(draw(reads, 3120, (0,))[48]) == 48
    rows = run(
        "fedavg(epochs=5, batch_size=8) | dkd(steps=10, batch_size=8)", DATA, NET, rounds=2
    ).history
    steps = sum(5 * -(-n // 8) for n in (12, 20, 33)) / 3 + 10
    assert [row["communications"] for row in rows] == [11, 22]
    assert [row["local_steps"] for row in rows] == pytest.approx([steps, 2 * steps])


def test_bytes_are_those_of_the_tensors_that_travel() -> None:
    params = sum(p.numel() for p in NET.parameters())
    row = run("fedavg() | dkd(steps=3)", DATA, NET, rounds=1, cohort=2).history[0]
    # two clients, one model and three gradients, float64
    assert row["bytes_up"] == 2 * 4 * 8 * params
    assert row["bytes_down"] == 2 * 4 * 8 * (params + 1)  # the weights, and the learning rate


def test_private_tensors_do_not_travel() -> None:
    net = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    shared = sum(p.numel() for name, p in net.named_parameters() if not name.startswith("1."))
    row = run("fedbn(batch_size=8, drop_last=True)", DATA, net, rounds=1).history[0]
    assert row["bytes_up"] == 3 * 8 * shared


# --- exchanges


@dataclass
class Watched(Serial):
    """A serial engine that notes its orders; some clients do not answer some phases."""

    silent: dict[str, set[int]] = field(default_factory=dict)
    seen: list[tuple[str, Order, Exchange]] = field(default_factory=list)

    def exchange(self, exchange: Exchange, orders: Sequence[Order]) -> list[Reply]:
        self.seen += [(exchange.phase.name, order, exchange) for order in orders]
        gone = self.silent.get(exchange.phase.name, set())
        present = [
            order._replace(cohort=tuple(k for k in order.cohort if k not in gone))
            for order in orders
        ]
        return [
            (
                Reply((), {})
                if not order.cohort
                else super(Watched, self).exchange(exchange, [order])[0]
            )
            for order in present
        ]


def watched(
    method: Method, rounds: int = 1, cohort: int = 3, world: World = NOWHERE, **options: Any
) -> tuple[Watched, Run]:
    model = functional(NET)
    state, memo = method.start(model, *model.split(NET.state_dict()), world)
    engine = Watched(model, [federation(DATA)], [memo], torch.float64, **options)
    one = Run(0, 3, state, has_validation=False)
    for _ in play(
        method, model, engine, [one], cohort=cohort, last=rounds, evaluation=Evaluation()
    ):
        pass
    return engine, one


def test_a_round_of_feddkd_is_one_local_exchange_and_j_distillations() -> None:
    engine, _ = watched(fedavg() | dkd(steps=3), rounds=2)
    names = [name for name, _, _ in engine.seen if not name.startswith("evaluate")]
    assert names == ["local", "distil", "distil", "distil"] * 2


def test_the_teachers_never_leave_their_clients_and_are_forgotten_after_the_round() -> None:
    engine, _ = watched(fedavg() | dkd(steps=2))
    sent = [set(order.sent) for name, order, _ in engine.seen if name == "distil"]
    assert sent == [{"params", "buffers", "rates"}] * 2
    assert all(set(memo) <= {"private"} for memo in engine.memos.values())


def test_plain_fedavg_leaves_no_model_behind_at_the_clients() -> None:
    engine, _ = watched(fedavg())
    assert all(not memo for memo in engine.memos.values())


def test_later_exchanges_go_only_to_the_clients_that_answered() -> None:
    engine, _ = watched(fedavg() | dkd(steps=2), silent={"local": {1}})
    assert [order.cohort for name, order, _ in engine.seen if name == "distil"] == [(0, 2), (0, 2)]


def test_an_exchange_without_a_client_that_fell_silent_equals_one_without_that_client() -> None:
    _, partial = watched(
        parse("fedavg(batch_size=100) | dkd(steps=2, batch_size=100)"), silent={"local": {1}}
    )
    smaller = run(
        "fedavg(batch_size=100) | dkd(steps=2, batch_size=100)", [DATA[0], DATA[2]], NET, rounds=1
    )
    assert distance(dict(partial.state["params"]), smaller.params) < 1e-12


@pytest.mark.parametrize("phase", ["local", "distil"])
def test_nobody_answering_is_an_error_that_names_the_phase(phase: str) -> None:
    with pytest.raises(NobodyAnsweredError, match=f"answered phase '{phase}', step 1, in round 1"):
        watched(fedavg() | dkd(), silent={phase: {0, 1, 2}})


def test_a_failing_client_is_reported_with_phase_client_and_key() -> None:
    def fails(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        raise ValueError("no power")

    (phase,) = fedavg().phases
    assert isinstance(phase.client, Fold)
    broken = replace(fedavg(), phases=(replace(phase, client=replace(phase.client, step=fails)),))
    with pytest.raises(
        ClientError, match=r"client 0 failed in phase 'local', key \(3, 1, 0, 1, 0\): no power"
    ):
        watched(broken)


def test_runs_in_lock_step_are_the_runs_one_by_one() -> None:
    method, model = fedavg(batch_size=8) | dkd(steps=2, batch_size=8), functional(NET)
    worlds = [federation(clients(seed=seed)) for seed in (0, 1)]
    starts = [method.start(model, *model.initial(("init", seed))) for seed in (0, 1)]

    def end(which: Sequence[int]) -> list[Tensor]:
        engine = Serial(
            model, [worlds[i] for i in which], [starts[i][1] for i in which], torch.float64
        )
        runs = [Run(at, i, starts[i][0], has_validation=False) for at, i in enumerate(which)]
        for _ in play(method, model, engine, runs, cohort=2, last=2, evaluation=Evaluation()):
            pass
        return [one.state["params"]["0.weight"] for one in runs]

    together, alone = end([0, 1]), [*end([0]), *end([1])]
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


def test_a_cohort_is_drawn_without_replacement_and_everybody_gets_a_turn() -> None:
    drawn = [choose(0, t, 20, 5) for t in range(1, 200)]
    assert all(len(set(cohort)) == 5 and cohort == tuple(sorted(cohort)) for cohort in drawn)
    turns = torch.bincount(torch.tensor(drawn).flatten(), minlength=20)
    assert turns.min() > 25  # 50 expected, standard deviation 6
    assert turns.max() < 75


# --- values


def test_dkd_alone_is_refused_with_the_reason() -> None:
    with pytest.raises(InputError, match=r"'distil' needs 'model'.*as in fedavg\(\) \| dkd\(\)"):
        run("dkd()", DATA, NET)
    with pytest.raises(InputError, match="'distil' needs"):
        dkd() | fedavg()


def test_methods_are_values_equal_when_they_mean_the_same() -> None:
    assert fedavg(lr=0.1) == fedavg() != fedavg(lr=0.2)
    assert parse("fedavg( lr = .1 )|dkd") == fedavg() | dkd()
    assert len({fedavg(), fedavg(lr=0.1), parse("fedavg()")}) == 1
    assert bytes_of({"a": {"x": torch.zeros(3)}}) == 12


@pytest.mark.parametrize("private", ["norm", "statistics"])
def test_fedavg_with_batch_norm_at_home_is_fedbn(private: str) -> None:
    net = nn.Sequential(
        nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, 3)
    ).double()
    data, rest = clients((12, 20, 34)), "dkd(steps=2, batch_size=8, student='batch')"
    whole = run(f"fedbn({LOCAL}, private={private!r}) | {rest}", data, net)
    pieces = [f"fedavg({LOCAL})", f"local_bn(private={private!r})", rest]
    for order in (pieces, [pieces[0], pieces[2], pieces[1]]):
        assert distance(whole.params, run(" | ".join(order), data, net).params) == 0
    assert set(run(f"fedprox({LOCAL}) | local_bn()", data, net).params) == {
        "0.weight",
        "3.weight",
        "3.bias",
    }
