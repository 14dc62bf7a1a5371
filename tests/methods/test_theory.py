"""The paper's propositions as numbers:

when averaging parameters is right, when not, and what distillation does about it.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn.functional import log_softmax, softmax

from feddkd import dkd, fedavg, functional
from feddkd.engines.interface import Order
from feddkd.engines.serial import Serial
from feddkd.method import Batch, Gradient, Method
from feddkd.models.functional import Model
from feddkd.tensors import Groups, Tensors, stack, weighted_mean
from small import Pair, clients, distance, federation, network

Weights = dict[str, Tensor]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def distilled(
    method: Method, model: Model, teachers: list[Weights], start: Weights, data: list[Pair]
) -> Weights:
    """Return the weights after the J distillation exchanges of a method, without local training.

    The teachers are given.
    """
    engine = Serial(model, [federation(data)], [{}], torch.float64)
    engine.memos = {(0, k): {"model": teacher} for k, teacher in enumerate(teachers)}
    state: Groups = {"params": start, "buffers": {}}
    for exchange in method.plan(1)[1:]:
        rates = exchange.rates(1, next(iter(start.values())))
        order = Order(
            0, {**state, "rates": rates}, tuple(range(len(data))), (0, 1, 1, exchange.step)
        )
        (reply,) = engine.exchange(exchange, [order])
        state = exchange.phase.server(model, state, reply.collected, rates)
    return dict(state["params"])


def squared(method: Method) -> Method:
    """DKD with div(u, v) = |u - v|^2 on the outputs, the divergence of Corollary 1."""
    local, distil = method.phases
    assert isinstance(distil.client, Gradient)

    def loss(
        model: Model, w: Tensors, sent: Groups, memo: Groups, batch: Batch, taught: Tensor
    ) -> Tensor:
        return (
            ((model(w, {}, batch.x, mode="eval").logits - taught) ** 2).sum(1) * batch.share
        ).sum()

    return replace(
        method, phases=(local, replace(distil, client=replace(distil.client, loss=loss)))
    )


# --- Corollary 1: a linear model and the squared divergence


def linear_clients(homogeneous: bool) -> tuple[Model, list[Weights], list[Pair]]:
    inputs = [
        random(30, 4, seed=0 if homogeneous else k) * (1 if homogeneous else 1 + k)
        for k in range(3)
    ]
    teachers = [
        {"weight": random(2, 4, seed=10 + k), "bias": random(2, seed=20 + k)} for k in range(3)
    ]
    return (
        functional(nn.Linear(4, 2)),
        teachers,
        [(x, torch.zeros(30, dtype=torch.int64)) for x in inputs],
    )


def test_corollary_1_a_linear_models_average_is_the_fixed_point_on_homogeneous_data() -> None:
    model, teachers, data = linear_clients(homogeneous=True)
    average = weighted_mean(stack(teachers), [1, 1, 1])
    after = distilled(
        squared(fedavg() | dkd(steps=5, batch_size=30, lr=0.05)), model, teachers, average, data
    )
    assert distance(after, average) < 1e-12


def test_corollary_1_fails_on_heterogeneous_data_where_dkd_finds_the_least_squares() -> None:
    model, teachers, data = linear_clients(homogeneous=False)
    average = weighted_mean(stack(teachers), [1, 1, 1])
    after = distilled(
        squared(fedavg() | dkd(steps=150, batch_size=30, lr=0.1)), model, teachers, average, data
    )
    augmented = torch.cat([torch.cat([x, torch.ones(30, 1, dtype=x.dtype)], 1) for x, _ in data])
    outputs = torch.cat(
        [x @ w["weight"].T + w["bias"] for w, (x, _) in zip(teachers, data, strict=True)]
    )
    best = torch.linalg.lstsq(augmented, outputs).solution
    assert distance(average, after) > 0.1
    assert distance(after, {"weight": best[:-1].T, "bias": best[-1]}) < 1e-6


# --- Proposition 2: any model, second order


def divergence(
    net: nn.Module, teachers: list[Weights], inputs: list[Tensor], q: list[float], w: Weights
) -> Tensor:
    """L2' = sum_k q_k E_{D_k} KL(f(w_k) || f(w)), in plain PyTorch."""
    total = torch.zeros((), dtype=torch.float64)
    for q_k, teacher, x in zip(q, teachers, inputs, strict=True):
        log_t, log_s = (
            log_softmax(functional_call(net, weights, (x,)), 1) for weights in (teacher, w)
        )
        total = total + q_k * (log_t.exp() * (log_t - log_s)).sum(1).mean()
    return total


def gradient_at_average(homogeneous: bool, epsilon: float) -> float:
    """|grad L2'| at sum_k q_k w_k, for clients at w* + epsilon d_k."""
    # smooth, as the theory asks
    net, q = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double(), [0.2, 0.3, 0.5]
    net.load_state_dict(network().state_dict())
    centre = {name: p.detach() for name, p in net.named_parameters()}
    teachers = [
        {
            name: p + epsilon * random(*p.shape, seed=100 * k + i)
            for i, (name, p) in enumerate(centre.items())
        }
        for k in range(3)
    ]
    inputs = [
        random(40, 5, seed=0 if homogeneous else k) + (0 if homogeneous else 2 * k)
        for k in range(3)
    ]
    slope = grad(lambda w: divergence(net, teachers, inputs, q, w))(
        weighted_mean(stack(teachers), q)
    )
    return float(torch.cat([tensor.flatten() for tensor in slope.values()]).norm())


