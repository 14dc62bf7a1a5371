"""FedDistill, FedDistill+ and FedGen: against a plain computation (plain_labels.py), by their laws,
on every engine.

The network has an output more than there are labels, and label 2 is known to client 3 alone, which
is not asked in every round.
"""

import copy
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from feddkd import InputError, functional, parse, simulate
from feddkd.data.batches import Reads
from feddkd.data.federation import SERVER
from feddkd.engines.batched.engine import Batched
from feddkd.engines.interface import Order
from feddkd.engines.pool.engine import Pool
from feddkd.engines.serial import Serial
from feddkd.method import Batch, Exchange, World
from feddkd.methods.fedgen import _draw
from feddkd.randomness import fold
from feddkd.rounds.evaluation import Evaluation, fitting_protocol
from feddkd.rounds.loop import Row, Run, choose, play
from feddkd.tensors import Groups, to
from plain_labels import Labelled, PlainFedDistill, PlainFedGen
from small import Pair, distance, federation, run

SIZES, LABELS, SEED = (10, 14, 22, 18), ((0, 1), (1,), (0, 1), (0, 1, 2)), 22
OUTPUTS, HIDDEN = 4, 6
LOCAL = "epochs=2, batch_size=4, lr=0.05"
GENERATOR = (
    "generated=5, noise=4, hidden=7, generator_steps=6, generator_batch=8, generator_lr=0.001"
)
DKD = {"steps": 2, "batch_size": 5, "lr": 0.3}
DKD_TEXT = "dkd(steps=2, batch_size=5, lr=0.3)"


def clients(seed: int = 0) -> list[Pair]:
    draw = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(n, 1, 4, 4, generator=draw, dtype=torch.float64) + k,
            torch.tensor(own)[torch.randint(0, len(own), (n,), generator=draw)],
        )
        for k, (n, own) in enumerate(zip(SIZES, LABELS, strict=True))
    ]


def network(norm: bool = False) -> nn.Module:
    torch.manual_seed(1)
    first, second = ([nn.BatchNorm2d(3)], [nn.BatchNorm1d(HIDDEN)]) if norm else ([], [])
    conv, full = nn.Conv2d(1, 3, 3, padding=1, bias=not norm), nn.Linear(48, HIDDEN, bias=not norm)
    return nn.Sequential(
        conv, *first, nn.ReLU(), nn.Flatten(), full, *second, nn.Tanh(), nn.Linear(HIDDEN, OUTPUTS)
    ).double()


class End(NamedTuple):
    states: list[Groups]
    memos: dict[tuple[int, int], Groups]
    rows: list[list[Row]]
    first: list[Groups]


def played(
    text: str,
    norm: bool = False,
    engine: type[Any] = Serial,
    seeds: Sequence[int] = (SEED,),
    cohort: int = 3,
    rounds: int = 2,
    place: str = "cpu",
    **options: Any,
) -> End:
    """Some rounds from the same weights: what the server and the clients hold in the end, and what
    the server began with.
    """
    model, method, net = functional(network(norm)), parse(text), network(norm)
    worlds = [World(("method", seed), len(SIZES), 3, 0, OUTPUTS) for seed in seeds]
    params, buffers = (to(t, place, torch.float64) for t in model.split(net.state_dict()))
    starts = [method.start(model, params, buffers, world) for world in worlds]
    data = [federation(clients(seed)).to(torch.device(place)) for seed in seeds]
    host = engine(model, data, [memo for _, memo in starts], torch.float64, **options)
    runs = [Run(at, seed, starts[at][0], has_validation=False) for at, seed in enumerate(seeds)]
    try:
        evaluation = Evaluation(fitting_protocol(method, own_tests=False))
        rows = list(
            play(method, model, host, runs, cohort=cohort, last=rounds, evaluation=evaluation)
        )
        return End(
            [one.state for one in runs], dict(host.memos), rows, [state for state, _ in starts]
        )
    finally:
        host.close()


def flat(groups: Groups) -> dict[str, Tensor]:
    return {
        f"{group}.{name}": tensor
        for group, tensors in groups.items()
        for name, tensor in tensors.items()
    }


# --- against the plain computation


def is_statistic(name: str) -> bool:
    return "running" in name or "tracked" in name


def plain_distill(text: str, norm: bool, **settings: Any) -> tuple[End, PlainFedDistill]:
    base: dict[str, Any] = {"optimiser": torch.optim.SGD, "lr": 0.05, "reads": Reads(4, epochs=2)}
    plain = PlainFedDistill(network(norm), clients(SEED), SEED, **{**base, **settings})
    plain.run(rounds=3, cohort=3)
    return played(text, norm, rounds=3), plain


