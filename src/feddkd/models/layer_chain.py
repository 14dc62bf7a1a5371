"""A network as a chain of layers whose units may change places.

Permute the units of a layer, and the inputs of the next one along with them, and the network
computes the same. That holds where layers stand one behind another and whatever lies between works
on each unit by itself; a network with anything else in it is refused, by the name of the first
thing that does not fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from feddkd.errors import InputError, choices

# What works on each unit by itself, as a module and as a function
BETWEEN = (
    nn.Identity,
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.SELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Tanh,
    nn.Sigmoid,
    nn.Softplus,
    nn.Hardtanh,
    nn.Dropout,
    nn.Dropout2d,
    nn.MaxPool2d,
    nn.AvgPool2d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveAvgPool2d,
)
FUNCTIONS = frozenset(
    {
        "relu",
        "relu_",
        "relu6",
        "leaky_relu",
        "elu",
        "selu",
        "gelu",
        "silu",
        "mish",
        "tanh",
        "sigmoid",
        "softplus",
        "hardtanh",
        "dropout",
        "dropout2d",
        "max_pool2d",
        "avg_pool2d",
        "adaptive_max_pool2d",
        "adaptive_avg_pool2d",
    }
)


@dataclass(frozen=True)
class Layer:
    """A full or convolutional layer with the batch norms behind it."""

    name: str
    units: int
    # the tensors that decide what a unit computes: weight and bias, their first axis the units
    inputs: tuple[str, ...]
    beside: tuple[str, ...] = ()  # batch norm's parameters and statistics: one number a unit
    counters: tuple[str, ...] = ()  # batch norm's tensors that have nothing to do with units
    # inputs for each unit of the layer before; None for the first layer, whose inputs stay in place
    block: int | None = None

    @property
    def by_unit(self) -> tuple[str, ...]:
        return self.inputs + self.beside

    @property
    def names(self) -> tuple[str, ...]:
        return self.by_unit + self.counters

    @property
    def weight(self) -> str:
        return self.inputs[0]


def chain(net: nn.Module) -> tuple[Layer, ...]:
    """The layers of a network in the order in which examples pass them."""
    layers: list[Layer] = []
    flat = True  # whether what flows has one number a unit, or maps
    for node in _path(net):
        what = net.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(what, nn.Linear | nn.Conv2d):
            layers.append(_layer(str(node.target), what, layers, flat))
            flat = isinstance(what, nn.Linear)
        elif isinstance(what, _BatchNorm):
            layers = _with_norm(str(node.target), what, layers)
        elif _flattens(node, what):
            flat = True
        elif not isinstance(what, BETWEEN) and (
            node.op == "call_module" or _name(node) not in FUNCTIONS
        ):
            raise _misfit(node, what)
    return _complete(net, layers)


def _path(net: nn.Module) -> list[fx.Node]:
    """The network's operations, each of which takes what the one before gives and nothing else."""
    try:
        graph = fx.Tracer().trace(net)
    except Exception as error:
        raise InputError(
            "units can be matched in a chain of layers, and this network does not read as one:"
            f" {error}"
        ) from error
    *inside, _ = graph.nodes
    for node in inside:
        if len(node.users) != 1 or len(node.all_input_nodes) != (node.op != "placeholder"):
            raise _misfit(node, None)
    return [node for node in inside if node.op != "placeholder"]


def _layer(name: str, what: nn.Linear | nn.Conv2d, before: Sequence[Layer], flat: bool) -> Layer:
    if any(layer.name == name for layer in before):
        raise InputError(
            f"layer {name!r} is used twice, and its units cannot be matched for both places at once"
        )
    wide, units = (
        (what.in_channels, what.out_channels)
        if isinstance(what, nn.Conv2d)
        else (what.in_features, what.out_features)
    )
    if isinstance(what, nn.Conv2d) and what.groups != 1:
        raise InputError(
            f"layer {name!r} is a convolution in groups, whose units cannot change places freely"
        )
    if isinstance(what, nn.Linear) and not flat:
        raise InputError(f"layer {name!r} works along the rows of maps: put a flatten before it")
    inputs = (f"{name}.weight", *((f"{name}.bias",) if what.bias is not None else ()))
    return Layer(name, units, inputs, block=wide // before[-1].units if before else None)


def _with_norm(name: str, what: _BatchNorm, before: list[Layer]) -> list[Layer]:
    if not before or what.num_features != before[-1].units:
        raise InputError(f"layer {name!r} normalises what are not the units of the layer before it")
    tensors = dict([*what.named_parameters(), *what.named_buffers()])
    beside = tuple(f"{name}.{own}" for own, tensor in tensors.items() if tensor.dim())
    counters = tuple(f"{name}.{own}" for own, tensor in tensors.items() if not tensor.dim())
    last = before[-1]
    return [
        *before[:-1],
        replace(last, beside=last.beside + beside, counters=last.counters + counters),
    ]


def _flattens(node: fx.Node, what: nn.Module | None) -> bool:
    """Whether it makes one row of each example's maps, channel after channel."""
    if isinstance(what, nn.Flatten):
        return (what.start_dim, what.end_dim) == (1, -1)
    start = [*node.args[1:], *node.kwargs.values()]
    return what is None and _name(node) == "flatten" and start == [1]


def _complete(net: nn.Module, layers: list[Layer]) -> tuple[Layer, ...]:
    if not layers:
        raise InputError(
            "this network has no full or convolutional layer, so there are no units to match"
        )
    known = {name for layer in layers for name in layer.names}
    if frozen := {name for name, tensor in net.named_parameters() if not tensor.requires_grad}:
        raise InputError(f"units of frozen layers cannot be matched: {choices(frozen)}")
    once = {name for name, _ in net.named_parameters()}
    if tied := {name for name, _ in net.named_parameters(remove_duplicate=False)} - once:
        raise InputError(f"units of layers that share a tensor cannot be matched: {choices(tied)}")
    if left := {name for name in net.state_dict() if name not in known}:
        raise InputError(
            "tensors that belong to no full or convolutional layer cannot be matched:"
            f" {choices(left)}"
        )
    return tuple(layers)


def _misfit(node: fx.Node, what: nn.Module | None) -> InputError:
    kind = type(what).__name__ if what is not None else _name(node)
    return InputError(
        "units can be matched in a chain of full and convolutional layers with activations,"
        " pooling, dropout, batch norm and flatten(1) in between;"
        f" {str(node.target) if node.op == 'call_module' else node.name!r} ({kind}) does not fit in"
    )


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else node.target.__name__


def move_units(layer: Layer, tensors: dict[str, Tensor], order: Tensor) -> dict[str, Tensor]:
    """The layer's tensors with unit order[i] in place i."""
    return {
        name: tensor[order] if name in layer.by_unit else tensor for name, tensor in tensors.items()
    }


def move_inputs(layer: Layer, weight: Tensor, order: Tensor) -> Tensor:
    """The layer's weight once unit order[i] of the layer before it stands in place i."""
    assert layer.block is not None, "the inputs of the first layer stay in place"
    # whatever belongs to one unit before: kernels, a flattened map
    blocks = weight.reshape(len(weight), len(order), -1)
    return blocks[:, order].reshape(weight.shape)
