"""Bounds, noise and robust rules: what they do to uploads, and what they leave alone."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import trim_mean
from torch import Tensor, nn

from feddkd import METHODS, InputError
from feddkd.method import World
from feddkd.methods import parse
from feddkd.methods.aggregation import Gathering, clipped
from feddkd.models.functional import functional
from feddkd.tensors import Groups, Tensors, trimmed_mean
from feddkd.testing import check_method
from small import clients, distance, network, run

LOCAL = "epochs=1, batch_size=8"
STILL = "epochs=1, batch_size=8, lr=1e-300"  # no client moves, so only noise moves the model


def norm(*groups: Tensors) -> float:
    return float(
        torch.stack(
            [tensor.double().square().sum() for group in groups for tensor in group.values()]
        )
        .sum()
        .sqrt()
    )


def moved(a: Tensors, b: Tensors) -> dict[str, Tensor]:
    return {name: a[name].double() - b[name].double() for name in b}


# --- clip


@given(seed=st.integers(0, 10**6), most=st.floats(1e-3, 1e3), far=st.floats(1e-3, 1e3))
def test_no_update_is_longer_than_the_bound_and_its_direction_stays(
    seed: int, most: float, far: float
) -> None:
    draw = torch.Generator().manual_seed(seed)
    sent = {
        "params": {"w": torch.randn(3, 2, generator=draw, dtype=torch.float64)},
        "buffers": {"n": torch.tensor(4)},
    }
    upload: Groups = {
        "params": {
            "w": sent["params"]["w"] + far * torch.randn(3, 2, generator=draw, dtype=torch.float64)
        },
        "buffers": {"n": torch.tensor(7)},
        "gradient": {"w": far * torch.randn(5, generator=draw, dtype=torch.float64)},
    }
    found = clipped(upload, sent, most)
    before, after = (
        [moved(one["params"], sent["params"]), one["gradient"]] for one in (upload, found)
    )
    assert norm(*after) <= most * (1 + 1e-9) + 1e-12
    assert found["buffers"]["n"] == 7
    if norm(*before) > most:
        assert all(
            torch.allclose(b["w"] * most / norm(*before), a["w"])
            for a, b in zip(after, before, strict=True)
        )


@given(seed=st.integers(0, 10**6), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_an_update_within_the_bound_does_not_change_by_a_bit(seed: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(seed)
    sent, upload = (
        {"params": {"w": torch.randn(9, generator=draw, dtype=dtype)}} for _ in range(2)
    )
    assert torch.equal(clipped(upload, sent, 100.0)["params"]["w"], upload["params"]["w"])


def test_a_client_alone_moves_the_model_by_the_bound() -> None:
    net, data = network(), clients((20,))
    for bound in (0.01, 0.1):
        assert norm(
            moved(
                run(f"fedavg({LOCAL}, clip={bound})", data, net, rounds=1).params, net.state_dict()
            )
        ) == (pytest.approx(bound))


def test_a_bound_that_nobody_reaches_changes_nothing() -> None:
    net, data = network(), clients()
    assert (
        distance(
            run(f"fedavg({LOCAL}, clip=1e6)", data, net).params,
            run(f"fedavg({LOCAL})", data, net).params,
        )
        == 0
    )
    teaching = f"fedavg({LOCAL}) | dkd(steps=3, batch_size=8, weights='examples', momentum=0.5%s)"
    assert (
        distance(
            run(teaching % ", clip=1e6", data, net).params, run(teaching % "", data, net).params
        )
        < 1e-12
    )


def test_a_step_of_dkd_goes_no_further_than_its_bound() -> None:
    net, data = network(), clients()
    average = run(f"fedavg({LOCAL})", data, net, rounds=1).params
    assert (
        norm(
            moved(
                run(
                    f"fedavg({LOCAL}) | dkd(steps=1, lr=0.2, clip=1e-3)", data, net, rounds=1
                ).params,
                average,
            )
        )
        <= 0.2e-3
    )


# --- noise


@pytest.mark.parametrize(("cohort", "m"), [(1.0, 4), (2, 2)])
def test_noise_has_the_deviation_that_was_asked_for_and_is_drawn_anew_every_time(
    cohort: float, m: int
) -> None:
    net = network(hidden=2000)
    data, start = clients((9, 30, 12, 20)), net.state_dict()
    first, second = (
        run(f"fedavg({STILL}, clip=0.5, noise=2.0)", data, net, rounds=t, cohort=cohort).params
        for t in (1, 2)
    )
    distilled = run(
        f"fedavg({STILL}, clip=0.5, noise=2.0) | dkd(steps=1, lr=0.1, clip=3.0, noise=1.5)",
        data,
        net,
        rounds=1,
        cohort=cohort,
    ).params
    draws = [
        moved(first, start),
        moved(second, first),
        {n: t / 0.1 for n, t in moved(distilled, first).items()},
    ]
    flat = [torch.cat([tensor.flatten() for tensor in draw.values()]).numpy() for draw in draws]
    for drawn, deviation in zip(flat, (2.0 * 0.5 / m, 2.0 * 0.5 / m, 1.5 * 3.0 / m), strict=True):
        assert abs(drawn.mean()) < 4.5 * deviation / np.sqrt(drawn.size)
        assert drawn.std() == pytest.approx(deviation, rel=4.5 / np.sqrt(2 * drawn.size))
    for other in flat[1:]:
        assert abs(np.corrcoef(flat[0], other)[0, 1]) < 4.5 / np.sqrt(other.size)


def test_clients_count_alike_under_noise_however_many_examples_they_have() -> None:
    net, data = network(), clients((8, 80))
    ours = run(
        "fedavg(epochs=1, batch_size=100, clip=1e3, noise=1e-15)", data, net, rounds=1
    ).params
    first, second = (
        run("fedavg(epochs=1, batch_size=100)", [one], net, rounds=1).params for one in data
    )
    assert distance(ours, {name: (first[name] + second[name]) / 2 for name in first}) < 1e-11


def test_an_update_that_is_not_finite_stays_unnoticed_under_noise() -> None:
    sent = {"params": {"w": torch.ones(2)}}
    upload = {"params": {"w": torch.tensor([float("nan"), 3.0])}}
    assert torch.equal(clipped(upload, sent, 1.0, hidden=True)["params"]["w"], torch.ones(2))
    assert clipped(upload, sent, 1.0)["params"]["w"].isnan().any()


# --- robust rules


@given(m=st.integers(1, 9), share=st.floats(0, 0.499), seed=st.integers(0, 10**6))
def test_median_and_trimmed_mean_are_numpys_and_scipys(m: int, share: float, seed: int) -> None:
    stacked = torch.randn(
        m, 3, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )
    counters = torch.arange(m)
    median = trimmed_mean({"w": stacked, "n": counters}, Gathering(gather="median").cut(m))
    assert np.allclose(median["w"], np.median(stacked, 0), rtol=1e-14)
    assert median["n"] == m - 1
    trimmed = trimmed_mean({"w": stacked}, Gathering(gather="trimmed", trim=share).cut(m))
    assert np.allclose(trimmed["w"], trim_mean(stacked, share), rtol=1e-13)


@pytest.mark.parametrize(
    ("rule", "holds"),
    [("gather='median'", True), ("gather='trimmed', trim=0.2", True), ("clip=1e6", False)],
)
@pytest.mark.parametrize("where", ["fedavg", "dkd"])
def test_one_client_with_nonsense_does_not_carry_the_model_away(
    where: str, rule: str, holds: bool
) -> None:
    net, data = network(), clients((20, 20, 20, 20, 20))
    data[2] = (1e7 * data[2][0], data[2][1])
    training, teaching = (
        (f"fedavg({LOCAL}, lr=1e-3, {rule})", "")
        if where == "fedavg"
        else (
            f"fedavg({LOCAL}, lr=1e-3, gather='median')",
            f" | dkd(steps=1, batch_size=8, {rule})",
        )
    )
    far = norm(moved(run(training + teaching, data, net, rounds=1).params, net.state_dict()))
    assert (far < 5) is holds


def test_trimming_nobody_is_the_mean_by_clients() -> None:
    net, data = network(), clients()
    text = f"fedavg({LOCAL}) | dkd(steps=2, batch_size=8%s)"
    ours, theirs = (
        run(text % more, data, net).params for more in (", gather='trimmed', trim=0.0", "")
    )
    assert distance(ours, theirs) < 1e-12


# --- what does not go together


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fedavg(noise=1.0)", "noise does not go without clip"),
        ("fedavg(clip=1.0, noise=1.0, gather='median')", "does not go with gather='median'"),
        ("fedavg(clip=0.0)", "must be > 0"),
        ("fedavg(gather='mode')", "must be one of 'mean', 'median', 'trimmed'"),
        ("fedavg(gather='trimmed', trim=0.5)", "must be >= 0 and < 0.5"),
        (
            "fedavg() | dkd(clip=1.0, noise=1.0, weights='examples')",
            "does not go with weights='examples'",
        ),
        ("fedavg() | dkd(steps='auto', clip=1.0)", "do not go with steps='auto'"),
        ("scaffold(clip=1.0)", "method 'scaffold' has no option 'clip'"),
        ("feddistill_plus(clip=1.0, noise=1.0)", "method 'feddistill_plus' has no option 'clip'"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse(text)


def test_noise_is_not_put_on_statistics_that_clients_share() -> None:
    model = functional(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)))
    start = model.initial(("init", 0))
    with pytest.raises(
        InputError, match=r"buffers that this network shares \(1\.num_batches_tracked"
    ):
        parse("fedavg(clip=1.0, noise=1.0)").start(model, *start, World())
    for fine in (
        "fedbn(clip=1.0, noise=1.0)",
        "fedavg(clip=1.0, noise=1.0) | local_bn(private='statistics')",
    ):
        assert "noise" in parse(fine).start(model, *start, World())[0]


def test_options_that_came_later_do_not_change_what_was_spelled_before() -> None:
    for name in METHODS:
        if "gather" in METHODS.options(name):
            written = METHODS[name](clip=None, noise=0.0, gather="mean", trim=0.1)
            assert written.canonical == METHODS[name]().canonical
            assert "clip" not in written.canonical
            assert METHODS[name](clip=2.0) != METHODS[name]()
    assert "clip=2.0, trim=0.2" in parse("fedavg(trim=0.2, clip=2)").canonical


def test_methods_with_these_options_obey_the_laws() -> None:
    text = (
        "fedavg(epochs=1, batch_size=8, clip=0.05, noise=0.5) | dkd(steps=2, batch_size=8,"
        " clip=0.05, gather='trimmed', trim=0.4)"
    )
    check_method(text)