def assert_same_models(end: End, plain: Labelled) -> None:
    (state,) = end.states
    shared = {
        name: tensor for name, tensor in plain.net.state_dict().items() if not plain.private(name)
    }
    found = {**state["params"], **state["buffers"]}
    assert set(found) == set(shared)
    assert not shared or distance(found, shared) < 1e-10
    for k, own in plain.own.items():
        assert distance(dict(end.memos[0, k]["private"]), own) < 1e-10
    learnt = {**shared, **next(iter(plain.own.values()), {})}
    assert (
        max(
            float((learnt[name] - old).abs().max())
            for name, old in network_like(plain).items()
            if name in learnt
        )
        > 1e-3
    )


def network_like(plain: Labelled) -> dict[str, Tensor]:
    return network(any("running" in name for name in plain.net.state_dict())).state_dict()


FEDDISTILL: list[tuple[str, bool, dict[str, Any]]] = [
    (f"feddistill_plus({LOCAL})", False, {}),
    (f"feddistill_plus({LOCAL}, coefficient=3)", True, {"coefficient": 3}),
    (f"feddistill_plus({LOCAL}, leave_one_out=True)", False, {"leave_one_out": True}),
    (f"feddistill_plus({LOCAL}, counts_from='zero')", False, {"first_count": 0}),
    (
        f"feddistill_plus({LOCAL}, counts_from='zero', leave_one_out=True)",
        False,
        {"first_count": 0, "leave_one_out": True},
    ),
    (f"feddistill_plus({LOCAL}, private='statistics')", True, {"private": is_statistic}),
    (
        f"feddistill_plus({LOCAL}, momentum=0.9) | {DKD_TEXT}",
        False,
        {"optimiser": partial(torch.optim.SGD, momentum=0.9), "dkd": DKD},
    ),
    (
        f"feddistill({LOCAL}, coefficient=2)",
        False,
        {"coefficient": 2, "private": lambda name: True},
    ),
    (
        f"feddistill({LOCAL}, leave_one_out=True)",
        True,
        {"leave_one_out": True, "private": lambda name: True},
    ),
]


@pytest.mark.parametrize(("text", "norm", "settings"), FEDDISTILL)
def test_three_rounds_of_feddistill_equal_the_plain_computation(
    text: str, norm: bool, settings: dict[str, Any]
) -> None:
    end, plain = plain_distill(text, norm, **settings)
    assert_same_models(end, plain)
    logits = end.states[0]["logits"]
    for label in range(3):
        rows = [rows[label] for rows in plain.last.values() if label in rows]
        expected = torch.stack(rows).mean(0) if rows else torch.zeros(OUTPUTS, dtype=torch.float64)
        assert torch.allclose(logits["mean"][label], expected, rtol=0, atol=1e-10)
        assert int(logits["members"][label]) == len(rows)


def plain_fedgen(end: End, norm: bool, **settings: Any) -> PlainFedGen:
    layers = nn.Linear(4 + 3, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, HIDDEN)
    generator = nn.Sequential(*layers).double()
    generator.load_state_dict({**end.first[0]["generator"], **end.first[0]["generator_buffers"]})
    base = {
        "optimiser": torch.optim.SGD,
        "lr": 0.05,
        "reads": Reads(4, epochs=2),
        "generator": copy.deepcopy(generator),
    }
    base["generator_optimiser"] = partial(torch.optim.Adam, weight_decay=0.01)
    plain = PlainFedGen(network(norm), clients(SEED), SEED, **{**base, **settings})
    plain.run(rounds=3, cohort=3)
    return plain


FEDGEN: list[tuple[str, bool, dict[str, Any]]] = [
    (f"fedgen({LOCAL}, {GENERATOR})", False, {}),
    (
        f"fedgen({LOCAL}, {GENERATOR}, alpha=2, beta=5, diversity=3)",
        True,
        {"alpha": 2, "beta": 5, "diversity": 3},
    ),
    (f"fedgen({LOCAL}, {GENERATOR}, weighting='published')", False, {"published": True}),
    (f"fedgen({LOCAL}, {GENERATOR}, private='statistics')", True, {"private": is_statistic}),
    (f"fedgen({LOCAL}, {GENERATOR}, alpha=0)", False, {"alpha": 0}),
    (f"fedgen({LOCAL}, {GENERATOR}) | {DKD_TEXT}", False, {"dkd": DKD, "dkd_phase": 2}),
]


