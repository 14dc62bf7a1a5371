"""The registry of networks; `functional` takes any other network.

A registered model is an architecture. The network is built when the shape of the data and the
number of classes are known.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import nn

from feddkd.errors import InputError
from feddkd.models.functional import Mode as Mode
from feddkd.models.functional import Model as Model
from feddkd.models.functional import Output as Output
from feddkd.models.functional import built as built
from feddkd.models.functional import functional as functional
from feddkd.models.networks.digit_cnn import digit_cnn as build_digit_cnn
from feddkd.models.networks.emnist_cnn import emnist_cnn as build_emnist_cnn
from feddkd.models.networks.femnist_cnn import FemnistCNN
from feddkd.models.networks.mlp import mlp as build_mlp
from feddkd.models.networks.small_cnn import small_cnn as build_small_cnn
from feddkd.models.networks.vgg9 import vgg9 as build_vgg9
from feddkd.spec.registry import Registry, Spelled
from feddkd.spec.types import Numbers

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Architecture(Spelled):
    """A network that can be built for examples of a shape and a number of classes."""

    build: Callable[[Shape, int], nn.Module]  # (shape, classes) -> network


MODELS: Registry[Architecture] = Registry("model", "feddkd.models")


@MODELS.register
def femnist_cnn(*, geometry: Literal["32", "28"] = "32", conv_bias: bool = False) -> Architecture:
    """The paper's FEMNIST network, 200,506 parameters.

    The geometry "32" takes 32x32 images, "28" takes 28x28 images without padding.
    """
    padding = {"32": (0, 0, 0), "28": (1, 1, 0)}[geometry]
    side = int(geometry)

    def build(shape: Shape, classes: int) -> nn.Module:
        _need("femnist_cnn", shape, (side, side))
        return FemnistCNN(shape[0], classes, padding, conv_bias)

    return Architecture(build)


@MODELS.register
def vgg9() -> Architecture:
    """FedMA's VGG-9 for 32x32 images, 3,491,530 parameters with 10 classes."""
    return _image_network("vgg9", build_vgg9, (32, 32))


@MODELS.register
def digit_cnn() -> Architecture:
    """FedBN's digits network for 28x28 images, with batch norm.

    14,219,210 parameters with RGB input and 10 classes.
    """
    return _image_network("digit_cnn", build_digit_cnn, (28, 28))


@MODELS.register
def emnist_cnn() -> Architecture:
    """FedGen's small EMNIST network for 28x28 images, with batch norm.

    26,962 parameters with 26 classes.
    """
    return _image_network("emnist_cnn", build_emnist_cnn, (28, 28))


@MODELS.register
def small_cnn() -> Architecture:
    """The small CNN of pfl-research's CIFAR-10 benchmark for 32x32 images.

    1,626,442 parameters with 10 classes.
    """
    return _image_network("small_cnn", build_small_cnn, (32, 32))


@MODELS.register
def mlp(*, hidden: Numbers = "64") -> Architecture:
    """A perceptron with hidden layers of the widths in `hidden`, as in "64,32"; "" is linear."""
    try:
        widths = [int(width) for width in hidden.split(",") if width.strip()]
    except ValueError:
        widths = [0]
    if any(width < 1 for width in widths):
        raise InputError(f"model 'mlp': hidden must list widths, as in '64,32', not {hidden!r}")
    return Architecture(lambda shape, classes: build_mlp(shape, classes, widths))


def _image_network(name: str, build: Callable[[int, int], nn.Module], sides: Shape) -> Architecture:
    def checked(shape: Shape, classes: int) -> nn.Module:
        _need(name, shape, sides)
        return build(shape[0], classes)

    return Architecture(checked)


def _need(name: str, shape: Shape, sides: Shape) -> None:
    if len(shape) != 3 or shape[1:] != sides:
        raise InputError(
            f"model {name!r} takes images of channels x {sides[0]} x {sides[1]}, not examples of"
            f" shape {shape}"
        )
