"""Compression of uploads: the papers' formulas, what is lost, what is remembered, what it costs."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from feddkd import InputError
from feddkd.method import Codec
from feddkd.methods import parse
from plain_robust import Largest, PlainRobust, rounded
from small import clients, distance, network, run

LOCAL = "epochs=1, batch_size=8, lr=0.1"
FEDDKD = f"fedavg({LOCAL}) | dkd(steps=2, batch_size=8, lr=0.3)"
PIECES = ["quantise()", "quantise(to='bf16')", "topk(share=0.2)"]
ENTRIES = 7 * 5 + 7 + 3 * 7 + 3  # of the small network


def codec(piece: str) -> Codec:
    found = parse(piece).codec
    assert found is not None
    return found


def tensors(seed: int, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = {"b": (4, 3), "a": (5,), "zero": (2,)}
    found = {
        name: torch.randn(shape, generator=draw, dtype=dtype) for name, shape in shapes.items()
    }
    return {**found, "zero": torch.zeros(2, dtype=dtype)}


def through(piece: str, group: dict[str, Tensor], key: int = 7) -> dict[str, Tensor]:
    """Return a group as the server reads it."""
    found = codec(piece)
    message = found.encode(group, torch.tensor(key))
    assert found.problem(message, group) == ""
    return found.decode(message, group)


# --- what is lost


@pytest.mark.parametrize("piece", PIECES[:2])
def test_rounding_is_right_on_average(piece: str) -> None:
    group, draws = tensors(1), 500
    sums = {name: torch.zeros_like(tensor) for name, tensor in group.items()}
    furthest = 0.0
    for key in range(draws):
        found = through(piece, group, key)
        sums = {name: sums[name] + found[name] for name in sums}
        furthest = max(furthest, distance(found, group))
    mean = {name: tensor / draws for name, tensor in sums.items()}
    assert 0 < furthest < 0.05
    assert distance(mean, group) < 5 * furthest / np.sqrt(draws)


@given(seed=st.integers(0, 10**6), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_what_fits_the_short_type_travels_to_the_bit(seed: int, dtype: torch.dtype) -> None:
    exact = {n: t.to(torch.bfloat16).to(dtype) for n, t in tensors(seed, dtype).items()}
    assert distance(through("quantise(to='bf16')", exact, seed), exact) == 0


@given(seed=st.integers(0, 10**6), dtype=st.sampled_from([torch.float32, torch.float64]))
def test_the_largest_entries_travel_to_the_bit_and_no_others(seed: int, dtype: torch.dtype) -> None:
    group = tensors(seed, dtype)
    found = through("topk(share=0.3)", group)
    sent = {name: tensor != 0 for name, tensor in found.items()}
    assert sum(int(mask.sum()) for mask in sent.values()) == int(0.3 * 19)
    assert all(torch.equal(found[name][sent[name]], group[name][sent[name]]) for name in group)
    smallest = min(float(t[sent[n]].abs().min()) for n, t in group.items() if sent[n].any())
    assert all((t[~sent[n]].abs() <= smallest).all() for n, t in group.items())


def test_sending_everything_changes_no_bit() -> None:
    net, data = network(), clients()
    plain = run(FEDDKD, data, net)
    everything = run(f"{FEDDKD} | topk(share=1.0)", data, net)
    assert distance(everything.params, plain.params) == 0
    assert everything.history == plain.history


@given(seed=st.integers(0, 10**6), rounds=st.integers(1, 6))
def test_what_is_sent_and_what_is_left_add_up_to_the_updates(seed: int, rounds: int) -> None:
    largest, found = Largest(0.1), codec("topk(share=0.1)")
    rest = {name: torch.zeros_like(t) for name, t in tensors(0).items()}
    total, sent = (dict(rest) for _ in range(2))
    for t in range(rounds):
        update = tensors(seed + t)
        total = {name: total[name] + update[name] for name in total}
        whole = {name: update[name] + rest[name] for name in rest}
        message = found.decode(found.encode(whole, torch.tensor(0)), whole)
        rest = {name: whole[name] - message[name] for name in whole}
        sent = {name: sent[name] + message[name] for name in sent}
        vector = np.concatenate([update[name].flatten().numpy() for name in update])
        theirs = largest(vector, 0, 0, 0)
        assert np.allclose(np.concatenate([message[n].flatten() for n in update]), theirs)
    assert distance({n: sent[n] + rest[n] for n in sent}, total) < 1e-12


# --- in a run, against plain PyTorch


@pytest.mark.parametrize("engine", ["serial", "batched", "pool"])
@pytest.mark.parametrize("piece", PIECES)
def test_a_run_is_that_of_the_plain_loop(piece: str, engine: str) -> None:
    net, data = network(), clients((12, 20, 33, 16, 9))
    like: dict[str, Tensor] = dict(net.named_parameters())
    change: Any = {
        "quantise()": rounded("int8", like),
        "quantise(to='bf16')": rounded("bf16", like),
        "topk(share=0.2)": Largest(0.2),
    }[piece]
    plain = PlainRobust.of(net, data, steps=2, lr=0.1, dkd_lr=0.3, compress=change)
    plain.run(rounds=4, cohort=3)
    ours = run(f"{FEDDKD} | {piece}", data, net, rounds=4, cohort=3, engine=engine)
    assert distance(ours.params, plain.params) < 1e-10


@pytest.mark.parametrize(
    ("piece", "each"),
    [
        ("quantise()", ENTRIES + 4 * 4),  # a scale for each tensor
        ("quantise(to='bf16')", 2 * ENTRIES),
        ("topk(share=0.1)", 6 * (4 + 4)),
    ],
)
@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_bytes_are_those_of_the_messages(piece: str, each: int, engine: str) -> None:
    net, data = network(), clients()
    row = run(f"{FEDDKD} | {piece}", data, net, engine=engine, dtype="float32").history[-1]
    plain = run(FEDDKD, data, net, dtype="float32").history[-1]
    assert row["bytes_up"] == 2 * (1 + 2) * 3 * each
    assert plain["bytes_up"] == 2 * (1 + 2) * 3 * 4 * ENTRIES
    assert row["bytes_down"] == plain["bytes_down"]


# --- what does not go together


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fedavg(clip=1.0) | quantise()", "clip"),
        ("fedavg(clip=1.0, noise=1.0) | topk()", "clip"),
        ("fedavg() | quantise() | topk()", "twice"),
        ("fedavg() | dkd(steps='auto') | topk()", "auto"),
        ("fedma() | topk()", "shapes"),
        ("feddistill() | quantise()", "nothing to compress"),
        ("fedavg() | topk(share=0.0)", "share"),
        ("fedavg() | quantise(to='int4')", "int8"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        parse(text).check_order()


@pytest.mark.parametrize(
    ("piece", "change"),
    [
        ("topk(share=0.3)", lambda m: m["places"]["all"].__setitem__(0, -1)),
        ("topk(share=0.3)", lambda m: m["places"]["all"].__setitem__(-1, 19)),
        (
            "topk(share=0.3)",
            lambda m: m["places"]["all"].fill_(3),
        ),
        ("quantise()", lambda m: m["scales"]["a"].neg_()),
        ("quantise()", lambda m: m["codes"]["a"].fill_(-128)),
    ],
)
def test_a_message_that_no_client_writes_is_noticed(piece: str, change: Any) -> None:
    group, found = tensors(2), codec(piece)
    message = found.encode(group, torch.tensor(1))
    assert found.problem(message, group) == ""
    change(message)
    assert found.problem(message, group) != ""
