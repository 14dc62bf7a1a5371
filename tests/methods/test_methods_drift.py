"""SCAFFOLD, FedDyn, FedNova, MOON, FedNTD and FedGKD:

against plain PyTorch, by their laws, on every engine.
"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from feddkd import METHODS, InputError, functional, parse, simulate
from feddkd.engines.batched.engine import Batched
from feddkd.engines.compile.trace import traced
from feddkd.engines.pool.engine import Pool
from feddkd.engines.serial import Serial
from feddkd.method import Batch
from feddkd.methods.losses import contrast, not_true_distillation
from feddkd.tensors import zeros
from plain_comparison import compare_rounds, ends, images
from plain_drift import FedDyn, FedGKD, FedNova, FedNTD, Make, Moon, Scaffold
from small import clients, distance, network, pooled, run
from test_engines import ON_CUDA, apart, needs_cuda
from test_engines import run as engine_run
from test_laws import watched
from test_reference import DKD, DKD_TEXT, NESTEROV, SGD, warm_line

L = "epochs=2, batch_size=4, lr=0.05"
ADAM = partial(torch.optim.Adam, weight_decay=0.01)
HEAVY = {"optimiser": partial(SGD, momentum=0.9, weight_decay=0.01), "rho": 0.9}
AHEAD = {"optimiser": NESTEROV, "rho": 0.9, "nesterov": True}
T = DKD_TEXT.format("")

CASES: list[tuple[str, Make, dict[str, Any]]] = [
    (f"scaffold({L})", Scaffold, {}),
    (
        f"scaffold({L}, lr_decay=0.5, momentum=0.9, weight_decay=0.01)",
        Scaffold,
        {**HEAVY, "lr_decay": 0.5},
    ),
    (f"scaffold({L}, momentum=0.9, nesterov=True, weight_decay=0.01)", Scaffold, AHEAD),
    (
        f"scaffold({L}, momentum=0.9, nesterov=True, weight_decay=0.01,"
        " lr_schedule='step(every=1)', lr_step_schedule='linear(over=7, warmup=2)')",
        Scaffold,
        {**AHEAD, "by_round": lambda t: 0.1 ** (t - 1), "by_step": warm_line},
    ),
    (f"scaffold({L}) | {T}", Scaffold, {"dkd": DKD}),
    (f"feddyn({L})", FedDyn, {}),
    (
        f"feddyn({L}, alpha=0.5, momentum=0.9, nesterov=True, weight_decay=0.01)",
        FedDyn,
        {**AHEAD, "alpha": 0.5},
    ),
    (
        f"feddyn({L}, alpha=2, optimiser='adam', weight_decay=0.01)",
        FedDyn,
        {"optimiser": ADAM, "alpha": 2},
    ),
    (f"feddyn({L}, alpha=0.5) | {T}", FedDyn, {"alpha": 0.5, "dkd": DKD}),
    (f"fednova({L})", FedNova, {}),
    (f"fednova({L}, momentum=0.9, weight_decay=0.01)", FedNova, HEAVY),
    (f"fednova({L}, momentum=0.9, nesterov=True, weight_decay=0.01)", FedNova, AHEAD),
    (
        f"fednova({L}, momentum=0.9, max_gradient_norm=0.5,"
        " lr_step_schedule='linear(over=7, warmup=2)')",
        FedNova,
        {
            "optimiser": partial(SGD, momentum=0.9),
            "rho": 0.9,
            "max_norm": 0.5,
            "by_step": warm_line,
        },
    ),
    (f"fednova({L}) | {T}", FedNova, {"dkd": DKD}),
    (f"moon({L})", Moon, {}),
    (f"moon({L}, mu=5, temperature=0.2)", Moon, {"mu": 5, "temperature": 0.2}),
    (f"moon({L}, mu=2) | {T}", Moon, {"mu": 2, "dkd": DKD}),
    (f"fedntd({L})", FedNTD, {}),
    (f"fedntd({L}, beta=3, temperature=2)", FedNTD, {"beta": 3, "temperature": 2}),
    (f"fedntd({L}, beta=3) | {T}", FedNTD, {"beta": 3, "dkd": DKD}),
    (f"fedgkd({L}, c=2)", FedGKD, {"c": 2}),
    (f"fedgkd({L}, c=2, buffer=2, temperature=3)", FedGKD, {"c": 2, "buffer": 2, "temperature": 3}),
    (f"fedgkd({L}, c=2, buffer=1)", FedGKD, {"c": 2, "buffer": 1}),
    (f"fedgkd({L}, c=2, buffer=2) | {T}", FedGKD, {"c": 2, "buffer": 2, "dkd": DKD}),
    (f"fedgkd({L}, c=2, buffer=1) | {T}", FedGKD, {"c": 2, "buffer": 1, "dkd": DKD}),
]
WITH_NORM = [
    case
    for case in CASES
    if case[0] == f"{case[0].partition('(')[0]}({L})" or "dkd" in case[2] or "c" in case[2]
]
RUNS = [
    *((*case, "plain") for case in CASES),
    *((*case, kind) for case in WITH_NORM for kind in ("bn", "private bn")),
]


@pytest.mark.parametrize(
    ("text", "make", "settings", "kind"), RUNS, ids=[f"{text} {kind}" for text, _, _, kind in RUNS]
)
def test_rounds_equal_the_plain_computation(
    text: str, make: Make, settings: dict[str, Any], kind: str
) -> None:
    compare_rounds(text, make, settings, kind)


@pytest.mark.long
def test_the_cases_differ_from_each_other_and_from_fedavg() -> None:
    """Else agreement would mean little."""
    texts = [*(text for text, _, _ in CASES), f"fedavg({L})", f"fedavg({L}) | {T}"]
    last = ends(texts)
    for i, first in enumerate(last):
        for j, second in enumerate(last[i + 1 :], i + 1):
            assert (first - second).abs().max() > 1e-6, (texts[i], texts[j])


# --- laws

DATA, NET = clients(), network()
LOCAL = "epochs=2, batch_size=8, lr=0.1"
TAILS = ["", " | dkd(steps=2, batch_size=8)"]


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("momentum", ["", ", momentum=0.5"])
def test_scaffold_with_equal_clients_is_fedavg(momentum: str, tail: str) -> None:
    same, local = [DATA[2]] * 3, f"epochs=3, batch_size=100, lr=0.1{momentum}"
    found, expected = (
        run(f"{name}({local}){tail}", same, NET, rounds=3).params for name in ("scaffold", "fedavg")
    )
    assert distance(found, expected) < 1e-12


def test_scaffold_is_fedavg_in_the_first_round_and_no_longer_in_the_second() -> None:
    found, expected = (
        [run(f"{name}({LOCAL})", DATA, NET, rounds=t).params for t in (1, 2)]
        for name in ("scaffold", "fedavg")
    )
    assert distance(found[0], expected[0]) < 1e-12
    assert distance(found[1], expected[1]) > 1e-3


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(
    "local", [LOCAL + ", steps=7", LOCAL + ", steps=7, momentum=0.9", "epochs=3, batch_size=100"]
)
def test_fednova_with_equal_steps_is_fedavg(local: str, tail: str) -> None:
    found, expected = (
        run(f"{name}({local}){tail}", DATA, NET, rounds=3).params for name in ("fednova", "fedavg")
    )
    assert distance(found, expected) < 1e-12


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize(
    "head", ["fedntd({}, beta=0)", "fedgkd({}, c=0)", "fedgkd({}, c=0, buffer=1)", "moon({}, mu=0)"]
)
def test_fedntd_without_beta_fedgkd_without_c_and_moon_without_mu_are_fedavg(
    head: str, tail: str
) -> None:
    found, expected = (
        run(text.format(LOCAL) + tail, DATA, NET, rounds=3).params for text in (head, "fedavg({})")
    )
    assert distance(found, expected) < 1e-12


@pytest.mark.parametrize("head", ["fedgkd({}, c=5)", "fedgkd({}, c=5, buffer=1)", "moon({}, mu=5)"])
def test_fedgkd_and_moon_are_fedavg_in_the_first_round_and_no_longer_in_the_second(
    head: str,
) -> None:
    """FedGKD does not distil yet; MOON's previous models are still the global one, so that the
    contrast is constant.
    """
    found, expected = (
        [run(text.format(LOCAL), DATA, NET, rounds=t).params for t in (1, 2)]
        for text in (head, "fedavg({})")
    )
    assert distance(found[0], expected[0]) < 1e-12
    assert distance(found[1], expected[1]) > 1e-4


def test_fedgkd_forgets_what_no_longer_fits_into_its_buffer_and_not_sooner() -> None:
    ends = {
        (m, t): run(f"fedgkd({LOCAL}, c=5, buffer={m})", DATA, NET, rounds=t).params
        for m in (2, 3, 9)
        for t in (2, 3, 4)
    }
    assert distance(ends[2, 2], ends[3, 2]) == 0 < distance(ends[2, 3], ends[3, 3])
    assert distance(ends[3, 3], ends[9, 3]) == 0 < distance(ends[3, 4], ends[9, 4])


@pytest.mark.parametrize("cohort", [2, 3])
def test_feddyn_with_alpha_near_zero_is_fedavg_with_the_mean_moves_of_all_rounds(
    cohort: int,
) -> None:
    """The local terms vanish with alpha, -h/alpha does not: it is the sum of share * (mean w_k -
    w_t).
    """
    same = clients((20, 20, 20))  # equal sizes: the uniform average is FedAvg's
    w, moves = (
        {name: tensor.detach() for name, tensor in NET.named_parameters()},
        zeros(NET.state_dict()),
    )
    for t in (1, 2):
        found = run(
            "feddyn(epochs=2, batch_size=100, alpha=1e-9)", same, NET, rounds=t, cohort=cohort
        )
        mean = _one_round("fedavg(epochs=2, batch_size=100)", same, w, found.history[-1]["clients"])
        moves = {name: moves[name] + cohort / 3 * (mean[name] - w[name]) for name in w}
        w = {name: mean[name] + moves[name] for name in w}
        assert distance(found.params, w) < 1e-6


def _one_round(
    text: str, data: list[tuple[Tensor, Tensor]], w: dict[str, Tensor], active: list[int]
) -> dict[str, Tensor]:
    return run(text, [data[k] for k in active], NET, rounds=1, initial=w).params


@pytest.mark.parametrize(
    ("text", "group"), [("scaffold({})", "control"), ("feddyn({}, alpha=0.5)", "slope")]
)
@pytest.mark.parametrize("silent", [set(), {1}])
def test_what_the_server_holds_is_the_mean_of_what_all_clients_hold(
    text: str, group: str, silent: set[int]
) -> None:
    """The law of c_k in SCAFFOLD and h_k in FedDyn, for active, idle and silent clients."""
    method = parse(text.format(LOCAL))
    engine, one = watched(method, rounds=4, cohort=2, silent={"local": silent})
    held = [engine.memos.get((0, k), engine.first_memos[0])[group] for k in range(3)]
    for name, tensor in one.state[group].items():
        assert torch.allclose(
            tensor, torch.stack([own[name] for own in held]).mean(0), rtol=0, atol=1e-14
        )
        assert tensor.abs().max() > 1e-4


@pytest.mark.parametrize(
    ("text", "at_the_optimum"),
    [
        ("scaffold({})", True),
        ("scaffold({}, momentum=0.5)", True),
        ("feddyn({}, alpha=0.3)", True),
        ("fedavg({})", False),
    ],
)
def test_scaffold_and_feddyn_come_to_rest_where_the_pooled_loss_does_and_fedavg_elsewhere(
    text: str, at_the_optimum: bool
) -> None:
    data = [(x - x.mean(0), y) for x, y in clients((20, 20, 20))]
    torch.manual_seed(0)
    line = nn.Sequential(nn.Linear(5, 3)).double()
    x, y = pooled(data)
    result = run(text.format("epochs=5, batch_size=100, lr=0.5"), data, line, rounds=25)
    w = {name: tensor.requires_grad_() for name, tensor in result.params.items()}
    slopes = torch.autograd.grad(
        cross_entropy(functional(line)(w, {}, x, mode="eval").logits, y), list(w.values())
    )
    assert (max(float(slope.abs().max()) for slope in slopes) < 1e-5) == at_the_optimum


def _batch(y: Tensor) -> Batch:
    return Batch(
        y.double(), y, torch.full((len(y),), 1 / len(y), dtype=torch.float64), torch.tensor(0)
    )


def test_not_true_distillation_does_not_see_the_labels_logit_and_pulls_all_others() -> None:
    draw = torch.Generator().manual_seed(0)
    teacher, student = torch.randn(2, 6, 4, generator=draw, dtype=torch.float64)
    y = torch.tensor([0, 1, 2, 3, 3, 0])
    slope = torch.func.grad(lambda z: not_true_distillation(teacher, z, _batch(y), 2.0))(student)
    is_label = torch.nn.functional.one_hot(y, 4).bool()
    assert (slope[is_label] == 0).all()
    assert (slope[~is_label] != 0).all()


def test_the_contrast_of_features_without_direction_is_finite_and_so_is_its_slope() -> None:
    z, other = torch.zeros(2, 3, dtype=torch.float64), torch.ones(2, 3, dtype=torch.float64)
    slope, value = torch.func.grad_and_value(
        lambda z: contrast(z, other, -other, _batch(torch.tensor([0, 1])), 0.5)
    )(z)
    assert float(value) == pytest.approx(0.6931471805599453)
    assert slope.isfinite().all()


def test_moon_draws_features_to_the_global_model_and_away_from_the_previous_local_one() -> None:
    def lead(mu: float) -> float:
        """Return how much nearer local features are to the global model's, after a second round.

        They are compared with the distance from the previous local model's features.
        """
        engine, _ = watched(parse(f"moon(batch_size=8, lr=0.1, mu={mu})"), rounds=1, cohort=3)
        before = engine.memos[0, 2]["previous"]
        sent = run("moon(batch_size=8, lr=0.1, mu=0)", DATA, NET, rounds=1).params
        after = watched(parse(f"moon(batch_size=8, lr=0.1, mu={mu})"), rounds=2, cohort=3)[0].memos[
            0, 2
        ]["previous"]
        model, x = functional(NET), DATA[2][0]
        z, near, far = (model(w, {}, x, mode="eval").features for w in (after, sent, before))
        cosine = torch.nn.functional.cosine_similarity
        return float((cosine(z, near) - cosine(z, far)).mean())

    assert lead(5) > lead(0) + 0.01


def test_methods_read_the_same_batches_whether_or_not_the_server_is_busy_in_between() -> None:
    plain, busy = parse("fedavg() | dkd(steps=2)"), parse("fedgkd(buffer=3) | dkd(steps=2)")
    indices = [
        [(exchange.phase.name, exchange.index) for exchange in method.plan(1)]
        for method in (plain, busy)
    ]
    assert (
        indices[1]
        == [("remember", 0), *indices[0]]
        == [("remember", 0), ("local", 0), ("distil", 1), ("distil", 1)]
    )


# --- what travels


P = sum(parameter.numel() for parameter in NET.parameters())


@pytest.mark.parametrize(
    ("text", "up", "down"),
    [
        ("scaffold()", 2 * P, 2 * P + 1),  # the change of c_k, and c
        ("feddyn()", P, P + 1),  # h_k and h stay where they are
        ("fednova()", P + 1, P + 1),  # a_k
        ("moon()", P, P + 1),
        ("fedntd()", P, P + 1),
        ("fedgkd()", P, 2 * P + 2),  # the teacher; c
        ("fedgkd(buffer=1)", P, P + 2),  # the teacher is the model that is sent
    ],
)
def test_bytes_are_those_of_the_tensors_that_travel(text: str, up: int, down: int) -> None:
    rows = run(text, DATA, NET, rounds=2, cohort=2).history
    assert [(row["bytes_up"], row["bytes_down"]) for row in rows] == [
        (2 * 8 * t * up, 2 * 8 * t * down) for t in (1, 2)
    ]
    assert [row["communications"] for row in rows] == [1, 2]


@pytest.mark.parametrize(
    "text", ["scaffold()", "feddyn()", "fednova()", "moon()", "fedntd()", "fedgkd()"]
)
def test_clients_keep_what_the_method_needs_and_no_more(text: str) -> None:
    kept = {"scaffold()": {"control"}, "feddyn()": {"slope"}, "moon()": {"previous"}}.get(
        text, set()
    )
    for tail in ("", " | dkd(steps=2)"):
        engine, _ = watched(parse(text + tail), rounds=2)
        assert all(set(engine.memos[0, k]) == kept for k in range(3))


# --- what is refused


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "scaffold(optimiser='adam')",
            "scaffold weighs the steps of SGD; optimiser='adam' does not go with it",
        ),
        (
            "fednova(optimiser='adam')",
            "fednova weighs the steps of SGD; optimiser='adam' does not go with it",
        ),
        ("feddyn(alpha=0)", "'feddyn': alpha must be > 0, not 0"),
        ("moon(mu=-1)", "'moon': mu must be >= 0, not -1"),
        ("moon(temperature=0)", "'moon': temperature must be > 0, not 0"),
        ("fedntd(beta=-1)", "'fedntd': beta must be >= 0, not -1"),
        ("fedntd(temperature=0)", "'fedntd': temperature must be > 0, not 0"),
        ("fedgkd(buffer=0)", "'fedgkd': buffer must be >= 1, not 0"),
        ("fedgkd(c=-0.1)", "'fedgkd': c must be >= 0, not -0.1"),
    ],
)
def test_wrong_options_are_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse(text)


def test_moon_refuses_a_network_without_a_linear_layer() -> None:
    net = nn.Sequential(nn.Conv2d(1, 3, 4), nn.Flatten()).double()
    data = images()
    with pytest.raises(
        InputError,
        match="moon compares inputs of the last linear layer, and this network has no linear layer",
    ):
        simulate(model=net, clients=data, test=data[0], method="moon()")


@pytest.mark.parametrize(
    "text",
    ["scaffold(lr=0.2)", "feddyn(alpha=0.5)", "fednova()", "moon(mu=2)", "fedntd()", "fedgkd(c=1)"],
)
def test_texts_come_back_and_every_method_has_a_line_of_help(text: str) -> None:
    assert str(parse(f"{text} | dkd()")) == f"{text} | dkd()"
    help_line = METHODS[text.partition("(")[0]].__doc__
    assert help_line is not None
    assert "=" in help_line or "<-" in help_line


# --- engines

ENGINE_TEXTS = [
    "scaffold(epochs=1, batch_size=8, momentum=0.5)",
    "feddyn(steps=3, batch_size=8, alpha=0.5)",
    "fednova(epochs=1, batch_size=8, momentum=0.5, nesterov=True)",
    "moon(steps=3, batch_size=8, mu=2)",
    "fedntd(steps=3, batch_size=8, temperature=2)",
    "fedgkd(steps=3, batch_size=8, c=1, buffer=2)",
    "fedgkd(steps=3, batch_size=8, c=1, buffer=2) | dkd(steps=2, batch_size=14)",
]
ENGINES: dict[str, tuple[type[Any], dict[str, Any], tuple[bool, ...]]] = {
    "vmap": (Batched, {"strategy": "vmap"}, (False, True)),
    # with batch norm too, but tracing every size of batch takes long
    "traced": (Batched, {"strategy": "traced"}, (False,)),
    "loop": (Batched, {"strategy": "loop"}, (False,)),
    "pool": (Pool, {"workers": 2}, (True,)),
}


@pytest.mark.parametrize("text", ENGINE_TEXTS)
@pytest.mark.parametrize("norm", [False, True], ids=["no batch norm", "batch norm"])
def test_every_engine_agrees_with_serial_over_several_seeds_at_once(text: str, norm: bool) -> None:
    expected, rows = engine_run(Serial, text, norm, seeds=(0, 1))
    for name, (engine, options, nets) in ENGINES.items():
        # DKD is no fold: there is nothing new to trace
        if norm in nets and not (name == "traced" and "dkd" in text):
            found, same = engine_run(engine, text, norm, seeds=(0, 1), **options)
            assert apart(expected, found) < 1e-12, name
            for key, value in rows[1].items():
                assert same[1][key] == pytest.approx(value, abs=1e-10), (name, key)


def test_a_traced_function_keeps_inputs_apart_that_were_one_tensor_when_it_was_traced() -> None:
    one, two = torch.ones(2), torch.zeros(2)
    apart_again = traced(lambda pair: pair["a"] - pair["b"], {"a": one, "b": one})
    assert torch.equal(apart_again({"a": one, "b": two}), one)


@needs_cuda
@pytest.mark.filterwarnings("ignore")  # compilers give warnings
@pytest.mark.parametrize("text", ENGINE_TEXTS)
@pytest.mark.parametrize("way", ON_CUDA)
def test_every_strategy_on_cuda_agrees_with_serial_on_the_cpu(text: str, way: str) -> None:
    expected, _ = engine_run(Serial, text, True)
    found, _ = engine_run(Batched, text, True, place="cuda", precision="fp32", **ON_CUDA[way])
    assert apart(expected, found) < 1e-12
