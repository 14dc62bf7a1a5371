"""The tensors of a network: the kind and the names of each.

trainable   parameters: trained, sent, averaged and distilled
buffer      buffers that `state_dict()` holds, such as batch norm's statistics: sent and averaged
constant    all others: parameters with `requires_grad=False` and non-persistent buffers. They never
            change and are never sent

A tensor that is registered under several names (tied weights, a module used twice) is one tensor.
Its name is the first of them.
"""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from feddkd.errors import InputError


@dataclass(frozen=True)
class Inventory:
    """The names of a network's tensors by kind, and the places in its modules."""

    trainable: frozenset[str]
    buffers: frozenset[str]
    constants: frozenset[str]
    norms: frozenset[str]  # the tensors of batch-norm layers, of whatever kind
    slots: Mapping[str, str]  # place in a module -> name of the tensor in it
    saved: Mapping[str, str]  # key of state_dict() -> name of the tensor

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        return self.trainable | self.buffers | self.constants


def inventory(net: nn.Module) -> Inventory:
    """Return a network's inventory.

    Raise an InputError with the name of a layer or tensor that feddkd cannot handle.
    """
    _refuse_layers(net)
    names = _names(net)
    _refuse_tensors(net, names)
    trainable = {names[id(tensor)] for tensor in net.parameters() if tensor.requires_grad}
    state = net.state_dict(keep_vars=True)
    saved = {key: names[id(tensor)] for key, tensor in state.items() if id(tensor) in names}
    frozen = {names[id(tensor)] for tensor in net.parameters()} - trainable
    buffers = set(saved.values()) - trainable - frozen
    _refuse_complex(state, saved, buffers)
    norms: set[str] = set()
    for module in net.modules():
        if isinstance(module, _BatchNorm):
            norms |= {names[id(tensor)] for _, tensor in _registered(module)}
    return Inventory(
        frozenset(trainable),
        frozenset(buffers),
        frozenset(set(names.values()) - trainable - buffers),
        frozenset(norms),
        {slot: names[id(tensor)] for slot, tensor in slots(net)},
        saved,
    )


def slots(net: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every place of a tensor in the modules, and the tensor in it."""
    for prefix, module in net.named_modules():
        for name, tensor in _registered(module):
            yield f"{prefix}.{name}" if prefix else name, tensor


def loose_tensors(net: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that are plain attributes of a module, with their names.

    torch neither moves nor saves them.
    """
    for prefix, module in net.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor):
                yield f"{prefix}.{name}" if prefix else name, value


def _registered(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers of one module, without those of its children."""
    every = (*module._parameters.items(), *module._buffers.items())
    return [(name, tensor) for name, tensor in every if tensor is not None]


def _names(net: nn.Module) -> dict[int, str]:
    """Return the name of each tensor, by the tensor's identity."""
    names: dict[int, str] = {}
    for name, tensor in (*net.named_parameters(), *net.named_buffers()):
        names.setdefault(id(tensor), name)
    return names


def _refuse_layers(net: nn.Module) -> None:
    for name, module in net.named_modules():
        where = f"layer {name!r}" if name else "the network"
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"{where} is a torch.jit program, whose layers cannot be read: give the module from"
                " which it was made"
            )
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            raise InputError(
                f"{where} is a {type(module).__name__}: give its inner module, .module"
            )
        if getattr(module, "scale_grad_by_freq", False):
            raise InputError(
                f"{where} has scale_grad_by_freq=True, which would count the words of all clients"
                " together: leave it out"
            )
        for parameter, tensor in module._parameters.items():
            if is_lazy(tensor):
                raise InputError(
                    f"{where} ({type(module).__name__}) has no shape yet for {parameter!r}: call"
                    " the network once with an example before you give it to feddkd"
                )


def _refuse_tensors(net: nn.Module, names: Mapping[int, str]) -> None:
    for name, tensor in (*slots(net), *loose_tensors(net)):
        if tensor.device.type == "meta":
            raise InputError(
                f"tensor {name!r} is on the meta device and has no numbers: load the network's"
                " weights first"
            )
        if tensor.requires_grad and tensor.is_complex():
            raise InputError(f"tensor {name!r} is complex: only real weights can be trained")
        if tensor._backward_hooks:
            raise InputError(
                f"tensor {name!r} has a hook (register_hook), which would be lost: do the hook's"
                " work in the network's forward"
            )
    _refuse_overlaps({names[id(tensor)]: tensor for _, tensor in slots(net)})


def _refuse_complex(state: Mapping[str, Any], saved: Mapping[str, str], buffers: Set[str]) -> None:
    for key, name in saved.items():
        if name in buffers and state[key].is_complex():
            raise InputError(
                f"buffer {name!r} is complex and cannot be averaged: register it with"
                " persistent=False"
            )


def _refuse_overlaps(tensors: Mapping[str, Tensor]) -> None:
    """Raise an InputError if a trainable tensor shares memory with another tensor.

    torch's optimisers would change both.
    """
    spans = sorted(
        (_span(tensor), name)
        for name, tensor in tensors.items()
        if tensor.numel() and tensor.layout == torch.strided
    )
    for (span, name), (next_span, next_name) in pairwise(spans):
        overlap = span.device == next_span.device and next_span.start < span.end
        if overlap and (tensors[name].requires_grad or tensors[next_name].requires_grad):
            raise InputError(
                f"tensors {name!r} and {next_name!r} share their memory but are two tensors: tie"
                " weights by giving both layers the same Parameter, as in out.weight ="
                " embedding.weight"
            )


class Span(NamedTuple):
    """The memory that a tensor takes."""

    device: str
    start: int
    end: int


def _span(tensor: Tensor) -> Span:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    start = tensor.data_ptr()
    return Span(str(tensor.device), start, start + (last + 1) * tensor.element_size())
