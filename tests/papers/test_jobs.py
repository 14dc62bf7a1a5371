"""Definitions of the paper's jobs: splits, transforms, networks, and how accuracy is counted.

Written from the papers and their code, and not from ours. `tests/reproduction/test_traces.py`
compares the jobs as wholes with their records.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.model_selection import StratifiedShuffleSplit
from torch import nn

from feddkd import Experiment, functional
from feddkd.data.partitions.registry import PARTITIONS, Table
from feddkd.data.sources.registry import SOURCES
from feddkd.data.transforms import transform
from feddkd.engines.serial import Serial
from feddkd.models.registry import MODELS
from feddkd.rounds.evaluation import Evaluation, Protocol, measure
from small import clients, federation, network

LETTERS = Table(np.tile(np.arange(26), 2_400), np.tile(np.arange(26), 800), None, None, 26)


def test_clients_that_draw_their_classes_alone_draw_different_ones() -> None:
    split = PARTITIONS.one("classes(form='independent')")(LETTERS, 20, ("split", 0))
    held = {tuple(np.unique(LETTERS.labels[own])) for own in split.train}
    assert len(held) > 15  # of 230,230 sets of six
    assert len({one for classes in held for one in classes}) > 20


def test_fedbns_domains_are_divided_by_its_seed(tmp_path: Path) -> None:
    """FedBN pools a domain's images and takes four fifths by StratifiedShuffleSplit, seed 0."""
    h5py = pytest.importorskip("h5py")
    x = np.random.default_rng(3).random((9_298, 256), np.float32)
    y = np.arange(9_298) % 10
    with h5py.File(tmp_path / "usps.h5", "w") as file:
        for name, part in (("train", slice(7_291)), ("test", slice(7_291, None))):
            file[f"{name}/data"], file[f"{name}/target"] = x[part], y[part]
    data = SOURCES.one("digit_domains(domains='usps', per_domain=743)").load(tmp_path)
    splitter = StratifiedShuffleSplit(n_splits=1, test_size=0.2, random_state=0)
    train, test = next(splitter.split(x, y))
    assert data.train.y.tolist() == y[train[:743]].tolist()
    assert data.test.y.tolist() == y[test].tolist()


def test_femnist_images_are_padded_first_as_in_fedmax() -> None:
    """The border is black before it is normalised: -0.1307 / 0.3081 of MNIST's numbers."""
    x = torch.full((1, 1, 28, 28), 255, dtype=torch.uint8)
    padded = transform(SOURCES.one("emnist").transform, 255.0)(x, torch.float64)
    assert padded.shape == (1, 1, 32, 32)
    assert padded[0, 0, 0, 0].item() == pytest.approx(-0.1307 / 0.3081)
    assert padded[0, 0, 16, 16].item() == pytest.approx((1 - 0.1307) / 0.3081)


def layers(text: str, shape: tuple[int, ...], classes: int) -> list[str]:
    """Return the layers of a network in order, with what decides their numbers."""
    net = MODELS.one(text).build(shape, classes)
    return [_in_short(module) for module in net.modules() if not list(module.children())]


def _in_short(module: nn.Module) -> str:
    name = type(module).__name__
    if isinstance(module, nn.Conv2d):
        return f"{name} {module.in_channels}-{module.out_channels} p{module.padding[0]}"
    if isinstance(module, nn.Linear):
        return f"{name} {module.in_features}-{module.out_features}"
    if isinstance(module, nn.Dropout | nn.Dropout2d):
        return f"{name} {module.p}"
    return name


def test_vgg9_is_fedmas_with_its_dropout() -> None:
    conv = [f"Conv2d {sizes} p1" for sizes in ("3-32", "32-64", "64-128", "128-128")]
    last = ["Conv2d 128-256 p1", "ReLU", "Conv2d 256-256 p1", "ReLU", "MaxPool2d", "Flatten"]
    assert layers("vgg9", (3, 32, 32), 10) == [
        *(conv[0], "ReLU", conv[1], "ReLU", "MaxPool2d"),
        *(conv[2], "ReLU", conv[3], "ReLU", "MaxPool2d", "Dropout2d 0.05"),
        *(*last, "Dropout 0.1", "Linear 4096-512", "ReLU"),
        *("Linear 512-512", "ReLU", "Dropout 0.1", "Linear 512-10"),
    ]


def test_fedgens_network_has_no_activation_between_its_full_layers() -> None:
    assert layers("emnist_cnn", (1, 28, 28), 26) == [
        *("Conv2d 1-6 p1", "BatchNorm2d", "ReLU", "Conv2d 6-16 p1", "BatchNorm2d", "ReLU"),
        *("Flatten", "Linear 784-32", "Linear 32-26"),
    ]


def test_a_mean_over_domains_gives_each_domain_the_same_weight() -> None:
    """With test sets of 40 and 10 examples the mean over clients is not that over examples."""
    net, data = network(), clients((40, 10))
    tests = replace(federation(data), test=np.arange(50))
    tests = replace(tests, own_test=tests.train)
    model = functional(net)
    params, buffers = model.start()
    engine = Serial(model, [tests], [{}], torch.float64)
    state = {"params": params, "buffers": buffers}
    (found,) = measure(engine, [(0, state)], Evaluation(Protocol.CLIENT_MEAN), "test")
    with torch.no_grad():
        right = [(net(x).argmax(1) == y).double() for x, y in data]
    shares = [float(one.mean()) for one in right]
    assert found.values["accuracy"] == pytest.approx(sum(shares) / 2)
    assert sum(shares) / 2 != pytest.approx(float(torch.cat(right).mean()), abs=0.01)


def test_the_digit_tables_count_accuracy_as_the_mean_over_domains() -> None:
    for method in ("fedavg()", "fedbn()"):
        experiment = Experiment(method, data="digit_domains()", partition="domains", clients=5)
        assert experiment.canonical["evaluation"] == "client_mean"
