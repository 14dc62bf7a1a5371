"""Whole federations by seed, with faults; `make federation-faults` runs thousands of them."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")

from feddkd.flower import opening, roster
from feddkd.flower.masking import Words
from seeded_federation import BrokenLawError, federate

# Each of these has found something once.
FOUND = (38, 64, 371, 474, 592, 700116, 700243)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.mark.parametrize("seed", [*range(30), *FOUND])
def test_the_laws_hold_in_the_federation_of_a_seed(seed: int, shared: Path, tmp_path: Path) -> None:
    federate(seed, shared, tmp_path)


def test_a_seed_gives_the_same_history_again(shared: Path, tmp_path: Path) -> None:
    histories = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        histories.append(federate(5, shared, tmp_path / name).network.history)
    assert histories[0] == histories[1]
    assert any(histories[0])


def test_the_laws_notice_masks_that_stay_in_a_sum(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(member: int, seeds: object, size: int) -> Words:
        return np.zeros(size, np.uint64)

    monkeypatch.setattr(opening, "pairwise", nothing)
    assert broken((45,), shared, tmp_path)


def test_the_laws_notice_a_node_that_is_never_asked_again(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "AGAIN", 1e9)
    assert broken(FOUND, shared, tmp_path)


def broken(seeds: object, shared: Path, folder: Path) -> bool:
    """Return whether a law is broken in the federation of one of some seeds."""
    assert isinstance(seeds, tuple)
    for seed in seeds:
        (folder / str(seed)).mkdir()
        try:
            federate(seed, shared, folder / str(seed))
        except BrokenLawError:
            return True
    return False
