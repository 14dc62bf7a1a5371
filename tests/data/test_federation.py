"""Tests of federations: every example belongs to one client or to the server."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from feddkd import InputError
from feddkd.data.division import divide, stratified
from feddkd.data.examples import Examples
from feddkd.data.federation import SERVER, Federation, assemble
from feddkd.data.partitions.registry import PARTITIONS, Split
from feddkd.data.sources import SOURCES
from feddkd.data.transforms import transform

SHARES = st.floats(0, 1).map(lambda share: round(share, 2))


def divided(
    partition: str = "iid()",
    data: str = "digits()",
    clients: int = 5,
    training: float | None = None,
    validation: float = 0.1,
    seed: int = 0,
) -> tuple[Federation, Split]:
    source = SOURCES.one(data).load(None)
    steps = transform("", source.scale)
    return divide(
        source,
        PARTITIONS.one(partition),
        steps,
        clients=clients,
        training=training,
        validation=validation,
        key=(seed,),
    )


def test_emnists_half_and_tenth_are_exact_in_every_class() -> None:
    labels = np.random.default_rng(0).permutation(np.repeat(np.arange(26), 4_800))
    held_out, kept = stratified(labels, 0.1, 0.5, (0,))
    assert (np.bincount(labels[held_out]) == 480).all()
    assert (np.bincount(labels[kept]) == 2_400).all()
    assert not set(held_out) & set(kept)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), SHARES, SHARES, st.integers(0, 9))
def test_parts_are_disjoint_and_have_their_share_of_every_class(
    sizes: list[int], first: float, second: float, seed: int
) -> None:
    labels = np.repeat(np.arange(len(sizes)), sizes)
    if first + second > 1:
        first, second = 1 - first, 1 - second
    parts = stratified(labels, first, second, (seed,))
    both = np.concatenate(parts)
    assert len(np.unique(both)) == len(both)
    for part, share in zip(parts, (first, second), strict=True):
        counts = np.bincount(labels[part], minlength=len(sizes))
        assert (np.abs(counts - share * np.array(sizes)) <= 1).all()
        assert (np.diff(part) > 0).all()


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), SHARES)
def test_shares_that_add_up_to_one_leave_nobody_out(sizes: list[int], first: float) -> None:
    labels = np.repeat(np.arange(len(sizes)), sizes)
    parts = stratified(labels, first, 1 - first, (0,))
    assert sorted(np.concatenate(parts)) == list(range(len(labels)))
    assert all(
        np.array_equal(a, b)
        for a, b in zip(parts, stratified(labels, first, round(1 - first, 12), (0,)), strict=True)
    )


def test_shares_beyond_the_whole_are_refused() -> None:
    with pytest.raises(InputError, match=r"validation 0\.3 and training 0\.8"):
        stratified(np.zeros(10, dtype=np.int64), 0.3, 0.8, (0,))


def test_clients_validation_and_test_share_no_example_and_keep_their_labels() -> None:
    federation, _ = divided("dirichlet(alpha=0.5)")
    lists = [*federation.train, federation.validation, federation.test]
    together = np.concatenate(lists)
    assert sorted(together) == list(range(len(federation.y)))
    source = SOURCES.one("digits").load(None)
    assert torch.equal(federation.x[together], torch.cat([source.train.x, source.test.x])[together])
    assert (federation.test >= len(source.train)).all()
    assert federation.shape == (1, 8, 8)
    assert federation.sizes == [len(own) for own in federation.train]


def test_a_client_holds_what_the_partition_gave_it() -> None:
    federation, _ = divided("classes(per_client=2)", clients=10)
    assert all(len(np.unique(federation.y[own])) == 2 for own in federation.train)


def test_the_key_decides_validation_and_partition() -> None:
    first, again, other = (divided(seed=seed)[0] for seed in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(first.train, again.train, strict=True))
    assert not np.array_equal(first.validation, other.validation)
    assert not np.array_equal(first.train[0], other.train[0])


def test_without_validation_everything_is_for_training() -> None:
    federation, _ = divided(validation=0.0)
    assert len(federation.validation) == 0
    assert sum(federation.sizes) == 1438


def test_clients_with_tests_of_their_own_are_tested_on_them_and_the_server_on_all() -> None:
    federation, _ = divided("dirichlet(form='fedgen', ratio=0.9, alpha=10, minimum=1)", clients=3)
    assert federation.own_test is not None
    own = federation.indices("test", 1)
    assert np.array_equal(own, federation.own_test[1])
    assert (own >= 1438).all()
    assert np.array_equal(federation.indices("test", SERVER), federation.test)
    assert np.array_equal(federation.indices("train", 1), federation.train[1])
    own = federation.indices("validation", 1)
    assert set(own) < set(federation.validation)
    assert np.array_equal(federation.indices("validation", SERVER), federation.validation)


@pytest.mark.parametrize(
    "partition",
    ["iid()", "shards()", "classes(per_client=2)", "dirichlet(alpha=1)", "classes(form='star')"],
)
def test_too_many_clients_or_too_little_data_are_errors_in_words(partition: str) -> None:
    with pytest.raises(InputError):
        divided(partition, clients=5000)
    with pytest.raises(InputError):
        divided(partition, training=0.0001)


def test_a_saved_partition_gives_everybody_the_same_again(tmp_path: Path) -> None:
    federation, split = divided("dirichlet(alpha=0.5)")
    split.save(tmp_path / "split.npz")
    again, same = divided(f"saved(path={str(tmp_path / 'split.npz')!r})")
    assert all(np.array_equal(a, b) for a, b in zip(federation.train, again.train, strict=True))
    assert same.digest == split.digest


def test_a_saved_partition_stands_whatever_the_seed_and_validation_is_drawn_from_the_rest(
    tmp_path: Path,
) -> None:
    federation, split = divided("dirichlet(alpha=0.5)", training=0.5)
    split.save(tmp_path / "split.npz")
    again, _ = divided(f"saved(path={str(tmp_path / 'split.npz')!r})", seed=1)
    assert all(np.array_equal(a, b) for a, b in zip(federation.train, again.train, strict=True))
    assert not np.array_equal(federation.validation, again.validation)
    assert len(again.validation) == len(federation.validation)
    assert not set(again.validation) & set(np.concatenate(again.train))
    with pytest.raises(InputError, match="the partition leaves"):
        divided(f"saved(path={str(tmp_path / 'split.npz')!r})", validation=0.6)


def examples(count: int = 4, features: int = 3, dtype: torch.dtype = torch.float32) -> Examples:
    return Examples(
        torch.arange(count * features, dtype=dtype).reshape(count, features), torch.arange(count)
    )


def test_examples_that_are_divided_already_stay_where_they_are() -> None:
    parts = [examples(4), examples(2), examples(5), examples(3)]
    federation = assemble(parts[:2], parts[2], parts[3], transform(""))
    lists = [*federation.train, federation.test, federation.validation]
    assert all(
        torch.equal(federation.x[own], part.x) for own, part in zip(lists, parts, strict=True)
    )
    assert all(
        torch.equal(federation.y[own], part.y) for own, part in zip(lists, parts, strict=True)
    )
    assert federation.classes == 5
    assert len(assemble(parts[:2], parts[2], None, transform("")).validation) == 0


@pytest.mark.parametrize(
    ("clients", "test", "says"),
    [
        ([], examples(), "at least one client"),
        ([examples(), examples(0)], examples(), "one of them is empty"),
        ([examples()], examples(features=4), r"\(3,\) torch.float32, others \(4,\)"),
        ([examples()], examples(dtype=torch.float64), "others .* torch.float64"),
    ],
)
def test_examples_that_do_not_go_together_are_refused(
    clients: list[Examples], test: Examples, says: str
) -> None:
    with pytest.raises(InputError, match=says):
        assemble(clients, test, None, transform(""))


@pytest.mark.parametrize("partition", ["iid()", "dirichlet(alpha=1)"])
def test_public_examples_are_nobodys_training_validation_or_test_examples(partition: str) -> None:
    source = SOURCES.one("digits()").load(None)
    federation, _ = divide(
        source,
        PARTITIONS.one(partition),
        transform("", source.scale),
        clients=5,
        training=None,
        validation=0.1,
        key=(0,),
        public=0.2,
    )
    held = [federation.public, federation.validation, federation.test, *federation.train]
    assert len(np.unique(np.concatenate(held))) == sum(map(len, held)) == len(federation.y)
    share = len(federation.public) / (len(federation.public) + sum(federation.sizes))
    assert share == pytest.approx(0.2, abs=0.01)
    assert federation.counts("train+public") == [
        n + len(federation.public) for n in federation.sizes
    ]


def test_public_examples_do_not_change_the_validation_set() -> None:
    source = SOURCES.one("digits()").load(None)
    plain, shared = (
        divide(
            source,
            PARTITIONS.one("iid()"),
            transform(""),
            clients=5,
            training=None,
            validation=0.1,
            key=(0,),
            public=public,
        )[0]
        for public in (0.0, 0.1)
    )
    assert (plain.validation == shared.validation).all()
    assert not len(plain.public)
