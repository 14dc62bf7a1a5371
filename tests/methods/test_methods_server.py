"""Optimisers at the server, and methods that use public data:

against plain PyTorch, by their laws, on every engine.
"""

import copy
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, log_softmax, softmax

import plain as plain_module
import test_engines
from feddkd import InputError, functional, parse, simulate
from feddkd.data.batches import Reads, draw
from feddkd.data.examples import Examples
from feddkd.data.federation import SERVER, Federation, assemble
from feddkd.data.transforms import transform
from feddkd.engines.batched.engine import Batched
from feddkd.engines.pool.engine import Pool
from feddkd.engines.serial import Serial
from feddkd.method import Method, Private, World
from feddkd.methods import METHODS
from feddkd.rounds.evaluation import Evaluation, Protocol
from feddkd.rounds.loop import Run, choose, play
from feddkd.spec.schedules import Repeat
from plain import Plain
from small import distance
from test_reference import clients, network

SGD, LOCAL = torch.optim.SGD, "epochs=2, batch_size=4, lr=0.05"
DKD = {"steps": 2, "batch_size": 5, "lr": 0.3}
DKD_TEXT = "dkd(steps=2, batch_size=5, lr=0.3)"
SEED = 5


def ours(text: str, start: nn.Module, **options: Any) -> dict[str, Tensor]:
    """Two rounds of our own, three clients of four in each."""
    data = clients()
    settings = {
        "rounds": 2,
        "cohort": 3,
        "seed": SEED,
        "initial": start.state_dict(),
        "dtype": torch.float64,
        **options,
    }
    return simulate(model=start, clients=data, test=data[0], method=text, **settings).params


# --- optimisers at the server

# (memory, gradient) -> direction, from zeros on
Rule = Callable[[dict[str, Tensor], Tensor], Tensor]


def momentum(beta: float, nesterov: bool = False) -> Rule:
    def rule(memory: dict[str, Tensor], g: Tensor) -> Tensor:
        memory["v"] = beta * memory.get("v", torch.zeros_like(g)) + g
        return g + beta * memory["v"] if nesterov else memory["v"]

    return rule


def adaptive(
    kind: str, beta1: float, tau: float, beta2: float = 0.0, initial: float | None = None
) -> Rule:
    """Algorithm 2 of the paper, an entry at a time where Yogi has to look at signs."""

    def rule(memory: dict[str, Tensor], g: Tensor) -> Tensor:
        v = memory.get("v", torch.full_like(g, tau * tau if initial is None else initial))
        memory["m"] = beta1 * memory.get("m", torch.zeros_like(g)) + (1 - beta1) * g
        if kind == "adagrad":
            v = v + g * g
        elif kind == "adam":
            v = beta2 * v + (1 - beta2) * g * g
        else:
            pairs = zip(v.flatten().tolist(), g.flatten().tolist(), strict=True)
            moved = [a - (1 - beta2) * b * b * ((a > b * b) - (a < b * b)) for a, b in pairs]
            v = torch.tensor(moved, dtype=g.dtype).reshape(g.shape)
        memory["v"] = v
        return memory["m"] / (v**0.5 + tau)

    return rule


@dataclass
class PlainServer(Plain):
    """The plain computation with an optimiser at the server after everything else."""

    rule: Rule = field(kw_only=True)
    server_lr: float = 1.0
    memories: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def run(self, rounds: int, cohort: int) -> None:
        for t in range(1, rounds + 1):
            start = copy.deepcopy(self.net)
            teachers = {
                k: self.train_locally(k, t) for k in choose(self.seed, t, len(self.clients), cohort)
            }
            self.average(teachers)
            for j in range(1, self.dkd["steps"] + 1 if self.dkd else 1):
                self.distil(teachers, t, j)
            self.move_from(start)

    def move_from(self, start: nn.Module) -> None:
        with torch.no_grad():
            for (name, now), before in zip(
                self.net.named_parameters(), start.parameters(), strict=True
            ):
                now.copy_(
                    before
                    - self.server_lr * self.rule(self.memories.setdefault(name, {}), before - now)
                )