def test_proposition_2_on_homogeneous_data_the_weighted_average_is_stationary_to_second_order() -> (
    None
):
    """The gradient there falls with epsilon squared: the quadratic form's own gradient, of order
    epsilon, vanishes.
    """
    ratios = [
        gradient_at_average(True, epsilon) / gradient_at_average(True, epsilon / 2)
        for epsilon in (1e-3, 1e-4)
    ]
    assert ratios == pytest.approx([4, 4], rel=0.15)


def test_proposition_2_needs_homogeneous_data() -> None:
    ratios = [
        gradient_at_average(False, epsilon) / gradient_at_average(False, epsilon / 2)
        for epsilon in (1e-3, 1e-4)
    ]
    assert ratios == pytest.approx([2, 2], rel=0.15)
    assert gradient_at_average(False, 1e-4) > 100 * gradient_at_average(True, 1e-4)


# --- Proposition 1: the bound that FedDKD minimises


@pytest.mark.parametrize("seed", range(5))
def test_proposition_1_the_squared_total_variation_is_bounded_by_both_divergences(
    seed: int,
) -> None:
    inputs = [random(50, 5, seed=seed + k) + k for k in range(3)]
    truths = [softmax(3 * random(50, 3, seed=50 + seed + k), 1) for k in range(3)]
    teachers = [network(seed=seed + 1 + k).state_dict() for k in range(3)]
    student, q = network(seed=seed + 9).state_dict(), [0.5, 0.25, 0.25]
    left = first = torch.zeros(())
    for q_k, x, truth, teacher in zip(q, inputs, truths, teachers, strict=True):
        p, t = (softmax(functional_call(network(), w, (x,)), 1) for w in (student, teacher))
        left = left + q_k * ((truth - p).abs().sum(1) / 2).square().mean()
        first = first + q_k * (truth * (truth.log() - t.log())).sum(1).mean()
    assert left <= first + divergence(network(), teachers, inputs, q, student)


def sides(
    truths: list[Tensor], teachers: list[Tensor], students: list[Tensor], q: list[float]
) -> tuple[float, float, float]:
    """Return the squared total variation, L1' and L2' of given outputs: 1-norms and logarithms."""
    variation = first = second = 0.0
    for q_k, y, t, p in zip(q, truths, teachers, students, strict=True):
        variation += q_k * float(((y - p).abs().sum(1) / 2).square().mean())
        first += q_k * float((y * (y.log() - t.log())).sum(1).mean())
        second += q_k * float((t * (t.log() - p.log())).sum(1).mean())
    return variation, first, second


def between(seed: int, epsilon: float, share: float) -> tuple[float, float, float]:
    """Return the sides where truth and student are epsilon apart on two classes of equal chance,
    and the teacher lies at this share of the way.
    """
    y = torch.full((20, 2), 0.5, dtype=torch.float64)
    step = epsilon * torch.tensor([1.0, -1.0], dtype=torch.float64)
    direction = random(20, 1, seed=seed).sign() * step
    return sides([y], [y + share * direction], [y + direction], [1.0])


@pytest.mark.parametrize("seed", range(3))
def test_proposition_1_is_tight_where_student_truth_and_teacher_are_near(seed: int) -> None:
    """Pinsker: |y - t|^2 <= KL / 2. For two classes of equal chance both sides agree to the order
    epsilon^2, and with the teacher half-way the two divergences together are exactly the bound.
    """
    for epsilon in (0.1, 0.01):
        variation, first, second = between(seed, epsilon, 0.5)
        assert variation <= first + second
        assert variation / (first + second) == pytest.approx(1, rel=epsilon)
    assert first < variation * 0.6  # without L2', or without L1', it is no bound
    assert second < variation * 0.6


@pytest.mark.parametrize("share", [0.0, 0.25, 0.75, 1.0])
def test_proposition_1_holds_wherever_the_teacher_lies(share: float) -> None:
    variation, first, second = between(0, 0.05, share)
    assert variation <= first + second
    expected = 2 * (share**2 + (1 - share) ** 2)  # of the variation, to second order
    assert (first + second) / variation == pytest.approx(expected, rel=0.02)


# --- the permutation example of the introduction


def test_the_average_of_two_permuted_copies_is_wrong_and_distillation_recovers_the_function() -> (
    None
):
    data = clients((200, 200), features=5)
    model, hidden = functional(network(hidden=12)), 12
    original = {name: 3 * p.detach() for name, p in network(hidden=hidden).named_parameters()}
    order = torch.randperm(hidden, generator=torch.Generator().manual_seed(4))
    permuted = {
        "0.weight": original["0.weight"][order],
        "0.bias": original["0.bias"][order],
        "2.weight": original["2.weight"][:, order],
        "2.bias": original["2.bias"],
    }
    inputs = [x for x, _ in data]

    def wrong(w: Weights) -> float:
        return divergence(
            network(hidden=hidden), [original, permuted], inputs, [0.5, 0.5], w
        ).item()

    average = weighted_mean(stack([original, permuted]), [1, 1])
    after = distilled(
        fedavg() | dkd(steps=1000, batch_size=100, lr=1.0),
        model,
        [original, permuted],
        average,
        data,
    )
    assert wrong(permuted) < 1e-12  # both clients compute the same function,
    assert wrong(average) > 0.1  # their average computes another,
    assert wrong(after) < 0.05 * wrong(average)  # and distillation finds the way back
