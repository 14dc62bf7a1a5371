"""Tests and validation of a client's own, and what differs between clients besides their lists."""

from typing import Any

import numpy as np
import pytest
import torch

from feddkd.data.division import divide
from feddkd.data.examples import Data, Examples, from_arrays
from feddkd.data.federation import Federation
from feddkd.data.partitions.registry import Split, find_partition
from feddkd.data.transforms import transform
from feddkd.errors import InputError
from feddkd.randomness import generator

CLIENTS, CLASSES = 5, 4
RANDOM = generator(("own tests",))
PARTITIONS = [
    "iid()",
    "classes(per_client=2)",
    "dirichlet(alpha=0.3)",
    "dirichlet(alpha=0.3, form='fedma')",
    "dirichlet(alpha=0.3, form='mixtures')",
    "shards()",
    "quantity()",
    "power_law()",
    "owners()",
    "domains()",
    "clusters()",
]


def examples(count: int) -> Examples:
    """Return images whose brightness is that of their owner."""
    y, owner = RANDOM.integers(0, CLASSES, count), np.sort(RANDOM.integers(0, CLIENTS, count))
    x = (40 * owner[:, None, None, None] + RANDOM.integers(0, 20, (count, 3, 6, 6))).astype(
        np.uint8
    )
    return Examples(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(owner))


DATA = from_arrays(examples(600), examples(300))


def divided(
    text: str, data: Data = DATA, own: bool = True, seed: int = 0, **changes: Any
) -> tuple[Federation, Split]:
    given: dict[str, Any] = {
        "clients": CLIENTS,
        "training": None,
        "validation": 0.2,
        "key": (seed,),
        "own_tests": own,
    }
    return divide(data, find_partition(text), transform("", data.scale), **{**given, **changes})


def shares(kinds: np.ndarray, at: np.ndarray) -> np.ndarray:
    return np.bincount(kinds[at], minlength=int(kinds.max()) + 1) / len(at)


@pytest.mark.parametrize("text", PARTITIONS)
def test_every_partition_can_give_clients_tests_of_their_own(text: str) -> None:
    federation, _ = divided(text)
    assert federation.own_test is not None
    assert federation.own_validation is not None
    for lists in (federation.own_test, federation.own_validation):
        values = np.concatenate(list(lists))
        assert len(lists) == CLIENTS
        assert all(len(part) for part in lists)
        assert len(np.unique(values)) == len(values)
        assert not set(values) & set(federation.pooled)
    assert set(np.concatenate(list(federation.own_test))) <= set(federation.test)


@pytest.mark.parametrize("text", ["iid()", "dirichlet(alpha=0.3)", "classes(per_client=2)"])
def test_own_tests_have_the_labels_of_the_training_examples(text: str) -> None:
    data = from_arrays((DATA.train.x, DATA.train.y), (DATA.test.x, DATA.test.y))
    federation, _ = divided(text, data)
    y = federation.y.numpy()
    for train, test in zip(federation.train, federation.own_test or (), strict=True):
        if len(test) >= 10:
            assert np.abs(shares(y, train) - shares(y, test)).sum() / 2 < 0.15


def test_tests_that_a_partition_deals_give_way_to_own_tests() -> None:
    data = from_arrays((DATA.train.x, DATA.train.y), (DATA.test.x, DATA.test.y))
    text = "dirichlet(alpha=0.5, form='fedgen', minimum=1, ratio=0.9)"
    apart = {}
    for own in (True, False):
        federation, _ = divided(text, data, own)
        y = federation.y.numpy()
        pairs = zip(federation.train, federation.own_test or (), strict=True)
        apart[own] = [np.abs(shares(y, a) - shares(y, b)).sum() / 2 for a, b in pairs]
    assert np.mean(apart[True]) < 0.1 < np.mean(apart[False])


def test_every_owner_has_validation_examples_of_its_own() -> None:
    y = torch.zeros(200, dtype=torch.int64)
    owner = torch.arange(200) // 10
    part = Examples(torch.zeros(200, 2), y, owner)
    federation, _ = divided("owners()", from_arrays(part, part), clients=20, validation=0.1)
    assert [len(one) for one in federation.own_validation or ()] == [1] * 20


@pytest.mark.parametrize("text", ["owners()", "domains()"])
def test_own_tests_of_owners_are_the_owners_examples(text: str) -> None:
    federation, _ = divided(text)
    owner = torch.cat([DATA.train.domain, DATA.test.domain]).numpy()  # type: ignore[list-item]
    for client, test in enumerate(federation.own_test or ()):
        assert set(owner[test]) == {client}


def test_clusters_find_the_owners_by_their_brightness() -> None:
    data = from_arrays((DATA.train.x, DATA.train.y), (DATA.test.x, DATA.test.y))
    federation, _ = divided("clusters()", data)
    owner = torch.cat([DATA.train.domain, DATA.test.domain]).numpy()  # type: ignore[list-item]
    for train, test in zip(federation.train, federation.own_test or (), strict=True):
        assert len(set(owner[train]) | set(owner[test])) == 1