@pytest.mark.parametrize(("text", "norm", "settings"), FEDGEN)
def test_three_rounds_of_fedgen_equal_the_plain_computation(
    text: str, norm: bool, settings: dict[str, Any]
) -> None:
    end = played(text, norm, rounds=3)
    plain = plain_fedgen(end, norm, **settings)
    assert_same_models(end, plain)
    made = {**end.states[0]["generator"], **end.states[0]["generator_buffers"]}
    assert distance(made, plain.generator.state_dict()) < 1e-10
    known = end.states[0]["labels"]["known"]
    assert {label for label in range(3) if known[label]} == plain.known


def test_the_cases_tell_apart_what_they_should() -> None:
    """Client 3, who alone knows label 2, is away at first and comes later; each switch moves the
    result.
    """
    asked = [choose(SEED, t, 4, 3) for t in (1, 2, 3)]
    assert [3 in cohort for cohort in asked] == [False, True, True]
    assert any(k not in asked[1] for k in asked[2])  # a client that was not part of the last mean
    for cases in (FEDDISTILL[:1] + FEDDISTILL[2:5], FEDGEN[:1] + FEDGEN[2:3] + FEDGEN[4:5]):
        ends = [played(text, norm, rounds=3).states[0]["params"] for text, norm, _ in cases]
        pairs = [(a, b) for at, a in enumerate(ends) for b in ends[:at]]
        assert min(distance(dict(a), dict(b)) for a, b in pairs) > 1e-7


# --- laws


@pytest.mark.parametrize(
    "text", ["feddistill_plus({}, coefficient=0)", "fedgen({}, alpha=0, beta=0)"]
)
@pytest.mark.parametrize("more", ["", f" | {DKD_TEXT}"])
def test_without_their_terms_they_are_fedavg(text: str, more: str) -> None:
    data, net = clients(), network()
    # DKD draws by its place among the phases: with full batches it draws nothing
    if more and "fedgen" in text:
        more = " | dkd(steps=2, batch_size=100)"
    same = run(text.format(LOCAL) + more, data, net, cohort=3)
    assert distance(same.params, run(f"fedavg({LOCAL})" + more, data, net, cohort=3).params) < 1e-14


@pytest.mark.parametrize("text", ["feddistill_plus({}, coefficient=5)", "fedgen({})"])
def test_the_first_round_is_fedavgs_and_the_second_is_not(text: str) -> None:
    data, net = clients(), network()
    apart = [
        distance(
            run(text.format(LOCAL), data, net, rounds=t).params,
            run(f"fedavg({LOCAL})", data, net, rounds=t).params,
        )
        for t in (1, 2)
    ]
    assert apart[0] < 1e-14
    assert apart[1] > 1e-4


def test_feddistill_without_its_term_is_every_client_training_alone() -> None:
    full = "epochs=3, batch_size=100"
    end = played(f"feddistill({full}, coefficient=0)", cohort=4)
    for k, own in enumerate(clients(SEED)):
        alone = run(f"fedavg({full})", [own], network())
        assert distance(dict(end.memos[0, k]["private"]), alone.params) < 1e-12
    assert end.states[0]["params"] == {}


def test_leaving_oneself_out_a_lone_client_has_nobody_to_learn_from() -> None:
    data, net = clients()[:1], network()
    alone = run(f"feddistill_plus({LOCAL}, coefficient=5, leave_one_out=True)", data, net, rounds=3)
    assert distance(alone.params, run(f"fedavg({LOCAL})", data, net, rounds=3).params) < 1e-14
    assert (
        distance(
            alone.params,
            run(f"feddistill_plus({LOCAL}, coefficient=5)", data, net, rounds=3).params,
        )
        > 1e-4
    )


def test_the_published_slip_does_not_matter_where_all_clients_have_the_same_labels() -> None:
    alike = [clients()[3]] * 3
    texts = [
        f"fedgen({LOCAL}, {GENERATOR}, weighting='{weighting}')"
        for weighting in ("intended", "published")
    ]
    first, second = (run(text, alike, network(), rounds=3).params for text in texts)
    assert distance(first, second) < 1e-12