def torch_adam(**options: Any) -> Rule:
    """torch.optim.Adam itself, one for each tensor."""

    def rule(memory: dict[str, Any], g: Tensor) -> Tensor:
        if "w" not in memory:
            memory["w"] = torch.zeros_like(g).requires_grad_()
            memory["optimiser"] = torch.optim.Adam([memory["w"]], lr=1.0, **options)
        memory["w"].data.zero_()
        memory["w"].grad = g.detach().clone()
        memory["optimiser"].step()
        moved: Tensor = memory["w"].detach().clone()
        return -moved

    return rule


SERVERS: list[tuple[str, Rule, float]] = [
    ("server_momentum(lr=0.7, momentum=0.6)", momentum(0.6), 0.7),
    ("server_momentum(lr=0.7, momentum=0.6, nesterov=True)", momentum(0.6, nesterov=True), 0.7),
    (
        "server_adam(lr=0.05, beta1=0.8, beta2=0.9, tau=0.01)",
        adaptive("adam", 0.8, 0.01, 0.9),
        0.05,
    ),
    ("server_adam(lr=0.05, initial=0)", adaptive("adam", 0.9, 1e-3, 0.99, initial=0.0), 0.05),
    (
        "server_adam(lr=0.05, tau=0.01, bias_correction=True)",
        torch_adam(betas=(0.9, 0.99), eps=0.01),
        0.05,
    ),
    (
        "server_yogi(lr=0.05, beta1=0.8, beta2=0.9, tau=0.01)",
        adaptive("yogi", 0.8, 0.01, 0.9),
        0.05,
    ),
    ("server_adagrad(lr=0.05, tau=0.01)", adaptive("adagrad", 0.0, 0.01), 0.05),
    ("server_adagrad(lr=0.05, beta1=0.5)", adaptive("adagrad", 0.5, 1e-3), 0.05),
]


@pytest.mark.parametrize(("piece", "rule", "lr"), SERVERS, ids=[piece for piece, _, _ in SERVERS])
@pytest.mark.parametrize("kind", ["plain", "bn"])
@pytest.mark.parametrize("taught", [False, True], ids=["alone", "after DKD"])
def test_a_round_moved_by_an_optimiser_equals_the_plain_computation(
    piece: str, rule: Rule, lr: float, kind: str, taught: bool
) -> None:
    start = network(kind)
    plain = PlainServer(
        copy.deepcopy(start),
        clients(),
        SEED,
        Reads(4, epochs=2),
        SGD,
        0.05,
        dkd=DKD if taught else None,
        rule=rule,
        server_lr=lr,
    )
    plain.run(rounds=2, cohort=3)
    text = f"fedavg({LOCAL}) | {DKD_TEXT} | {piece}" if taught else f"fedavg({LOCAL}) | {piece}"
    assert distance(ours(text, start), dict(plain.net.state_dict())) < 1e-10
    assert distance(ours(f"fedavg({LOCAL})", start), dict(plain.net.state_dict())) > 1e-4


NAMES = [
    ("fedavgm({}, server_lr=0.7, server_momentum=0.6)", "server_momentum(lr=0.7, momentum=0.6)"),
    ("fedavgm({})", "server_momentum()"),
    (
        "fedadam({}, server_lr=0.03, server_beta1=0.8, tau=0.01)",
        "server_adam(lr=0.03, beta1=0.8, tau=0.01)",
    ),
    ("fedadam({}, bias_correction=True)", "server_adam(bias_correction=True)"),
    ("fedyogi({}, server_lr_decay=0.5)", "server_yogi(lr_decay=0.5)"),
    ("fedadagrad({}, initial=0.1)", "server_adagrad(initial=0.1)"),
]


