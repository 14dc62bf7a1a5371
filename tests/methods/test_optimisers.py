"""Optimisers do what torch.optim does, step by step; schedules what torch's schedulers do."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler

from feddkd import InputError, parse
from feddkd.engines.batched.engine import Batched
from feddkd.engines.pool.engine import Pool
from feddkd.engines.serial import Serial
from feddkd.methods.local import Local
from feddkd.methods.optimisers import (
    OPTIMISERS,
    Optimiser,
    adagrad,
    adam,
    adamw,
    clipped,
    lamb,
    rmsprop,
    scheduled,
    sgd,
)
from feddkd.spec.rate_schedules import SCHEDULES
from feddkd.tensors import Tensors
from small import clients, distance, network
from small import run as play
from test_engines import apart, run

STEPS = 10
DOUBLE = torch.float64


def start_and_gradients() -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    start = {"a": torch.randn(3, 4, dtype=DOUBLE), "b": torch.randn(5, dtype=DOUBLE)}
    return start, [
        {name: torch.randn_like(tensor) * (STEPS - step) for name, tensor in start.items()}
        for step in range(STEPS)
    ]


def steps_of(optimiser: Optimiser, lr: float = 0.05) -> Tensors:
    """The weights after all steps of one of our optimisers."""
    start, gradients = start_and_gradients()
    params: Tensors = start
    state = optimiser.init(params)
    for gradient in gradients:
        params, state = optimiser.update(params, gradient, state, torch.tensor(lr, dtype=DOUBLE))
    return params


def steps_of_torch(
    make: Any, options: dict[str, Any], schedule: Any = None, max_norm: float | None = None
) -> Tensors:
    """The weights after all steps of one of torch's optimisers."""
    start, gradients = start_and_gradients()
    reference = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
    options = dict(options)
    if "beta1" in options:
        options["betas"] = options.pop("beta1"), options.pop("beta2")
    if "beta2" in options:
        options["alpha"] = options.pop("beta2")
    optimiser = make(reference.values(), lr=0.05, **options)
    scheduler = schedule(optimiser) if schedule else None
    for gradient in gradients:
        for name, tensor in reference.items():
            tensor.grad = gradient[name].clone()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(reference.values(), max_norm)
        optimiser.step()
        if scheduler is not None:
            scheduler.step()
    return {name: tensor.detach() for name, tensor in reference.items()}


@pytest.mark.parametrize(
    ("ours", "theirs", "options"),
    [
        (sgd, torch.optim.SGD, {}),
        (sgd, torch.optim.SGD, {"weight_decay": 0.1}),
        (sgd, torch.optim.SGD, {"momentum": 0.9}),
        (sgd, torch.optim.SGD, {"momentum": 0.1, "nesterov": True, "weight_decay": 5e-4}),
        (adam, torch.optim.Adam, {}),
        (adam, torch.optim.Adam, {"weight_decay": 0.1, "eps": 1e-3}),
        (adam, torch.optim.Adam, {"amsgrad": True, "beta1": 0.5, "beta2": 0.9}),
        (adamw, torch.optim.AdamW, {"weight_decay": 0.1}),
        (adamw, torch.optim.AdamW, {"weight_decay": 0.0, "eps": 1e-3}),
        (
            adamw,
            torch.optim.AdamW,
            {"weight_decay": 2.0, "amsgrad": True, "beta1": 0.5, "beta2": 0.9},
        ),
        (adagrad, torch.optim.Adagrad, {"eps": 1e-8}),
        (adagrad, torch.optim.Adagrad, {"weight_decay": 0.1, "eps": 1e-3}),
        (rmsprop, torch.optim.RMSprop, {"beta2": 0.999}),
        (rmsprop, torch.optim.RMSprop, {"beta2": 0.9, "weight_decay": 0.1, "eps": 1e-3}),
        (rmsprop, torch.optim.RMSprop, {"beta2": 0.9, "weight_decay": 0.1, "momentum": 0.7}),
    ],
)
def test_ten_steps_of_ours_are_ten_steps_of_torchs(
    ours: Any, theirs: Any, options: dict[str, Any]
) -> None:
    assert distance(dict(steps_of(ours(**options))), dict(steps_of_torch(theirs, options))) < 1e-12


