"""Laws of partitions: what each one promises about who holds what."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from feddkd.data.partitions.dirichlet import TRIES
from feddkd.data.partitions.registry import PARTITIONS, Partition, Split, Table, counts
from feddkd.errors import InputError
from feddkd.randomness import Key

KEY: Key = ("split", 0)
seeds = st.integers(0, 2**32)


def table(per_class: int = 60, classes: int = 10, test_per_class: int = 20) -> Table:
    """Labels in dataset order, that is in none: 0, 1, 2, ..., 0, 1, 2, ... Domains are five
    stretches of different length.
    """
    labels, test_labels = (
        np.tile(np.arange(classes), per_class),
        np.tile(np.arange(classes), test_per_class),
    )
    return Table(
        labels, test_labels, _stretches(len(labels)), _stretches(len(test_labels)), classes
    )


def _stretches(count: int) -> np.ndarray:
    return (5 * np.sqrt(np.arange(count) / count)).astype(np.int64)


LETTERS = table(2_400, 26, 800)  # FEMNIST of the paper: 62,400 training images, 20,800 test images
CIFAR = table(4_500, 10, 1_000)
FEDGEN = table(4_800, 26, 800)


def draw(text: str, data: Table, clients: int, seed: int = 0) -> Split:
    return PARTITIONS.one(text)(data, clients, ("split", seed))


def sizes(split: Split) -> list[int]:
    return [len(own) for own in split.train]


def everything(split: Split) -> np.ndarray:
    return np.sort(np.concatenate(split.train))


COMPLETE = [
    "iid()",
    "classes(per_client=4)",
    "classes(per_client=3, form='shards')",
    "shards()",
    "domains()",
]
COMPLETE += ["owners()", "quantity()", "quantity(alpha=0.1, minimum=3)", "power_law(exponent=1.5)"]
COMPLETE += ["dirichlet(alpha=0.2, form='mixtures', minimum=1)"]
COMPLETE += ["dirichlet(alpha=0.5, minimum=1)", "dirichlet(alpha=0.5, form='fedma', minimum=1)"]
OTHERS = ["classes(per_client=4, form='independent')", "classes(per_client=4, form='star')"]
OTHERS += ["dirichlet(alpha=0.5, form='fedgen', minimum=1, ratio=0.9)"]


@pytest.mark.parametrize("text", COMPLETE)
@settings(deadline=None, max_examples=40)
@given(seed=seeds)
def test_every_example_is_held_by_exactly_one_client(text: str, seed: int) -> None:
    data = table()
    assert np.array_equal(everything(draw(text, data, 5, seed)), np.arange(len(data.labels)))


@pytest.mark.parametrize("text", COMPLETE + OTHERS)
def test_the_same_key_gives_the_same_split(text: str) -> None:
    assert draw(text, table(), 5, 7).digest == draw(text, table(), 5, 7).digest


@pytest.mark.parametrize("text", sorted({*COMPLETE, *OTHERS} - {"domains()", "owners()"}))
def test_another_key_gives_another_split(text: str) -> None:
    assert len({draw(text, table(), 5, seed).digest for seed in range(5)}) == 5


@pytest.mark.parametrize("text", COMPLETE + OTHERS)
def test_a_split_remembers_its_spelling_and_holds_integers(text: str) -> None:
    split = draw(text, table(), 5)
    assert split.text == PARTITIONS.one(text).canonical
    assert all(own.dtype == np.int64 for own in (*split.train, *(split.test or ())))


@given(seed=seeds, count=st.integers(1, 300), clients=st.integers(1, 40))
def test_iid_sizes_differ_by_at_most_one(seed: int, count: int, clients: int) -> None:
    if count >= clients:
        found = sizes(draw("iid()", table(count, 1), clients, seed))
        assert max(found) - min(found) <= 1


@given(seed=seeds, minimum=st.integers(1, 6), clients=st.integers(2, 40))
def test_sizes_are_at_least_the_minimum(seed: int, minimum: int, clients: int) -> None:
    for text in (f"quantity(alpha=0.2, minimum={minimum})", f"power_law(minimum={minimum})"):
        assert min(sizes(draw(text, table(60, 4), clients, seed))) >= minimum


def test_sizes_follow_the_power_law() -> None:
    found = np.sort(sizes(draw("power_law(exponent=1.0)", table(10_000, 1), 10)))[::-1]
    shares = 1 / np.arange(1, 11)
    np.testing.assert_allclose(found, 1 + 9_990 * shares / shares.sum(), atol=1)


def test_quantity_has_the_variance_of_a_dirichlet_draw() -> None:
    alpha, clients = 0.5, 4
    drawn = [
        sizes(draw(f"quantity(alpha={alpha})", table(4_000, 1), clients, s)) for s in range(400)
    ]
    shares = np.array(drawn) / 4_000
    expected = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    assert shares.var() == pytest.approx(expected, rel=0.1)


def test_mixtures_serve_many_small_clients_of_equal_size() -> None:
    data = table(500, 10)
    split = draw("dirichlet(alpha=0.05, form='mixtures', minimum=10)", data, 500)
    assert set(sizes(split)) == {10}
    held = counts(split, data.labels, 10)
    alike = counts(draw("iid()", data, 500), data.labels, 10)
    assert (held > 0).sum(1).mean() < 0.5 * (alike > 0).sum(1).mean()


def test_fewer_clients_than_owners_get_some_of_the_owners() -> None:
    data = table()
    assert data.domains is not None
    split = draw("owners(minimum=50)", data, 3)
    for own in split.train:
        (owner,) = set(data.domains[own])
        assert len(own) == (data.domains == owner).sum() >= 50
    with pytest.raises(InputError, match="too few for 6 clients"):
        draw("owners()", data, 6)


@settings(deadline=None)
@given(data=st.data(), seed=seeds, clients=st.integers(1, 25), classes=st.integers(1, 15))
def test_exact_gives_every_client_exactly_its_number_of_classes(
    data: Any, seed: int, clients: int, classes: int
) -> None:
    per_client = data.draw(st.integers(-(-classes // clients), classes))
    labels = table(clients + 7, classes)
    split = draw(f"classes(per_client={per_client})", labels, clients, seed)
    held = counts(split, labels.labels, classes)
    assert ((held > 0).sum(axis=1) == per_client).all()
    assert np.array_equal(everything(split), np.arange(len(labels.labels)))
    holders = (held > 0).sum(axis=0)
    assert holders.max() - holders.min() <= 1
    for column in held.T:
        assert np.ptp(column[column > 0]) <= 1
    wide = (held[:, holders > holders.min()] > 0).sum(axis=1)
    assert np.ptp(wide) <= 1


def test_exact_gives_twenty_femnist_clients_3120_images_each_on_200_seeds() -> None:
    for seed in range(200):
        held = counts(draw("classes(per_client=6)", LETTERS, 20, seed), LETTERS.labels, 26)
        assert (held.sum(axis=1) == 3_120).all()
        assert ((held == 480).sum(axis=1) == 4).all()
        assert ((held == 600).sum(axis=1) == 2).all()


@pytest.mark.parametrize("form", ["exact", "independent", "shards", "star"])
def test_every_reading_of_six_of_26_classes_gives_3120_images(form: str) -> None:
    split = draw(f"classes(per_client=6, form={form!r})", LETTERS, 20)
    assert sizes(split) == [3_120] * 20


def test_independent_clients_draw_520_images_of_each_of_six_classes() -> None:
    split = draw("classes(form='independent')", LETTERS, 20)
    held = counts(split, LETTERS.labels, 26)
    assert (np.sort(held, axis=1)[:, -6:] == 520).all()
    assert all(len(np.unique(own)) == len(own) for own in split.train)


def test_star_gives_twenty_classes_of_which_six_are_doubled() -> None:
    held = counts(draw("classes(form='star')", LETTERS, 20), LETTERS.labels, 26)
    assert ((held == 120).sum(axis=1) == 14).all()
    assert ((held == 240).sum(axis=1) == 6).all()


def test_two_shards_of_a_tenth_of_a_class_make_two_classes_a_client() -> None:
    held = counts(draw("shards(per_client=2)", table(600), 50), table(600).labels, 10)
    assert (held.sum(axis=1) == 120).all()
    assert ((held > 0).sum(axis=1) <= 2).all()


@pytest.mark.parametrize("form", ["plain", "fedma"])
@settings(deadline=None, max_examples=40)
@given(seed=seeds, alpha=st.floats(0.1, 100), minimum=st.integers(1, 20))
def test_the_smallest_dirichlet_client_has_the_minimum(
    form: str, seed: int, alpha: float, minimum: int
) -> None:
    assert (
        min(
            sizes(
                draw(f"dirichlet(alpha={alpha}, form={form!r}, minimum={minimum})", CIFAR, 6, seed)
            )
        )
        >= minimum
    )


@settings(deadline=None, max_examples=40)
@given(seed=seeds)
def test_fedma_gives_nothing_of_a_class_to_a_client_that_has_its_share(seed: int) -> None:
    held = counts(draw("dirichlet(alpha=0.5, form='fedma')", CIFAR, 16, seed), CIFAR.labels, 10)
    before = np.cumsum(held, axis=1) - held
    assert (held[before >= 45_000 / 16] == 0).all()


def test_a_large_alpha_divides_every_class_evenly() -> None:
    held = counts(draw("dirichlet(alpha=1e300)", CIFAR, 16), CIFAR.labels, 10)
    assert (np.abs(held - 4_500 / 16) <= 1).all()


def test_the_shares_have_the_mean_and_variance_of_a_dirichlet_draw() -> None:
    alpha, clients = 0.3, 4
    drawn = [
        counts(
            draw(f"dirichlet(alpha={alpha}, minimum=1)", table(2_000, 50), clients, s),
            table(2_000, 50).labels,
            50,
        )
        for s in range(40)
    ]
    share = np.concatenate(drawn, axis=1) / 2_000
    variance = (clients - 1) / clients**2 / (clients * alpha + 1)
    assert np.allclose(share.mean(axis=1), 1 / clients, atol=0.03)
    assert np.allclose(share.var(axis=1), variance, rtol=0.1)


@pytest.mark.parametrize("alpha", [1e-320, 1e-300, 1e-12, 1e-4])
def test_a_tiny_alpha_gives_whole_classes_away(alpha: float) -> None:
    data = table(50, 40)
    held = counts(draw(f"dirichlet(alpha={alpha}, minimum=1)", data, 4), data.labels, 40)
    assert set(held.flatten()) == {0, 50}


def test_a_class_without_examples_is_no_obstacle_to_dirichlet() -> None:
    data = table()._replace(classes=12)
    for form in ("plain", "fedma"):
        assert sum(sizes(draw(f"dirichlet(alpha=1.0, form={form!r})", data, 5))) == 600


def test_fedgen_divides_a_tenth_of_every_class_and_gives_everybody_ten_per_class() -> None:
    for alpha in (0.05, 0.1):
        split = draw(f"dirichlet(alpha={alpha}, form='fedgen')", FEDGEN, 20)
        held = counts(split, FEDGEN.labels, 26)
        assert (held.sum(axis=0) == 480).all()
        assert min(sizes(split)) >= 260
        assert len(np.unique(everything(split))) == 12_480


def test_fedgen_tests_a_client_on_forty_images_of_each_label_it_owns_and_on_nothing_else() -> None:
    split = draw("dirichlet(form='fedgen')", FEDGEN, 20)
    owned = counts(split, FEDGEN.labels, 26) > 0
    assert split.test is not None
    tested = np.stack([np.bincount(FEDGEN.test_labels[own], minlength=26) for own in split.test])
    assert np.array_equal(tested, np.where(owned, 40, 0))
    dealt = np.concatenate(split.test)
    assert len(np.unique(dealt)) == len(dealt)


def test_a_fedgen_client_that_reached_its_cap_waits() -> None:
    split = draw("dirichlet(form='fedgen')", FEDGEN, 20)
    # lists are class by class, so all but the last class came before the cap
    for own in split.train:
        assert len(own) - (FEDGEN.labels[own] == FEDGEN.labels[own[-1]]).sum() < 624


def test_domains_become_clients_with_their_own_tests() -> None:
    data = table()
    split = draw("domains()", data, 5)
    assert data.domains is not None
    assert data.test_domains is not None
    assert split.test is not None
    for k in range(5):
        assert (data.domains[split.train[k]] == k).all()
        assert (data.test_domains[split.test[k]] == k).all()
    assert sum(map(len, split.test)) == len(data.test_labels)


IMPOSSIBLE = [
    ("classes(per_client=11)", table(), 5, "11 classes of 10"),
    ("classes(per_client=1)", table(), 5, "cannot hold all 10"),
    ("classes(per_client=10)", table(3), 5, "class 0 has 3 examples"),
    ("classes(per_client=9, form='star')", table(), 5, "cannot double 9"),
    ("classes(per_client=2, form='star')", table(3), 5, "class 0 has 3 examples"),
    ("classes(per_client=1, form='independent')", table(), 2, "class 0 has 60 examples"),
    (
        "classes(per_client=6, form='independent')",
        table(1),
        5,
        "client 0 of 5 without training examples",
    ),
    ("shards()", table(1), 6, "12 shards cannot be cut from 10 examples"),
    ("iid()", table(1), 11, "10 training examples.*11 clients"),
    ("iid()", table(), 0, "at least one client"),
    ("dirichlet(minimum=121)", table(), 5, "5 clients with at least 121 examples each need 605"),
    (
        "dirichlet(alpha=0.1)",
        CIFAR,
        500,
        f"{TRIES} draws with alpha=0.1 never divided 45000 examples among 500 clients",
    ),
    ("dirichlet(alpha=1e-9, form='fedma')", CIFAR, 16, "the best left the smallest client with 0"),
    (
        "dirichlet(form='fedgen', minimum=7)",
        table(),
        1,
        "1 clients with at least 70 examples each need 70",
    ),
    (
        "dirichlet(form='fedgen', minimum=1, alpha=9.0)",
        table(60, 10, 4),
        5,
        "without test examples",
    ),
    ("domains()", table(), 4, "5 clients, not 4"),
    ("domains()", table()._replace(domains=None), 5, "with domains"),
]


@pytest.mark.parametrize(("text", "data", "clients", "reason"), IMPOSSIBLE)
def test_an_impossible_request_ends_with_a_reason(
    text: str, data: Table, clients: int, reason: str
) -> None:
    with pytest.raises(InputError, match=reason):
        draw(text, data, clients)


def test_a_ratio_without_fedgen_is_refused_not_ignored() -> None:
    with pytest.raises(InputError, match=r"ratio.*form='plain'.*form='fedgen'"):
        PARTITIONS.one("dirichlet(ratio=0.5)")


def test_500_dirichlet_clients_are_served() -> None:
    assert min(sizes(draw("dirichlet(alpha=0.5, minimum=1)", CIFAR, 500))) >= 1


@pytest.mark.parametrize("text", ["iid()", "domains()"])
def test_a_saved_split_comes_back_as_it_was(text: str, tmp_path: Path) -> None:
    split, path = draw(text, table(), 5), tmp_path / "deep" / "split.npz"
    split.save(path)
    back, again = Split.load(path), draw(f"saved(path={str(path)!r})", table(), 5, 99)
    assert back.digest == again.digest == split.digest
    assert back.text == split.text
    assert (back.test is None) == (split.test is None)
    assert [entry.name for entry in path.parent.iterdir()] == ["split.npz"]


def test_a_damaged_missing_or_foreign_file_is_refused_by_name(tmp_path: Path) -> None:
    split, path = draw("domains()", table(), 5), tmp_path / "split.npz"
    split.save(path)
    whole = path.read_bytes()
    np.save(tmp_path / "array.npy", np.arange(3))
    foreign = (tmp_path / "array.npy").read_bytes()
    for damaged in (
        b"",
        b"nonsense",
        whole[: len(whole) // 2],
        whole[:200] + b"\x01" + whole[201:],
        foreign,
    ):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"split\.npz"):
            Split.load(path)
    with pytest.raises(InputError, match=r"nowhere\.npz"):
        Split.load(tmp_path / "nowhere.npz")


def test_a_file_whose_lists_were_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "split.npz"
    draw("domains()", table(), 5).save(path)
    with np.load(path) as file:
        arrays: dict[str, Any] = dict(file)
    for name in ("train", "train_sizes", "test", "test_sizes"):
        np.savez(path, **(arrays | {name: arrays[name][::-1]}))
        with pytest.raises(InputError, match="digest"):
            Split.load(path)


def test_a_saved_split_must_fit_the_data_and_the_clients(tmp_path: Path) -> None:
    path = tmp_path / "split.npz"
    draw("iid()", table(), 5).save(path)
    for data, clients, reason in (
        (table(), 4, "among 5 clients, not 4"),
        (table(59), 5, "do not exist; there are 590"),
    ):
        with pytest.raises(InputError, match=reason):
            draw(f"saved(path={str(path)!r})", data, clients)


def test_the_digest_changes_when_anything_changes() -> None:
    def digest(train: list[list[int]], test: list[list[int]] | None = None) -> str:
        arrays = [[np.array(own, np.int64) for own in lists] for lists in (train, test or [])]
        return Split(tuple(arrays[0]), None if test is None else tuple(arrays[1]), "").digest

    first = digest([[0, 1], [2]])
    others = [
        [[1, 0], [2]],
        [[0], [1, 2]],
        [[2], [0, 1]],
        [[0, 1, 2]],
        [[0, 1], [2], []],
        [[0, 1], [3]],
    ]
    assert (
        len(
            {
                first,
                *map(digest, others),
                digest([[0, 1], [2]], []),
                digest([[0, 1], [2]], [[0], [1]]),
            }
        )
        == 9
    )


@pytest.mark.parametrize(
    ("text", "digest"), [("classes()", "a97c642e9069"), ("dirichlet(alpha=0.05)", "a0e34af39aca")]
)
def test_a_key_means_the_same_split_on_every_machine_and_in_every_version(
    text: str, digest: str
) -> None:
    # if this fails, earlier records cannot be continued: say so
    assert draw(text, LETTERS, 20).digest.startswith(digest)


def test_counts_add_up_to_what_everybody_holds() -> None:
    split = Split((np.array([0, 1, 2]), np.array([3, 3])), None, "")
    assert counts(split, np.array([0, 2, 2, 1]), 4).tolist() == [[1, 0, 2, 0], [0, 2, 0, 0]]


def test_every_partition_says_what_it_does() -> None:
    made = [PARTITIONS[name]() for name in PARTITIONS if name != "saved"]
    assert all(isinstance(partition, Partition) and partition.summary for partition in made)