@pytest.mark.parametrize(("name", "piece"), NAMES)
def test_the_usual_names_are_fedavg_and_the_piece_to_the_last_bit(name: str, piece: str) -> None:
    start = network("bn")
    assert distance(ours(name.format(LOCAL), start), ours(f"fedavg({LOCAL}) | {piece}", start)) == 0


def test_momentum_zero_and_rate_one_is_fedavg() -> None:
    start = network("bn")
    fedavg = ours(f"fedavg({LOCAL})", start)
    assert (
        distance(ours(f"fedavgm({LOCAL}, server_lr=1, server_momentum=0)", start), fedavg) < 1e-11
    )


@pytest.mark.parametrize(("name", "factor"), [("adam", 1e-5), ("yogi", 1e-5), ("adagrad", 1e-5)])
def test_with_a_huge_tau_every_adaptive_optimiser_is_fedavg_with_rate_lr_over_tau(
    name: str, factor: float
) -> None:
    start, tau = network("plain"), 1e6
    slow = ours(
        f"fed{name}({LOCAL}, server_beta1=0, tau={tau}, initial=0, server_lr={tau / 2})", start
    )
    assert (
        distance(slow, ours(f"fedavgm({LOCAL}, server_lr=0.5, server_momentum=0)", start)) < factor
    )


def test_the_first_step_of_adagrad_is_lr_times_the_sign_of_the_move() -> None:
    start = network("plain")
    averaged = ours(f"fedavg({LOCAL})", start, rounds=1)
    moved = ours(f"fedadagrad({LOCAL}, server_lr=0.1, tau=1e-12, initial=0)", start, rounds=1)
    for name, before in start.state_dict().items():
        move = averaged[name] - before
        felt = move.abs() > 1e-9  # a dead unit's weights move by rounding alone
        assert felt.any()
        assert torch.allclose(
            (moved[name] - before)[felt], 0.1 * torch.sign(move)[felt], rtol=0, atol=1e-3
        ), name


def test_adam_and_yogi_take_the_same_first_step_from_v_zero_and_differ_later() -> None:
    start = network("plain")
    adam, yogi = (f"fed{name}({LOCAL}, initial=0)" for name in ("adam", "yogi"))
    assert distance(ours(adam, start, rounds=1), ours(yogi, start, rounds=1)) < 1e-14
    assert distance(ours(adam, start, rounds=3), ours(yogi, start, rounds=3)) > 1e-6


def test_buffers_stay_averaged_under_an_optimiser_at_the_server() -> None:
    start = network("bn")
    plain, moved = (
        ours(text, start, rounds=1) for text in (f"fedavg({LOCAL})", f"fedadam({LOCAL})")
    )
    buffers = [name for name, _ in start.named_buffers()]
    assert buffers
    assert all(torch.equal(plain[name], moved[name]) for name in buffers)


def test_an_optimiser_at_the_server_moves_what_fedbn_shares_and_nothing_else() -> None:
    start = network("bn")
    fedbn = ours(f"fedbn({LOCAL})", start, rounds=1)
    moved = ours(f"fedbn({LOCAL}) | server_momentum(lr=0.5, momentum=0)", start, rounds=1)
    halfway = {name: (start.state_dict()[name] + tensor) / 2 for name, tensor in fedbn.items()}
    assert "1.weight" not in moved
    assert distance(moved, halfway) < 1e-12


def test_an_optimiser_at_the_server_costs_no_communication() -> None:
    data, start = clients(), network("plain")
    rows = [
        simulate(model=start, clients=data, test=data[0], method=text, rounds=1).history[0]
        for text in (f"fedavg({LOCAL})", f"fedyogi({LOCAL})")
    ]
    assert all(
        rows[0][cost] == rows[1][cost]
        for cost in ("communications", "local_steps", "bytes_up", "bytes_down")
    )


