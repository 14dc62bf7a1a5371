"""A network as a pure function of its tensors.

`functional(net)` wraps any `nn.Module`; `model(params, buffers, x, mode=..., key=...)` returns logits, features and the new
buffers and changes nothing: not its arguments, not the module, no generator. So one network serves every client, and an engine
may loop, vmap, compile or capture the call.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from feddkd.errors import InputError
from feddkd.keys import Key, fold, uniform
from feddkd.params import Tensors, only

# train: everything as in training. eval: running statistics, no dropout.
# batch: normalise by the batch's own statistics, no dropout, buffers left as they were.
Mode = Literal["train", "eval", "batch"]


class Output(NamedTuple):
    logits: Tensor
    features: Tensor  # the input of the last linear layer; the logits themselves where a network has none
    buffers: dict[str, Tensor]


class _Tap:
    """What flows beside the tensors during one call: the features on their way out, the key on its way in."""

    features: Tensor | None = None
    key: Tensor | None = None

    def __deepcopy__(self, memo: object) -> "_Tap":
        return self  # the copies of a network, one for each mode, share their tap

    def take(self) -> Tensor | None:
        features, self.features, self.key = self.features, None, None
        return features


class KeyedDropout(nn.Module):
    """Dropout whose mask is a function of the step's key, so that it is the same on every engine."""

    def __init__(self, p: float, whole_channels: bool, stream: int, tap: _Tap) -> None:
        super().__init__()
        self.p, self.whole_channels, self.stream, self._tap = p, whole_channels, stream, tap

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        if self._tap.key is None:
            raise InputError("a network with dropout needs a key in training mode")
        shape = (*x.shape[:2], *(1,) * (x.dim() - 2)) if self.whole_channels else tuple(x.shape)
        kept = uniform(self._tap.key, shape, self.stream) >= self.p
        return x * kept.to(x.dtype) / (1 - self.p)


@dataclass(frozen=True)
class Model:
    """A network without its numbers. `initial(key)` draws them; calling it computes with whatever numbers it is given."""

    net: nn.Module = field(repr=False)
    nets: dict[Mode, nn.Module] = field(repr=False)
    tap: _Tap = field(repr=False)
    head: str | None
    param_names: frozenset[str]
    buffer_names: frozenset[str]
    norm_names: frozenset[str]  # parameters and buffers of batch-norm layers
    inside: torch.dtype | None = None  # what it computes in, where that is not the type of its numbers

    @property
    def convolves(self) -> bool:
        return any(isinstance(module, _ConvNd) for module in self.net.modules())

    def computing_in(self, dtype: torch.dtype) -> "Model":
        """The same network, its numbers and results as they were, its arithmetic in another type. Batch norm's numbers stay."""
        return replace(self, inside=dtype)

    def __call__(self, params: Tensors, buffers: Tensors, x: Tensor, *, mode: Mode, key: Tensor | None = None) -> Output:
        if self.inside is not None and self.inside != x.dtype:
            return self._call_inside(params, buffers, x, mode, key)
        fresh = {name: tensor.clone() if mode == "train" else tensor for name, tensor in buffers.items()}
        self.tap.key = key
        logits: Tensor = functional_call(self.nets[mode], {**params, **fresh}, (x,))
        features = self.tap.take()
        return Output(logits, logits if features is None else features, fresh)

    def _call_inside(self, params: Tensors, buffers: Tensors, x: Tensor, mode: Mode, key: Tensor | None) -> Output:
        low = {name: tensor if name in self.norm_names else tensor.to(self.inside) for name, tensor in params.items()}
        output = self(low, buffers, x.to(self.inside), mode=mode, key=key)
        return Output(output.logits.to(x.dtype), output.features.to(x.dtype), output.buffers)

    def initial(self, key: Key) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Parameters and buffers as each layer's own `reset_parameters` draws them, on the CPU, so equal on every device."""
        net = copy.deepcopy(self.net)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(fold(key))
            for module in net.modules():
                reset = getattr(module, "reset_parameters", None)
                if callable(reset):
                    reset()
        return self.split({**dict(net.named_parameters()), **dict(net.named_buffers())})

    def split(self, state: Tensors) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """A state dict as (params, buffers); every tensor must be there and have its shape."""
        expected = {**dict(self.net.named_parameters()), **dict(self.net.named_buffers())}
        for name, tensor in expected.items():
            if name not in state:
                raise InputError(f"the initial state lacks {name!r}, a tensor of shape {tuple(tensor.shape)}")
            if not isinstance(state[name], Tensor):
                raise InputError(f"initial {name!r} must be a tensor, not {type(state[name]).__name__}")
            if state[name].shape != tensor.shape:
                raise InputError(f"initial {name!r} has shape {tuple(state[name].shape)}, the model's has {tuple(tensor.shape)}")
        if extra := sorted(set(state) - set(expected)):
            raise InputError(f"the initial state holds {extra[0]!r}, which the model does not have")
        state = {name: tensor.detach().clone() for name, tensor in state.items()}
        return only(state, self.param_names), only(state, self.buffer_names)

    def apply_head(self, params: Tensors, features: Tensor) -> Tensor:
        """The last layer alone, on features: what methods that generate features need."""
        if self.head is None:
            raise InputError("this network has no linear layer, so it has no head to feed features to")
        prefix = f"{self.head}." if self.head else ""
        return nn.functional.linear(features, params[f"{prefix}weight"], params.get(f"{prefix}bias"))