def plain_lamb(beta1: float, beta2: float, eps: float, decay: float, lr: float) -> Tensors:
    """Algorithm 2 of the paper, a layer and a number at a time."""
    start, gradients = start_and_gradients()
    ends = {}
    for name, tensor in start.items():
        x, shape = tensor.flatten().tolist(), tensor.shape
        m, v = [0.0] * len(x), [0.0] * len(x)
        for t, gradient in enumerate(gradients, 1):
            u = []
            for i, g in enumerate(gradient[name].flatten().tolist()):
                m[i] = beta1 * m[i] + (1 - beta1) * g
                v[i] = beta2 * v[i] + (1 - beta2) * g**2
                m_hat, v_hat = m[i] / (1 - beta1**t), v[i] / (1 - beta2**t)
                u.append(m_hat / (v_hat**0.5 + eps) + decay * x[i])
            trust = sum(a * a for a in x) ** 0.5 / sum(a * a for a in u) ** 0.5
            x = [a - lr * trust * b for a, b in zip(x, u, strict=True)]
        ends[name] = torch.tensor(x, dtype=DOUBLE).reshape(shape)
    return ends


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_lamb_is_the_algorithm_of_its_paper(decay: float) -> None:
    found = steps_of(lamb(beta1=0.8, beta2=0.95, eps=1e-6, weight_decay=decay))
    expected = plain_lamb(0.8, 0.95, 1e-6, decay, 0.05)
    assert distance(dict(found), dict(expected)) < 1e-12


def test_lamb_steps_as_adam_where_a_tensor_or_its_direction_is_zero() -> None:
    zero = {"w": torch.zeros(3, dtype=DOUBLE)}
    lr, optimiser = torch.tensor(0.1, dtype=DOUBLE), lamb()
    moved, _ = optimiser.update(zero, {"w": torch.ones(3)}, optimiser.init(zero), lr)
    assert moved["w"].tolist() == pytest.approx([-0.1] * 3)
    still, _ = optimiser.update(moved, zero, optimiser.init(zero), lr)
    assert torch.equal(still["w"], moved["w"])


def test_adam_keeps_its_first_steps_exact_in_single_precision() -> None:
    params = {"w": torch.tensor([1.0])}
    pair = adam()
    moved, _ = pair.update(
        params, {"w": torch.tensor([1e-3])}, pair.init(params), torch.tensor(0.1)
    )
    # the first step is lr, whatever the gradient's size
    assert moved["w"].item() == pytest.approx(0.9, abs=2e-6)


@pytest.mark.parametrize("most", [1.0, 20.0, 1e9])
def test_gradients_are_clipped_by_their_norm_over_all_tensors_as_torch_does(most: float) -> None:
    found = steps_of(clipped(sgd(momentum=0.9), most))
    expected = steps_of_torch(torch.optim.SGD, {"momentum": 0.9}, max_norm=most)
    assert distance(dict(found), dict(expected)) < 1e-12


# --- schedules


def warmed(main: Any) -> Any:
    """torch's warm-up of three steps, then a schedule."""

    def both(optimiser: torch.optim.Optimizer) -> Any:
        rise = lr_scheduler.LinearLR(optimiser, start_factor=1 / 4, end_factor=1.0, total_iters=3)
        return lr_scheduler.SequentialLR(optimiser, [rise, main(optimiser)], milestones=[3])

    return both


