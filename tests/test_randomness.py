"""A draw is a function of its key and of nothing else."""

import hashlib
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from feddkd.randomness import Key, fold, generator, uniform

KEYS = st.lists(st.integers(-3, 10**6) | st.text(max_size=5), max_size=5).map(tuple)


def key(number: int = 1) -> torch.Tensor:
    return torch.tensor(fold(("test", number)))


@given(KEYS, KEYS)
def test_two_keys_draw_the_same_only_if_they_are_the_same(a: Key, b: Key) -> None:
    assert (fold(a) == fold(b)) == (a == b)
    assert (generator(a).integers(2**62) == generator(b).integers(2**62)) == (a == b)
    assert 0 <= fold(a) < 2**63


def test_prefixes_neighbours_and_other_types_do_not_collide() -> None:
    keys: list[Key] = [
        (),
        (1,),
        ("1",),
        (1, 1),
        (11,),
        (1, 11),
        (11, 1),
        ("1, 1",),
        ("a", "b"),
        ("a, b",),
        ("a', 'b",),
        (-1,),
    ]
    keys += [
        (seed, t, phase, step, k)
        for seed, t, phase, step, k in itertools.product(range(4), repeat=5)
    ]
    assert len({fold(k) for k in keys}) == len(keys)
    assert len({generator(k).integers(2**62) for k in keys}) == len(keys)


@pytest.mark.parametrize("stream", [0, 1, 1000])
@pytest.mark.parametrize("number", [1, 2])
def test_uniform_numbers_fill_the_interval_evenly(number: int, stream: int) -> None:
    count = 100_000
    drawn = uniform(key(number), (count,), stream).double().numpy()
    assert drawn.min() >= 0
    assert drawn.max() < 1
    histogram = np.bincount((drawn * 20).astype(int), minlength=20)
    # chi-square with 19 degrees of freedom: p about 4e-6
    assert ((histogram - count / 20) ** 2 / (count / 20)).sum() < 60
    assert abs(drawn.var() - 1 / 12) < 0.002
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 0.02


def test_neighbouring_keys_and_streams_are_unrelated() -> None:
    draws = [
        uniform(torch.tensor(k), (20_000,), stream)
        for k in (0, 1, 2, 2**32, 2**33)
        for stream in (0, 1, 2)
    ]
    assert torch.corrcoef(torch.stack(draws)).fill_diagonal_(0).abs().max() < 0.05


def test_uniform_numbers_depend_on_key_stream_and_position_alone() -> None:
    drawn = uniform(key(1), (6, 4))
    assert torch.equal(drawn, uniform(key(1), (6, 4)))
    assert torch.equal(drawn.flatten()[:8], uniform(key(1), (8,)))
    assert not torch.equal(drawn, uniform(key(2), (6, 4)))
    assert not torch.equal(drawn, uniform(key(1), (6, 4), stream=1))
    assert len(set(drawn.flatten().tolist())) == drawn.numel()
    assert drawn.dtype == torch.float32


def test_uniform_numbers_are_the_same_under_vmap_as_one_by_one() -> None:
    keys = torch.stack([key(number) for number in range(5)])
    together = torch.vmap(lambda k: uniform(k, (3, 2), 7))(keys)
    assert torch.equal(together, torch.stack([uniform(k, (3, 2), 7) for k in keys]))


def test_no_draw_touches_the_global_generators() -> None:
    before = torch.get_rng_state(), str(np.random.get_state())
    uniform(key(), (10,))
    generator(("a",)).normal(size=10)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == str(np.random.get_state())


def test_a_keys_generator_is_philox_with_the_keys_digest() -> None:
    key = ("batches", 3, 1, 0, 2, 7)
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    expected = np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))
    assert (generator(key).permutation(1000) == expected.permutation(1000)).all()