def test_the_generator_learns_what_the_clients_heads_recognise() -> None:
    text = f"fedgen(epochs=20, batch_size=4, lr=0.1, {GENERATOR}, alpha=0, beta=0)"
    quick = text.replace("generator_steps=6", "generator_steps=150").replace(
        "generator_lr=0.001", "generator_lr=0.02"
    )
    state = played(quick, cohort=4, rounds=1).states[0]
    y = torch.arange(3).repeat(20)
    noise = torch.rand(60, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    generator = nn.Sequential(
        nn.Linear(7, 7), nn.BatchNorm1d(7), nn.ReLU(), nn.Linear(7, HIDDEN)
    ).double()
    generator.load_state_dict({**state["generator"], **state["generator_buffers"]})
    made = generator.eval()(torch.cat([noise, nn.functional.one_hot(y, 3).double()], 1))
    logits = made @ state["params"]["5.weight"].T + state["params"]["5.bias"]
    assert (logits.argmax(1) == y).double().mean() > 0.9


def test_labels_are_drawn_evenly_from_those_marked_and_from_all_while_none_is() -> None:
    batch = Batch(torch.zeros(1), torch.zeros(1), torch.ones(1), torch.tensor(fold(("draw", 0))))
    some = _draw(batch, torch.tensor([0.0, 1.0, 0.0, 1.0, 1.0, 0.0]), 6000).y
    assert set(some.tolist()) == {1, 3, 4}
    assert (torch.bincount(some)[[1, 3, 4]] - 2000).abs().max() < 200  # standard deviation 37
    assert set(_draw(batch, torch.zeros(6), 600).y.tolist()) == set(range(6))


def test_between_rounds_the_server_holds_no_clients_heads() -> None:
    (state,) = played(f"fedgen({LOCAL}, {GENERATOR})", rounds=1).states
    of_generator = {
        "generator",
        "generator_buffers",
        "generator_first",
        "generator_second",
        "generator_count",
    }
    assert set(state) - {"start"} == {"params", "buffers", "labels", *of_generator}
    assert state["generator_count"]["count"] == 6  # Adam goes on counting in the next round
    assert played(f"fedgen({LOCAL}, {GENERATOR})").states[0]["generator_count"]["count"] == 12


# --- costs


def test_feddistill_sends_logits_and_nothing_else() -> None:
    (row,) = played("feddistill()", rounds=1).rows[-1]
    table = 3 * OUTPUTS + 3  # mean logits, and whether there are any
    assert row["bytes_up"] == 3 * 8 * table
    assert row["bytes_down"] == 3 * 8 * (table + 1)  # and the learning rate


def test_fedgen_sends_the_generator_down_and_label_counts_up() -> None:
    (row,) = played(f"fedgen({LOCAL}, {GENERATOR})", rounds=1).rows[-1]
    params = sum(p.numel() for p in network().parameters())
    # batch norm's statistics and counter too
    generator = (7 * 7 + 7) + (7 + 7) + (7 * HIDDEN + HIDDEN) + (7 + 7 + 1)
    assert row["bytes_up"] == 3 * 8 * (params + 3)
    # the labels known; lr, alpha, beta
    assert row["bytes_down"] == 3 * 8 * (params + generator + 3 + 3)
    assert row["communications"] == 1


# --- engines

ENGINES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "vmap": (Batched, {"strategy": "vmap"}),
    "traced": (Batched, {"strategy": "traced"}),
    "loop": (Batched, {"strategy": "loop"}),
    "in chunks": (Batched, {"strategy": "vmap", "lanes": 2}),
    "pool": (Pool, {"workers": 2}),
}
EVERYWHERE = [
    ("feddistill({}, leave_one_out=True)", True),
    (f"feddistill_plus({{}}, counts_from='zero') | {DKD_TEXT}", False),
    (f"fedgen({{}}, {GENERATOR}, private='statistics')", True),
    (f"fedgen({{}}, {GENERATOR}, weighting='published') | {DKD_TEXT}", False),
]
NAMES = ["feddistill", "feddistill_plus", "fedgen", "published"]
on_serial = lru_cache(played)