@pytest.mark.parametrize(
    "piece", ["server_momentum", "server_adam", "server_yogi", "server_adagrad"]
)
def test_an_optimiser_at_the_server_without_anything_before_it_is_refused_in_words(
    piece: str,
) -> None:
    with pytest.raises(InputError, match=rf"'{piece}'.*as in fedavg\(\) \| {piece}\(\)"):
        ours(f"{piece}()", network("plain"))
    with pytest.raises(InputError, match=f"phase '{piece}'"):
        parse(f"{piece}() | fedavg()")


def test_an_optimiser_at_the_server_is_refused_where_whole_models_stay_with_the_clients() -> None:
    private: frozenset[Private] = frozenset({"model"})
    alone = Method(parse("fedavg()").phases, private, calls=parse("fedavg()").calls)
    with pytest.raises(
        InputError, match=r"'server_adam' moves a shared model.*whole models stay with the clients"
    ):
        alone | parse_one("server_adam()")


def parse_one(text: str) -> Method:
    """A piece that would be refused alone."""
    return METHODS.one(text)


@pytest.mark.parametrize(
    "text",
    [
        "fedavg() | server_adam(bias_correction=True, initial=0.1)",
        "fedavgm(server_momentum=0, server_nesterov=True)",
        "fedavg() | server_adam() | server_adam(lr=0.1)",
    ],
)
def test_options_at_odds_are_refused_in_words(text: str) -> None:
    with pytest.raises(InputError, match=r"do(es)? not go with"):
        ours(text, network("plain"))


def test_different_optimisers_may_follow_each_other() -> None:
    start = network("plain")
    text = f"fedavg({LOCAL}) | server_momentum() | server_adam()"
    assert distance(ours(text, start), ours(f"fedavg({LOCAL}) | server_adam()", start)) > 1e-6


# --- methods that use public data

# with batches of four the last of an epoch has two examples, and clients' last ones never just one
PUBLIC = 14


def public(seed: int = 9) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(PUBLIC, 1, 4, 4, generator=draw, dtype=torch.float64) + 1, torch.randint(
        0, 3, (PUBLIC,), generator=draw
    )


@dataclass
class PlainPublic(Plain):
    """The plain computation with public examples at the server."""

    server: Callable[["PlainPublic", nn.Module, dict[int, nn.Module], int], None] = field(
        kw_only=True
    )
    before: Callable[["PlainPublic"], None] = lambda run: None
    shared: bool = False

    def run(self, rounds: int, cohort: int) -> None:
        own = self.clients
        joined = [
            tuple(torch.cat(pair) for pair in zip(mine, public(), strict=True)) for mine in own
        ]
        self.before(self)
        for t in range(1, rounds + 1):
            self.clients = joined if self.shared else own  # type: ignore[assignment]
            start = copy.deepcopy(self.net)
            teachers = {k: self.train_locally(k, t) for k in choose(self.seed, t, len(own), cohort)}
            self.server(self, start, teachers, t)
            self.clients = own
            for j in range(1, self.dkd["steps"] + 1 if self.dkd else 1):
                self.distil(teachers, t, j)


def averages(run: PlainPublic, start: nn.Module, teachers: dict[int, nn.Module], t: int) -> None:
    run.average(teachers)


def learn(
    net: nn.Module,
    batches: Sequence[tuple[Tensor, Tensor, Tensor]],
    *,
    lr: float,
    clip: float,
    temperature: float = 1.0,
    hard: float = 0.0,
    adam: bool = True,
    cosine: bool = True,
) -> None:
    """One model from (x, y, taught logits)."""
    optimiser = torch.optim.Adam(net.parameters(), lr) if adam else SGD(net.parameters(), lr)
    schedule = (
        torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, len(batches)) if cosine else None
    )
    net.train()
    for x, y, taught in batches:
        optimiser.zero_grad()
        z = net(x)
        loss = kl_div(
            log_softmax(z / temperature, 1), softmax(taught / temperature, 1), reduction="batchmean"
        )
        torch.autograd.backward(loss + hard * cross_entropy(z, y))
        nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimiser.step()
        if schedule is not None:
            schedule.step()


