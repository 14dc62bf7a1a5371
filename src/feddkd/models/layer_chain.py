"""A network as a chain of layers whose units may be permuted.

If the units of a layer and the inputs of the next layer are permuted in the same way, the network
computes the same. This holds if each layer follows the one before it, and the operations between
them work on each unit separately. Any other network is refused, with the name of the first layer or
operation that does not fit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from feddkd.errors import InputError, choices

# Operations that work on each unit separately, as modules and as functions
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
    """A full or convolutional layer with the batch norms after it."""

    name: str
    units: int
    # weight and bias, which decide what a unit computes; their first axis is the units
    inputs: tuple[str, ...]
    beside: tuple[str, ...] = ()  # batch norm's parameters and statistics: a number for each unit
    counters: tuple[str, ...] = ()  # batch norm's tensors without an axis of units
    # number of inputs for each unit of the layer before; None for the first layer, whose inputs are
    # not permuted
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
    """Return the layers of a network, in the order in which they are called."""
    layers: list[Layer] = []
    flat = True  # each unit is one number; otherwise it is a map
    for node in _path(net):
        module = net.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, nn.Linear | nn.Conv2d):
            layers.append(_layer(str(node.target), module, layers, flat))
            flat = isinstance(module, nn.Linear)
        elif isinstance(module, _BatchNorm):
            layers = _with_norm(str(node.target), module, layers)
        elif _flattens(node, module):
            flat = True
        elif not isinstance(module, BETWEEN) and (
            node.op == "call_module" or _name(node) not in FUNCTIONS
        ):
            raise _misfit(node, module)
    _check_complete(net, layers)
    return tuple(layers)


def _path(net: nn.Module) -> list[fx.Node]:
    """Return the network's operations, each of which takes only the result of the one before."""
    try:
        graph = fx.Tracer().trace(net)
    except Exception as error:
        raise InputError(
            "units can be matched in a chain of layers only, and this network cannot be traced as"
            f" one: {error}"
        ) from error
    *inside, _ = graph.nodes
    for node in inside:
        if len(node.users) != 1 or len(node.all_input_nodes) != (node.op != "placeholder"):
            raise _misfit(node, None)
    return [node for node in inside if node.op != "placeholder"]


def _layer(name: str, module: nn.Linear | nn.Conv2d, before: Sequence[Layer], flat: bool) -> Layer:
    if any(layer.name == name for layer in before):
        raise InputError(
            f"layer {name!r} is used twice, and its units cannot be matched for both places at once"
        )
    if isinstance(module, nn.Conv2d):
        width, units = module.in_channels, module.out_channels
    else:
        width, units = module.in_features, module.out_features
    if isinstance(module, nn.Conv2d) and module.groups != 1:
        raise InputError(
            f"layer {name!r} is a convolution in groups, whose units cannot be permuted freely"
        )
    if isinstance(module, nn.Linear) and not flat:
        raise InputError(f"layer {name!r} works along the rows of maps: put a flatten before it")
    biases = (f"{name}.bias",) if module.bias is not None else ()
    block = width // before[-1].units if before else None
    return Layer(name, units, (f"{name}.weight", *biases), block=block)


def _with_norm(name: str, module: _BatchNorm, before: list[Layer]) -> list[Layer]:
    """Return the layers with a batch norm after the last."""
    if not before or module.num_features != before[-1].units:
        raise InputError(f"layer {name!r} does not normalise the units of the layer before it")
    tensors = dict([*module.named_parameters(), *module.named_buffers()])
    beside = tuple(f"{name}.{key}" for key, tensor in tensors.items() if tensor.dim())
    counters = tuple(f"{name}.{key}" for key, tensor in tensors.items() if not tensor.dim())
    last = before[-1]
    last = replace(last, beside=last.beside + beside, counters=last.counters + counters)
    return [*before[:-1], last]


def _flattens(node: fx.Node, module: nn.Module | None) -> bool:
    """Return whether it makes one row of each example's maps, channel after channel."""
    if isinstance(module, nn.Flatten):
        return (module.start_dim, module.end_dim) == (1, -1)
    start = [*node.args[1:], *node.kwargs.values()]
    return module is None and _name(node) == "flatten" and start == [1]


def _check_complete(net: nn.Module, layers: list[Layer]) -> None:
    """Raise an InputError if a tensor of the network cannot be matched."""
    if not layers:
        raise InputError(
            "this network has no full or convolutional layer, so there are no units to match"
        )
    frozen = {name for name, tensor in net.named_parameters() if not tensor.requires_grad}
    if frozen:
        raise InputError(f"units of frozen layers cannot be matched: {choices(frozen)}")
    once = {name for name, _ in net.named_parameters()}
    tied = {name for name, _ in net.named_parameters(remove_duplicate=False)} - once
    if tied:
        raise InputError(f"units of layers that share a tensor cannot be matched: {choices(tied)}")
    in_layers = {name for layer in layers for name in layer.names}
    others = {name for name in net.state_dict() if name not in in_layers}
    if others:
        raise InputError(
            "tensors that belong to no full or convolutional layer cannot be matched:"
            f" {choices(others)}"
        )


def _misfit(node: fx.Node, module: nn.Module | None) -> InputError:
    kind = type(module).__name__ if module is not None else _name(node)
    name = str(node.target) if node.op == "call_module" else node.name
    return InputError(
        "units can be matched in a chain of full and convolutional layers with activations,"
        " pooling, dropout, batch norm and flatten(1) in between;"
        f" {name!r} ({kind}) does not fit in"
    )


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else node.target.__name__


def move_units(layer: Layer, tensors: dict[str, Tensor], order: Tensor) -> dict[str, Tensor]:
    """Return the layer's tensors with unit order[i] in place i."""
    return {
        name: tensor[order] if name in layer.by_unit else tensor for name, tensor in tensors.items()
    }


def move_inputs(layer: Layer, weight: Tensor, order: Tensor) -> Tensor:
    """Return the layer's weight for unit order[i] of the layer before it in place i."""
    assert layer.block is not None, "the inputs of the first layer are not permuted"
    # a block is all inputs from one unit: a number, a kernel or a flattened map
    blocks = weight.reshape(len(weight), len(order), -1)
    return blocks[:, order].reshape(weight.shape)