@pytest.mark.parametrize(
    ("way", "text", "norm"),
    # tracing takes seconds for each number of lanes and size of batch: once for each algorithm is
    # enough
    [
        (way, text, norm)
        for way in ENGINES
        for text, norm in EVERYWHERE
        if way != "traced" or "dkd" not in text
    ],
)
def test_several_seeds_on_every_engine_are_serials(way: str, text: str, norm: bool) -> None:
    engine, options = ENGINES[way]
    text = text.format("steps=2, batch_size=4" if way == "traced" else "epochs=1, batch_size=8")
    expected = on_serial(text, norm, seeds=(0, 1, SEED), rounds=3)
    found = played(text, norm, engine, seeds=(0, 1, SEED), rounds=3, **options)
    for before, after in zip(expected.states, found.states, strict=True):
        assert distance(flat(before), flat(after)) < 1e-12
    for whose, memo in expected.memos.items():
        kept = {group: memo[group] for group in memo if memo[group]}
        assert (
            not kept
            or distance(flat(kept), flat({group: found.memos[whose][group] for group in kept}))
            < 1e-12
        )
    for one, other in zip(expected.rows[-1], found.rows[-1], strict=True):
        for key in one:
            assert other[key] == pytest.approx(one[key], abs=1e-10), key


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore")  # compilers give warnings
@pytest.mark.parametrize(("text", "norm"), EVERYWHERE, ids=NAMES)
@pytest.mark.parametrize("strategy", ["vmap", "graph", "streams", "fused"])
def test_several_seeds_on_cuda_are_serials_on_the_cpu(text: str, norm: bool, strategy: str) -> None:
    text = text.format("epochs=1, batch_size=8")
    expected = on_serial(text, norm, seeds=(0, 1, SEED), rounds=3)
    found = played(
        text,
        norm,
        Batched,
        seeds=(0, 1, SEED),
        rounds=3,
        place="cuda",
        strategy=strategy,
        precision="fp32",
    )
    for before, after in zip(expected.states, found.states, strict=True):
        assert (
            distance(flat(before), {name: tensor.cpu() for name, tensor in flat(after).items()})
            < 1e-12
        )


@pytest.mark.parametrize(
    ("strategy", "cohorts"),
    [("vmap", [(0, 1, 3), (1, 3), (0, 2, 3)]), ("traced", [(0, 1, 3), (1, 3)])],
)
def test_servers_that_heard_from_different_numbers_of_clients_go_through_one_exchange(
    strategy: str, cohorts: list[tuple[int, ...]]
) -> None:
    """The shapes differ if clients of one run do not answer."""
    method, model = parse(f"fedgen(epochs=1, {GENERATOR})"), functional(network())
    state, memo = method.start(
        model, *model.split(network().state_dict()), World(("method", 0), 4, 3, 0, OUTPUTS)
    )
    worlds, runs = [federation(clients(seed)) for seed in range(len(cohorts))], range(len(cohorts))
    serial = Serial(model, worlds, [memo] * len(worlds), torch.float64)
    batched = Batched(model, worlds, [memo] * len(worlds), torch.float64, strategy)
    local, generator = method.plan(1)

    def orders(
        exchange: Exchange, states: Sequence[Groups], cohorts: Sequence[tuple[int, ...]]
    ) -> list[Order]:
        rates, sends = exchange.rates(1, state["params"]["5.weight"]), exchange.phase.sends
        sent = [{**{name: own[name] for name in sends}, "rates": rates} for own in states]
        return [Order(n, sent[n], cohorts[n], (n, 1, exchange.index, 1)) for n in runs]

    answers = serial.exchange(local, orders(local, [state] * len(runs), cohorts))
    asked = orders(
        generator,
        [local.phase.server(model, state, reply.collected, {}) for reply in answers],
        [(SERVER,)] * len(runs),
    )
    for one, other in zip(
        serial.exchange(generator, asked), batched.exchange(generator, asked), strict=True
    ):
        assert distance(flat(one.collected), flat(other.collected)) < 1e-12


# --- refusals


def test_dkd_has_no_shared_model_to_teach_after_feddistill() -> None:
    with pytest.raises(
        InputError, match=r"teaches a shared model.*whole models stay with the clients"
    ):
        parse("feddistill() | dkd()")


def test_fedgen_refuses_networks_whose_head_it_cannot_feed() -> None:
    data = clients()
    bare = nn.Sequential(nn.Conv2d(1, 4, 4), nn.Flatten()).double()
    with pytest.raises(
        InputError, match=r"fedgen makes inputs for the last linear layer.*no linear layer"
    ):
        run("fedgen()", data, bare)
    run("feddistill_plus(epochs=1)", data, bare, rounds=1)  # which needs none
    with pytest.raises(InputError, match="'3', the network's head, is not its last"):
        simulate(
            model=functional(network(), head="3"), clients=data, test=data[0], method="fedgen()"
        )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fedgen(generator_batch=1)", "does not go with"),
        ("fedgen(weighting='none')", "weighting"),
        ("fedgen(alpha=-1)", "alpha"),
        ("fedgen(private='model')", "private"),
        ("feddistill(coefficient=-1)", "coefficient"),
        ("feddistill(private='norm')", "private"),
        ("feddistill_plus(counts_from=2)", "counts_from"),
    ],
)
def test_wrong_options_are_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse(text)