def test_own_tests_are_part_of_the_partitions_digest_and_follow_the_seed() -> None:
    digests = {divided("iid()", own=own)[1].digest for own in (False, True)}
    assert len(digests) == 2
    assert divided("iid()")[1].digest == divided("iid()")[1].digest
    assert divided("iid()")[1].digest != divided("iid()", seed=1)[1].digest


def test_too_few_test_examples_are_refused_by_the_clients_number() -> None:
    few = from_arrays((DATA.train.x, DATA.train.y), (DATA.test.x[:3], DATA.test.y[:3]))
    with pytest.raises(InputError, match=r"3 test examples leave client \d of 5"):
        divided("iid()", few)


def pixels(federation: Federation, at: np.ndarray) -> np.ndarray:
    found: np.ndarray = federation.x[torch.from_numpy(at)].double().numpy()
    return found


def test_noise_grows_with_the_clients_number_and_reaches_its_tests() -> None:
    grey = torch.full((600, 1, 8, 8), 0.5)
    data = from_arrays((grey, DATA.train.y), (grey[:300], DATA.test.y))
    federation, _ = divided("iid() | noise(std=0.2)", data)
    for lists in (federation.train, federation.own_test or (), federation.own_validation or ()):
        spread = [pixels(federation, at).std() for at in lists]
        np.testing.assert_allclose(spread, 0.2 * np.arange(1, 6) / 5, rtol=0.1)


def test_a_quarter_turn_is_exact() -> None:
    federation, _ = divided("iid() | rotation()")
    whole = torch.cat([DATA.train.x, DATA.test.x])
    for client, at in enumerate(federation.train):
        wanted = whole[torch.from_numpy(at)].rot90(client % 4, (2, 3))
        assert torch.equal(federation.x[torch.from_numpy(at)], wanted)


def test_four_turns_by_a_small_angle_are_near_one_large_turn() -> None:
    from feddkd.data.partitions.skews import _rotated

    draw = torch.Generator().manual_seed(0)
    pixels = torch.rand(2, 1, 24, 24, dtype=torch.float64, generator=draw)
    x = torch.nn.functional.avg_pool2d(pixels, 5, 1, 2)
    turned = x
    for _ in range(4):
        turned = _rotated(turned, 22.5)
    middle = (..., slice(8, 16), slice(8, 16))
    assert (turned[middle] - x.rot90(1, (2, 3))[middle]).abs().max() < 0.06


def test_colour_is_one_factor_for_each_channel_of_a_client() -> None:
    x = torch.full((600, 3, 4, 4), 0.5)
    data = from_arrays((x, DATA.train.y), (x[:300], DATA.test.y))
    federation, _ = divided("iid() | colour(strength=0.4)", data)
    for at in federation.train:
        factors = pixels(federation, at) / 0.5
        assert (factors.min((0, 2, 3)) == factors.max((0, 2, 3))).all()
        assert (np.abs(factors - 1) <= 0.4 + 1e-6).all()


def test_label_noise_gives_a_share_of_training_labels_another_class() -> None:
    federation, _ = divided("iid() | label_noise(share=0.25)")
    truth = torch.cat([DATA.train.y, DATA.test.y]).numpy()
    for at in federation.train:
        assert (federation.y.numpy()[at] != truth[at]).sum() == round(0.25 * len(at))
    for lists in (federation.own_test or (), federation.own_validation or ()):
        for at in lists:
            assert (federation.y.numpy()[at] == truth[at]).all()


def test_changes_are_part_of_the_partitions_digest() -> None:
    texts = ["iid()", "iid() | noise()", "iid() | noise(std=0.2)", "iid() | colour()"]
    assert len({divided(text)[1].digest for text in texts}) == 4


@pytest.mark.parametrize(
    ("text", "own", "says"),
    [
        ("classes(per_client=2, form='independent') | noise()", True, "share training examples"),
        ("iid() | nois()", True, "'noise'"),
        ("iid() | rotation(degrees=0)", True, "degrees"),
        ("noise()", True, "behind a partition"),
        ("elsewhere() | noise()", False, "their own"),
    ],
)
def test_a_change_that_makes_no_sense_is_refused(text: str, own: bool, says: str) -> None:
    with pytest.raises(InputError, match=says):
        divided(text, own=own)


def test_tokens_are_not_changed_by_noise() -> None:
    tokens = torch.zeros(600, 4, dtype=torch.int64)
    data = from_arrays((tokens, DATA.train.y), (tokens[:300], DATA.test.y))
    for change in ("noise()", "rotation()", "colour()"):
        with pytest.raises(InputError, match="tokens"):
            divided(f"iid() | {change}", data)
