"""Tests of mini-batches: the examples that a client reads, and their order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feddkd.data.batches import Reads, draw, spared

KEY = (0, 1, 0, 1, 3)
SIZES = st.integers(1, 60)


@given(examples=SIZES, batch_size=SIZES, epochs=st.integers(1, 3))
def test_every_epoch_reads_every_example_once(examples: int, batch_size: int, epochs: int) -> None:
    reads = Reads(batch_size, epochs)
    batches = draw(reads, examples, KEY)
    each = reads.batches_an_epoch(examples)
    assert len(batches) == reads.count(examples) == epochs * -(-examples // batch_size)
    for epoch in range(epochs):
        read = np.concatenate(batches[epoch * each : (epoch + 1) * each])
        assert sorted(read) == list(range(examples))
    assert all(len(batch) == batch_size for batch in batches[: each - 1])


@given(examples=SIZES, batch_size=SIZES, steps=st.integers(1, 20))
def test_steps_read_so_many_batches_epoch_after_epoch(
    examples: int, batch_size: int, steps: int
) -> None:
    batches = draw(Reads(batch_size, steps=steps), examples, KEY)
    assert len(batches) == steps
    whole = draw(Reads(batch_size, epochs=steps), examples, KEY)
    assert all(np.array_equal(a, b) for a, b in zip(batches, whole, strict=False))


@given(examples=SIZES, batch_size=SIZES, epochs=st.integers(1, 3))
def test_dropping_the_last_leaves_whole_batches_or_the_only_one(
    examples: int, batch_size: int, epochs: int
) -> None:
    reads = Reads(batch_size, epochs, drop_last=True)
    batches = draw(reads, examples, KEY)
    assert len(batches) == reads.count(examples)
    assert {len(batch) for batch in batches} == {min(batch_size, examples)}


def test_a_draw_depends_on_the_key_alone() -> None:
    first, again, other = (
        np.concatenate(draw(Reads(4), 20, key)) for key in (KEY, KEY, (*KEY[:-1], 4))
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_epochs_are_shuffled_each_in_its_own_way() -> None:
    batches = draw(Reads(20, epochs=2), 40, KEY)
    assert not np.array_equal(np.concatenate(batches[:2]), np.concatenate(batches[2:]))


@pytest.mark.parametrize(
    "reads", [Reads(20), Reads(99), Reads(3, random=False), Reads(20, steps=1)]
)
def test_what_is_read_whole_or_without_chance_is_read_in_stored_order(reads: Reads) -> None:
    assert np.array_equal(np.concatenate(draw(reads, 20, KEY)), np.arange(20))


@given(
    examples=SIZES,
    batch_size=SIZES,
    steps=st.integers(1, 20),
    drop_last=st.booleans(),
    rounds=st.integers(1, 6),
)
def test_unshuffled_rounds_go_on_through_the_stored_order(
    examples: int, batch_size: int, steps: int, drop_last: bool, rounds: int
) -> None:
    reads = Reads(batch_size, steps=steps, shuffle=False, drop_last=drop_last)
    epoch = draw(Reads(batch_size, random=False, drop_last=drop_last), examples, KEY)
    read = [batch for t in range(1, rounds + 1) for batch in draw(reads, examples, (0, t, 0, 1, 3))]
    assert [batch.tolist() for batch in read] == [
        epoch[at % len(epoch)].tolist() for at in range(rounds * steps)
    ]
    # so do the steps of a round
    assert draw(reads, examples, (0, 1, 0, 2, 3))[0].tolist() == epoch[steps % len(epoch)].tolist()


@given(st.integers(2, 60), st.integers(1, 20), st.integers(1, 9))
def test_what_is_set_aside_is_never_read_and_is_the_same_all_round(
    examples: int, spare: int, step: int
) -> None:
    reads = Reads(8, steps=3, spare=spare)
    aside = spared(reads, examples, (0, 1, 1, step, 4))
    assert 1 <= len(aside) <= max(spare, 1)
    assert (aside == spared(reads, examples, (0, 1, 1, 1, 4))).all()
    read = np.concatenate(draw(reads, examples, (0, 1, 1, step, 4)))
    assert not set(read) & set(aside)
    assert set(read) | set(aside) <= set(range(examples))


def test_an_only_example_is_read_and_set_aside() -> None:
    reads = Reads(8, steps=1, spare=4)
    assert (
        spared(reads, 1, (0, 1, 1, 1, 0)).tolist()
        == [0]
        == draw(reads, 1, (0, 1, 1, 1, 0))[0].tolist()
    )
