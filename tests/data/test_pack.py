"""A compact copy gives the same runs as the original, and says so when it cannot."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from feddkd import Experiment, InputError
from feddkd.data.sources.packed import PIECE, pack, unpack, used
from feddkd.runs.prepare import prepare

E = Experiment(
    method="fedavg(epochs=1)",
    data="digits",
    training=0.2,
    validation=0.1,
    clients=4,
    partition="iid()",
    rounds=1,
)


def packed(folder: Path, *experiments: Experiment, piece: int = PIECE) -> list[Path]:
    ready = [prepare(experiment, None) for experiment in experiments]
    train, test = used(ready[0].data, [part for one in ready for part in one.federation.parts])
    return pack(ready[0].data, experiments[0].parsed_data, train, test, folder, piece)


def test_a_packed_copy_divides_into_the_same_examples_for_everybody(tmp_path: Path) -> None:
    packed(tmp_path, E)
    original, copy = prepare(E, None), prepare(E, tmp_path)
    assert copy.data.held is not None
    assert copy.data.digest == original.data.digest
    assert copy.split.digest == original.split.digest
    for ours, theirs in zip(copy.federation.parts, original.federation.parts, strict=True):
        assert (ours == theirs).all()
        assert torch.equal(copy.federation.x[ours], original.federation.x[theirs])
        assert torch.equal(copy.federation.y[ours], original.federation.y[theirs])


def test_what_nobody_reads_is_left_out(tmp_path: Path) -> None:
    packed(tmp_path, E)
    data = prepare(E, tmp_path).data
    assert data.held is not None
    assert len(data.held[0]) == pytest.approx(0.3 * len(data.train), rel=0.02)
    assert not data.train.x[
        torch.from_numpy(np.setdiff1d(np.arange(len(data.train)), data.held[0]))
    ].any()


def test_an_experiment_that_reads_more_is_refused(tmp_path: Path) -> None:
    packed(tmp_path, E)
    with pytest.raises(InputError, match=r"lacks \d+ training images"):
        prepare(Experiment(**{**E.as_dict(), "seed": 1}), tmp_path)


def test_several_experiments_share_a_copy(tmp_path: Path) -> None:
    other = Experiment(**{**E.as_dict(), "seed": 1})
    packed(tmp_path, E, other)
    for experiment in (E, other):
        assert prepare(experiment, tmp_path).split.digest == prepare(experiment, None).split.digest


def test_pieces_stay_below_their_limit(tmp_path: Path) -> None:
    files = packed(tmp_path, E, piece=4_000)
    pieces = [path for path in files if path.suffix == ".npz"]
    assert len(pieces) > 5
    assert max(path.stat().st_size for path in pieces) <= 4_000
    assert prepare(E, tmp_path).federation.x.sum() > 0


@pytest.mark.parametrize("damage", ["cut", "gone", "format"])
def test_a_damaged_copy_is_refused_in_words(tmp_path: Path, damage: str) -> None:
    page, piece, *_ = packed(tmp_path, E)
    if damage == "cut":
        piece.write_bytes(piece.read_bytes()[:-5])
    elif damage == "gone":
        piece.unlink()
    else:
        page.write_text(json.dumps({**json.loads(page.read_text()), "format": 99}))
    words = {"cut": "checksum", "gone": "No such file", "format": "format is 99"}[damage]
    with pytest.raises(InputError, match=words):
        unpack(E.parsed_data, tmp_path)


def test_other_json_files_and_other_sources_are_not_taken_for_it(tmp_path: Path) -> None:
    packed(tmp_path, E)
    (tmp_path / "a.json").write_text("[1, 2]")
    (tmp_path / "b.json").write_text("not json")
    assert (
        unpack(
            Experiment(method="fedavg()", data="generated_digits(train=20)").parsed_data, tmp_path
        )
        is None
    )
    assert unpack(E.parsed_data, None) is None
    assert unpack(E.parsed_data, tmp_path / "nowhere") is None
