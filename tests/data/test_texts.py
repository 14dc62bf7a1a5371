"""Texts as data: made by a grammar, or read from files."""

from pathlib import Path

import numpy as np
import pytest
import torch

from feddkd.data.examples import Data
from feddkd.data.sources import SOURCES
from feddkd.data.sources.packed import pack
from feddkd.errors import InputError
from feddkd.experiment import Experiment
from feddkd.runs.prepare import prepare

NEXT = """
from torch import nn

def network(shape, classes):
    return nn.Sequential(nn.Embedding(classes, 4), nn.Linear(4, classes))
"""


def load(text: str, root: Path | None = None) -> Data:
    return SOURCES.one(text).load(root)


def entropy(counts: np.ndarray) -> float:
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum())


def test_a_grammars_text_is_the_same_everywhere() -> None:
    data = load("grammar(speakers=3, lines=10)")
    assert data.digest[:16] == "1669fe5f0c21c0b4"
    assert "".join(data.labels[at] for at in data.train.x[0]) == "two sailors know that the miller"


def test_the_target_of_a_character_is_the_one_that_follows_it() -> None:
    data = load("grammar(speakers=2, lines=10, length=20)")
    assert data.train.x.shape == (16, 20)
    assert data.test.x.shape == (4, 20)
    assert torch.equal(data.train.x[:, 1:], data.train.y[:, :-1])
    assert data.train.domain is not None
    assert data.train.domain.tolist() == [0] * 8 + [1] * 8


def test_two_characters_say_much_about_the_next_one() -> None:
    data = load("grammar(speakers=1, lines=400)")
    x, y = data.train.x.numpy(), data.train.y.numpy()
    alone = entropy(np.bincount(y.ravel()))
    pairs = np.bincount((x[:, :-1] * 28 + x[:, 1:]).ravel())
    triples = np.bincount((x[:, :-1] * 784 + x[:, 1:] * 28 + y[:, 1:]).ravel())
    assert alone > 3.5
    assert entropy(triples) - entropy(pairs) < 1.5


def test_speakers_differ_by_their_skew() -> None:
    def spread(skew: int) -> float:
        data = load(f"grammar(speakers=8, lines=100, skew={skew})")
        tokens = data.train.y.reshape(8, -1).numpy()
        each = [entropy(np.bincount(own, minlength=28)) for own in tokens]
        return entropy(np.bincount(tokens.ravel(), minlength=28)) - float(np.mean(each))

    assert spread(4) > 3 * spread(0)


def test_every_speaker_becomes_a_client_with_tests_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NEXT)
    experiment = Experiment(
        "fedavg(epochs=1)",
        data="grammar(speakers=5, lines=60)",
        partition="owners()",
        clients=5,
        model=f"{tmp_path / 'net.py'}:network",
        task="language",
        client_tests="own",
    )
    ready = prepare(experiment, None)
    federation = ready.federation
    assert federation.own_test is not None
    domains = torch.cat([torch.arange(5).repeat_interleave(count) for count in (48, 12)]).numpy()
    for client, (train, test) in enumerate(zip(federation.train, federation.own_test, strict=True)):
        assert set(domains[train]) == set(domains[test]) == {client}
    assert federation.held_by(ready.data.class_names)[0] == ("examples",)


SEVERAL = """
import pytest
import torch
from torch import nn

def data():
    x = {"a": torch.randn(30, 3), "b": torch.randn(30, 2)}
    return (x, torch.arange(30) % 2), (x, torch.arange(30) % 2)

class Both(nn.Linear):
    def forward(self, a, b):
        return super().forward(torch.cat([a, b], 1))

def network(shape, classes):
    return Both(5, classes)
"""


def test_a_file_may_give_examples_of_several_tensors(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SEVERAL)
    experiment = Experiment(
        "fedavg(epochs=1)",
        data=f"{tmp_path / 'own.py'}:data",
        partition="iid()",
        clients=2,
        model=f"{tmp_path / 'own.py'}:network",
    )
    ready = prepare(experiment, None)
    assert ready.federation.shape == {"a": (3,), "b": (2,)}
    with pytest.raises(InputError, match="only examples of one tensor can be packed"):
        pack(ready.data, experiment.parsed_data, np.arange(3), np.arange(3), tmp_path / "packed")