LINE = partial(lr_scheduler.LinearLR, start_factor=1.0)
COSINE = partial(lr_scheduler.CosineAnnealingLR)
ON_TORCH: list[tuple[str, Any]] = [
    ("constant()", partial(lr_scheduler.ConstantLR, factor=1.0)),
    ("constant(warmup=3)", warmed(partial(lr_scheduler.ConstantLR, factor=1.0))),
    ("exponential(factor=0.7)", partial(lr_scheduler.ExponentialLR, gamma=0.7)),
    ("exponential(factor=0.7, warmup=3)", warmed(partial(lr_scheduler.ExponentialLR, gamma=0.7))),
    ("step(every=4)", partial(lr_scheduler.StepLR, step_size=4)),
    (
        "step(every=2, factor=0.5, warmup=3)",
        warmed(partial(lr_scheduler.StepLR, step_size=2, gamma=0.5)),
    ),
    ("linear(over=6)", partial(LINE, end_factor=0.0, total_iters=6)),
    ("linear(over=8, end=0.2, warmup=3)", warmed(partial(LINE, end_factor=0.2, total_iters=5))),
    ("cosine(over=10)", partial(COSINE, T_max=10)),
    ("cosine(over=13, end=0.2, warmup=3)", warmed(partial(COSINE, T_max=10, eta_min=0.05 * 0.2))),
]


@pytest.mark.filterwarnings("ignore:The epoch parameter")  # inside torch's SequentialLR
@pytest.mark.parametrize(("text", "schedule"), ON_TORCH, ids=[text for text, _ in ON_TORCH])
def test_a_schedule_by_step_is_torchs(text: str, schedule: Any) -> None:
    found = steps_of(scheduled(adam(), SCHEDULES.one(text)))
    expected = steps_of_torch(torch.optim.Adam, {}, schedule)
    assert distance(dict(found), dict(expected)) < 1e-12


@pytest.mark.filterwarnings("ignore:The epoch parameter")
@pytest.mark.parametrize(("text", "schedule"), ON_TORCH, ids=[text for text, _ in ON_TORCH])
def test_a_schedule_by_round_has_torchs_rates(text: str, schedule: Any) -> None:
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.05)
    scheduler, expected = schedule(optimiser), []
    for _ in range(STEPS):
        expected.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        scheduler.step()
    rate = Local(lr=0.05, lr_schedule=text).rate
    assert [rate(t, 1) for t in range(1, STEPS + 1)] == pytest.approx(expected, rel=0, abs=1e-15)


@pytest.mark.parametrize("text", ["linear(over=4, end=0.3)", "cosine(over=4, end=0.3)"])
def test_after_its_rounds_a_schedule_stays_at_its_end(text: str) -> None:
    schedule = SCHEDULES.one(text)
    assert schedule.at(4) > 0.31
    assert [schedule.at(t) for t in (5, 6, 50)] == pytest.approx([0.3] * 3)


def test_a_schedule_multiplies_the_decay() -> None:
    rate = Local(lr=0.5, lr_decay=0.9, lr_schedule="step(every=2, factor=0.1)").rate
    assert rate(4, 1) == pytest.approx(0.5 * 0.9**3 * 0.1)


# --- as options of methods


def test_every_optimiser_is_an_option_of_local_training() -> None:
    for name in OPTIMISERS:
        assert isinstance(Local(optimiser=name).build_optimiser(), Optimiser)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "fedavg(optimiser='adagrad', momentum=0.9)",
        "fedavg(optimiser='lamb', amsgrad=True)",
        "fedavg(optimiser='rmsprop', nesterov=True)",
        "fedavg(optimiser='adamw', momentum=0.9)",
        "fedavg() | server_optimiser(optimiser='sgd', beta2=0.9)",
        "fednova(optimiser='adamw')",
        "scaffold(optimiser='lamb')",
        "fedcm(optimiser='rmsprop')",
    ],
)
def test_options_that_an_optimiser_cannot_use_are_refused_by_name(text: str) -> None:
    with pytest.raises(InputError, match="does not go with"):
        parse(text)


def test_sgd_and_adam_still_ignore_each_others_options() -> None:
    assert parse("fedavg(optimiser='adam', momentum=0.9)") != parse("fedavg(optimiser='adam')")
    assert parse("fedavg(amsgrad=True)") != parse("fedavg()")