def mean_logits(teachers: dict[int, nn.Module], x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.stack([copy.deepcopy(net).eval()(x) for net in teachers.values()]).mean(0)


def plain_feddf(
    run: PlainPublic, start: nn.Module, teachers: dict[int, nn.Module], t: int, **options: Any
) -> None:
    run.average(teachers)
    x, y = public()
    drawn = draw(Reads(4, steps=5), PUBLIC, (run.seed, t, 1, 1, SERVER))
    votes = mean_logits(teachers, x)
    learn(run.net, [(x[at], y[at], votes[at]) for at in drawn], **options)


def plain_feded(
    run: PlainPublic, start: nn.Module, teachers: dict[int, nn.Module], t: int, **options: Any
) -> None:
    x, y = public()
    taught = mean_logits(teachers, x)
    spans = [slice(0, 4), slice(4, 8), slice(8, 12), slice(12, 14), slice(0, 4)]
    learn(run.net, [(x[at], y[at], taught[at]) for at in spans], **options)


def plain_warmup(run: PlainPublic) -> None:
    x, y = public()
    optimiser = SGD(run.net.parameters(), 0.05)
    run.net.train()
    for at in draw(Reads(4, steps=3), PUBLIC, (run.seed, 1, 0, 1, SERVER)):
        optimiser.zero_grad()
        torch.autograd.backward(cross_entropy(run.net(x[at]), y[at]))
        optimiser.step()


FIVE = f"{LOCAL}, server_steps=5, server_batch_size=4"
FEDDF, FEDED = partial(plain_feddf, lr=0.01), partial(plain_feded, lr=0.01)
# text, settings of the plain computation, and where it finds a phase among ours: local training is
# its phase 0, DKD its phase 1
CASES: list[tuple[str, dict[str, Any], dict[int, int]]] = [
    (f"feddf({FIVE}, server_lr=0.01)", {"server": partial(FEDDF, clip=5.0)}, {}),
    (
        f"feddf({FIVE}, server_lr=0.01, clip=None, temperature=3, annealing='none')",
        {"server": partial(FEDDF, clip=1e9, temperature=3.0, cosine=False)},
        {},
    ),
    (
        f"feddf({FIVE}, server_lr=0.3, clip=0.2, server_optimiser='sgd', temperature=2)",
        {"server": partial(plain_feddf, lr=0.3, clip=0.2, adam=False, temperature=2.0)},
        {},
    ),
    (
        f"feddf({FIVE}, server_lr=0.01) | {DKD_TEXT}",
        {"server": partial(FEDDF, clip=5.0), "dkd": DKD},
        {1: 2},
    ),
    (f"feded({FIVE}, server_lr=0.01)", {"server": partial(FEDED, clip=5.0)}, {}),
    (
        f"feded({FIVE}, server_lr=0.01, hard=0.5, temperature=2)",
        {"server": partial(FEDED, clip=5.0, hard=0.5, temperature=2.0)},
        {},
    ),
    (
        f"feded({FIVE}, server_lr=0.01) | {DKD_TEXT}",
        {"server": partial(FEDED, clip=5.0), "dkd": DKD},
        {1: 3},
    ),
    (f"data_sharing({LOCAL})", {"server": averages, "shared": True}, {}),
    (f"data_sharing({LOCAL}) | {DKD_TEXT}", {"server": averages, "shared": True, "dkd": DKD}, {}),
    (
        f"data_sharing({LOCAL}, warmup_steps=3)",
        {"server": averages, "shared": True, "before": plain_warmup},
        {0: 1},
    ),
    (
        f"data_sharing({LOCAL}, warmup_steps=3) | {DKD_TEXT}",
        {"server": averages, "shared": True, "before": plain_warmup, "dkd": DKD},
        {0: 1, 1: 2},
    ),
]


@pytest.mark.parametrize(("text", "settings", "phases"), CASES, ids=[text for text, _, _ in CASES])
@pytest.mark.parametrize("kind", ["plain", "bn"])
def test_two_rounds_with_public_data_equal_the_plain_computation(
    text: str,
    settings: dict[str, Any],
    phases: dict[int, int],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def shifted(reads: Reads, examples: int, key: tuple[int, ...]) -> list[Any]:
        return draw(reads, examples, (*key[:2], phases.get(key[2], key[2]), *key[3:]))

    monkeypatch.setattr(plain_module, "draw", shifted)
    start = network(kind)
    plain = PlainPublic(
        copy.deepcopy(start), clients(), SEED, Reads(4, epochs=2), SGD, 0.05, **settings
    )
    plain.run(rounds=2, cohort=3)
    found, expected = ours(text, start, public=public()), dict(plain.net.state_dict())
    assert distance(found, expected) < 1e-10
    assert distance(ours(f"fedavg({LOCAL})", start), expected) > 1e-4


@pytest.mark.long
def test_the_public_cases_differ_from_each_other() -> None:
    """Else agreement with the plain computation would mean little."""
    ends = [ours(text, network("plain"), public=public()) for text, _, _ in CASES]
    assert all(
        distance(first, second) > 1e-6 for i, first in enumerate(ends) for second in ends[i + 1 :]
    )


def test_feddf_from_one_client_is_that_clients_fixed_point() -> None:
    start, data = network("plain"), clients()[:1]
    run = partial(
        simulate,
        model=start,
        clients=data,
        test=data[0],
        initial=start.state_dict(),
        dtype=torch.float64,
        public=public(),
    )
    alone = run(method=f"fedavg({LOCAL})").params
    many = run(method=f"feddf({FIVE}, server_lr=0.1, server_optimiser='sgd')").params
    # Adam blows up rounding, a thousandfold and more at each step
    once = run(method=f"feddf({LOCAL}, server_steps=1)").params
    assert distance(many, alone) < 1e-13
    assert distance(once, alone) < 1e-10


def test_feddf_uploads_what_fedavg_uploads_and_judges_the_average_as_well() -> None:
    data, start = clients(), network("bn")
    run = partial(
        simulate, model=start, clients=data, test=data[0], public=public(), dtype="float64"
    )
    rows = [run(method=text).history[0] for text in (f"fedavg({LOCAL})", f"feddf({FIVE})")]
    assert all(
        rows[0][cost] == rows[1][cost]
        for cost in ("communications", "local_steps", "bytes_up", "bytes_down")
    )
    assert rows[1]["average_test_loss"] == pytest.approx(rows[0]["test_loss"], abs=1e-12)
    assert rows[1]["test_loss"] != rows[0]["test_loss"]


def test_feddf_forgets_the_teachers_after_the_round() -> None:
    (state,), _ = played(Serial, f"feddf({FIVE})", norm=False)
    assert set(state) == {"params", "buffers", "start"}
    (state,), _ = played(Serial, f"feded({FIVE})", norm=False)
    assert set(state) == {"params", "buffers", "start"}


def test_feded_from_one_client_that_learns_nothing_stays_where_it_is() -> None:
    start, data = network("plain"), clients()[:1]
    end = simulate(
        model=start,
        clients=data,
        test=data[0],
        method="feded(lr=1e-14, epochs=1, server_steps=9, server_optimiser='sgd')",
        initial=start.state_dict(),
        dtype="float64",
        public=public(),
    ).params
    assert distance(end, dict(start.state_dict())) < 1e-10


def test_feded_sends_predictions_up_and_the_model_down() -> None:
    data, start = clients(), network("bn")
    run = partial(
        simulate,
        model=start,
        clients=data,
        test=data[0],
        public=public(),
        dtype="float64",
        cohort=3,
    )
    fedavg, feded = (run(method=text).history[0] for text in (f"fedavg({LOCAL})", f"feded({FIVE})"))
    assert feded["bytes_up"] == 3 * PUBLIC * 3 * 8  # clients, examples, classes, float64
    assert feded["bytes_down"] == fedavg["bytes_down"]
    assert feded["communications"] == 2


def test_feded_fills_its_table_in_as_many_steps_as_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, text = network("bn"), f"feded({FIVE})"
    at_once = ours(text, start, public=public())
    monkeypatch.setattr(importlib.import_module("feddkd.methods.feded"), "AT_ONCE", 4)
    assert distance(ours(text, start, public=public()), at_once) < 1e-12


def test_feded_takes_networks_with_more_outputs_than_labels() -> None:
    data = [(x, y.clamp(max=1)) for x, y in clients()]
    x, y = public()
    wide = network("plain")
    row = simulate(
        model=wide,
        clients=data,
        test=data[0],
        method=f"feded({FIVE})",
        public=(x, y.clamp(max=1)),
        dtype="float64",
    )
    assert row.history[0]["bytes_up"] == 4 * PUBLIC * 3 * 8


def test_sharing_data_with_a_single_client_is_training_on_the_joined_data() -> None:
    start, (x, y), (more, labels) = network("plain"), clients()[0], public()
    options: dict[str, Any] = {
        "model": start,
        "test": (x, y),
        "initial": start.state_dict(),
        "dtype": torch.float64,
        "rounds": 2,
    }
    shared = simulate(
        method=f"data_sharing({LOCAL})", clients=[(x, y)], public=(more, labels), **options
    ).params
    joined = simulate(
        method=f"fedavg({LOCAL})",
        clients=[(torch.cat([x, more]), torch.cat([y, labels]))],
        **options,
    ).params
    assert distance(shared, joined) == 0


def test_shared_examples_count_in_a_clients_steps_and_a_warm_up_costs_no_communication() -> None:
    data = clients()
    run = partial(
        simulate,
        model=network("plain"),
        clients=data,
        test=data[0],
        public=public(),
        dtype="float64",
        rounds=2,
    )
    (first, second), warm = (
        run(method=f"data_sharing({LOCAL})").history,
        run(method=f"data_sharing({LOCAL}, warmup_steps=3)").history,
    )
    steps = sum(2 * -(-(len(y) + PUBLIC) // 4) for _, y in data) / len(data)
    assert (first["local_steps"], second["local_steps"]) == (steps, 2 * steps)
    for cost in ("communications", "local_steps", "bytes_up", "bytes_down"):
        assert warm[1][cost] == second[cost]


def test_a_phase_may_end_after_a_round() -> None:
    assert [Repeat(2, warmup=1, last=3)(t) for t in range(1, 6)] == [0, 2, 2, 0, 0]
    assert [Repeat(last=1)(t) for t in (1, 2)] == [1, 0]


@pytest.mark.parametrize(
    "text", ["feddf()", "feded()", "data_sharing()", "data_sharing(warmup_steps=2)"]
)
def test_without_public_data_the_error_says_where_to_get_some(text: str) -> None:
    with pytest.raises(InputError, match=r"public data"):
        ours(text, network("plain"))


@pytest.mark.parametrize(
    "text", [f"feddf({FIVE}) | local_bn()", f"feded({FIVE}) | local_bn(private='statistics')"]
)
def test_whole_models_at_the_server_do_not_go_with_private_tensors(text: str) -> None:
    with pytest.raises(InputError, match="tensors private to clients"):
        ours(text, network("bn"), public=public())
    ours(text, network("plain"), public=public())  # nothing private in it


def test_data_sharing_goes_with_batch_norm_at_home() -> None:
    kept = ours(
        f"data_sharing({LOCAL}, warmup_steps=2) | local_bn() | {DKD_TEXT}",
        network("bn"),
        public=public(),
    )
    assert "1.weight" not in kept


# --- engines

# Adam magnifies the rounding of tiny gradients, so it goes without batch norm
HERE = [
    ("fedavgm(epochs=1, batch_size=8)", True),
    (
        (
            "fedavg(epochs=1, batch_size=8) | dkd(steps=2, batch_size=14, lr=0.3) |"
            " server_yogi(lr=0.05, tau=0.01)"
        ),
        False,
    ),
    ("fedbn(epochs=1, batch_size=8) | server_adam(lr=0.05, tau=0.01, bias_correction=True)", True),
    (
        (
            "feddf(epochs=1, batch_size=8, server_steps=5, server_batch_size=4, server_lr=0.1,"
            " server_optimiser='sgd')"
        ),
        True,
    ),
    (
        (
            "feddf(epochs=1, batch_size=8, server_steps=3, server_batch_size=4) | dkd(steps=2,"
            " batch_size=14)"
        ),
        False,
    ),
    (
        (
            "feded(epochs=1, batch_size=8, server_steps=5, server_batch_size=4, server_lr=0.1,"
            " server_optimiser='sgd', hard=0.1)"
        ),
        True,
    ),
    (
        (
            "feded(epochs=1, batch_size=8, server_steps=3, server_batch_size=4) | dkd(steps=2,"
            " batch_size=14)"
        ),
        False,
    ),
    ("data_sharing(epochs=1, batch_size=7, warmup_steps=3) | dkd(steps=2, batch_size=14)", True),
]


def world(seed: int) -> Federation:
    draw = torch.Generator().manual_seed(seed)

    def examples(count: int) -> Examples:
        x = torch.randint(0, 256, (count, 1, 4, 4), generator=draw, dtype=torch.uint8)
        return Examples(x, torch.randint(0, 3, (count,), generator=draw))

    return assemble(
        [examples(n) for n in (10, 30, 19, 13)],
        examples(25),
        None,
        transform("", 255.0),
        examples(PUBLIC),
    )


def played(
    engine: Callable[..., Any],
    text: str,
    *,
    norm: bool,
    seeds: Sequence[int] = (0,),
    **options: Any,
) -> tuple[list[Any], list[Any]]:
    """Three rounds on an engine: states, and what clients keep."""
    model, method = functional(test_engines.network(norm)), parse(text)
    starts = [
        method.start(
            model, *model.initial(("init", seed)), World(("method", seed), 4, 3, PUBLIC, 3, (3,))
        )
        for seed in seeds
    ]
    host = engine(
        model,
        [world(seed) for seed in seeds],
        [memo for _, memo in starts],
        torch.float64,
        **options,
    )
    runs = [Run(at, seed, starts[at][0], has_validation=False) for at, seed in enumerate(seeds)]
    protocol = Protocol.GLOBAL if method.private == {"none"} else Protocol.CLIENT_MEAN
    *_, rows = play(method, model, host, runs, cohort=3, last=3, evaluation=Evaluation(protocol))
    host.close()
    return [one.state for one in runs], rows


@pytest.mark.parametrize(("text", "norm"), HERE, ids=[text for text, _ in HERE])
def test_every_engine_agrees_with_serial(text: str, norm: bool) -> None:
    expected, rows = played(Serial, text, norm=norm, seeds=(0, 1))
    ways: list[Callable[..., Any]] = [
        partial(Batched, strategy="vmap"),
        partial(Batched, strategy="loop"),
        partial(Pool, workers=2),
    ]
    for engine in ways:
        found, same = played(engine, text, norm=norm, seeds=(0, 1))
        assert test_engines.apart(expected, found) < 1e-12
        for mine, theirs in zip(rows, same, strict=True):
            assert all(
                theirs[key] == pytest.approx(value, abs=1e-10) for key, value in mine.items()
            )


@pytest.mark.parametrize("text", [HERE[4][0], HERE[6][0]])
def test_traced_lessons_at_the_server_agree_with_serial(text: str) -> None:
    expected, found = (
        played(Serial, text, norm=False)[0],
        played(Batched, text, norm=False, strategy="traced")[0],
    )
    assert test_engines.apart(expected, found) < 1e-12