def functional(net: nn.Module, *, head: str | None = None) -> Model:
    """Wrap a network. `head` names the layer whose input counts as the features; the last `nn.Linear` unless said otherwise."""
    net = copy.deepcopy(net)
    tap = _Tap()
    head = _find_head(net, head)
    skeleton = _skeleton(net, head, tap)
    norms = {name for name, module in net.named_modules() if isinstance(module, _BatchNorm)}
    every = [name for name, _ in (*net.named_parameters(), *net.named_buffers())]
    return Model(
        net=net,
        nets={"train": _in_mode(skeleton, lambda _: True), "eval": _in_mode(skeleton, lambda _: False),
              "batch": _in_mode(skeleton, lambda module: isinstance(module, _BatchNorm))},
        tap=tap,
        head=head,
        param_names=frozenset(name for name, _ in net.named_parameters()),
        buffer_names=frozenset(name for name, _ in net.named_buffers()),
        norm_names=frozenset(name for name in every if name.rpartition(".")[0] in norms),
    )  # fmt: skip


def _find_head(net: nn.Module, head: str | None) -> str | None:
    linear = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    if head is None:
        return linear[-1] if linear else None
    if head not in linear:
        raise InputError(f"the network has no linear layer {head!r}; it has: {', '.join(linear) or 'none'}")
    return head


def _skeleton(net: nn.Module, head: str | None, tap: _Tap) -> nn.Module:
    """The network's structure without its memory: tensors on the meta device, dropout keyed, the head's input tapped."""
    skeleton = copy.deepcopy(net).to("meta")
    for stream, (name, module) in enumerate(list(skeleton.named_modules())):
        if isinstance(module, nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d):
            keyed = KeyedDropout(module.p, not isinstance(module, nn.Dropout), stream, tap)
            parent, _, attribute = name.rpartition(".")
            setattr(skeleton.get_submodule(parent), attribute, keyed)
    if head is not None:

        def tapped(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            tap.features = inputs[0]

        skeleton.get_submodule(head).register_forward_pre_hook(tapped)
    return skeleton


def _in_mode(skeleton: nn.Module, training: Callable[[nn.Module], bool]) -> nn.Module:
    """One module for each mode, so that no call ever flips a flag."""
    twin = copy.deepcopy(skeleton)
    for module in twin.modules():
        module.training = training(module)
        if isinstance(module, _BatchNorm):  # outside full training statistics are read or left alone, never tracked
            module.track_running_stats = module.track_running_stats and (twin.training or not module.training)
    return twin