def test_new_options_stay_out_of_old_texts() -> None:
    given = parse("fedavg(lr_schedule=None, lr_step_schedule=None, max_gradient_norm=None)")
    assert given == parse("fedavg()")
    assert "schedule" not in given.canonical


def test_schedules_that_mean_the_same_are_the_same() -> None:
    text = "fedavg(lr_schedule='cosine( over = 9 )') | dkd(lr_step_schedule='step(every=2)')"
    method = parse(text)
    assert parse(str(method)) == parse(method.canonical) == method
    whole = "fedavg(lr_schedule='cosine(over=9, end=0, warmup=0)')"
    assert method == parse(f"{whole} | dkd(lr_step_schedule='step(every=2, factor=0.1)')")
    assert method != parse("fedavg(lr_schedule='cosine(over=8)') | dkd()")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cosin(over=3)", "did you mean 'cosine'"),
        ("cosine(length=3)", "'cosine' has no option 'length'"),
        ("cosine()", "'over'"),
        ("linear(over=3, warmup=3)", "over=3"),
        ("cosine(over=3) | step(every=2)", "expected one schedule"),
        ("", "cannot read"),
    ],
)
def test_a_wrong_schedule_is_refused_with_the_name_of_its_option(text: str, said: str) -> None:
    for where in ("fedavg(lr_schedule={!r})", "fedavg() | dkd(lr_step_schedule={!r})"):
        with pytest.raises(InputError, match=rf"method '\w+': lr_\w*schedule.*{said}"):
            parse(where.format(text))


def test_the_american_spelling_is_understood() -> None:
    assert str(parse("fedavg(optimizer='adam')")) == "fedavg(optimiser='adam')"
    assert parse("feddf(server_optimizer='sgd')") == parse("feddf(server_optimiser='sgd')")
    with pytest.raises(InputError, match="optimiser is given twice"):
        parse("fedavg(optimizer='adam', optimiser='sgd')")


# --- on the engines

LOCAL = "epochs=2, batch_size=8, lr=0.02, eps=0.001"
STEPPED = "lr_step_schedule='cosine(over=9, warmup=2)', lr_schedule='linear(over=9)'"
ON_ENGINES = [
    f"fedavg({LOCAL}, optimiser='adamw', weight_decay=0.1, max_gradient_norm=0.5)",
    f"fedavg({LOCAL}, optimiser='lamb', weight_decay=0.1, {STEPPED})",
    f"fedavg({LOCAL}, optimiser='adagrad') | server_optimiser(optimiser='lamb')",
    f"fedavg({LOCAL}, optimiser='rmsprop', momentum=0.5, lr_step_schedule='step(every=2)')",
    f"scaffold({LOCAL}, momentum=0.5, max_gradient_norm=0.5, {STEPPED})",
    f"fedavg({LOCAL}) | dkd(steps=3, batch_size=14, {STEPPED})",
]


@pytest.mark.parametrize("text", ON_ENGINES)
def test_every_engine_agrees_with_serial(text: str) -> None:
    expected, _ = run(Serial, text, norm=False, seeds=(0, 1))
    for strategy in ("vmap", "traced", "loop"):
        found, _ = run(Batched, text, norm=False, seeds=(0, 1), strategy=strategy)
        assert apart(expected, found) < 1e-12
    found, _ = run(Pool, text, norm=False, seeds=(0, 1), workers=2)
    assert apart(expected, found) < 1e-12


def test_clients_of_a_scheduled_round_are_not_moved_by_a_rate_of_zero() -> None:
    data, net = clients(), network()
    text = "fedavg(epochs=1, batch_size=100, lr_schedule='linear(over=1)')"
    one, two = (play(text, data, net, rounds=rounds).params for rounds in (1, 2))
    assert distance(one, two) < 1e-15  # an average of equal models rounds
