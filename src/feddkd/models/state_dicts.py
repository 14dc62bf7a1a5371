"""State dicts: a network's tensors by name, and the check of tensors that come from outside."""

import copy
import hashlib
from collections.abc import Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from feddkd.errors import InputError
from feddkd.models.tensor_kinds import Inventory
from feddkd.tensors import Tensors


def named_tensors(net: nn.Module, names: Set[str]) -> dict[str, Tensor]:
    """Return the tensors of a network that have these names, each one once."""
    every = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    return {name: tensor for name, tensor in every.items() if name in names}


def read_state(net: nn.Module, inventory: Inventory, state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the tensors in a state dict; raise an InputError if they do not fit the network."""
    expected = named_tensors(net, inventory.names)
    read: dict[str, Tensor] = {}
    for key, given in state.items():
        name = inventory.saved.get(key, key)
        if name not in expected:
            # an entry that is no tensor: the result of a module's get_extra_state()
            if key in net.state_dict():
                continue
            raise InputError(f"the initial state holds {key!r}, which the model does not have")
        _check_tensor(key, given, expected[name])
        value = given.detach().cpu()
        if name in read and not torch.equal(read[name], value):
            raise InputError(
                f"the initial state holds two values for one tensor, {name!r}, which is also"
                f" called {key!r}"
            )
        read[name] = value
    for name in sorted(inventory.trainable | inventory.buffers):
        if name not in read:
            raise InputError(
                f"the initial state lacks {name!r}, a tensor of shape {tuple(expected[name].shape)}"
            )
    return read


def with_tensors(net: nn.Module, tensors: Tensors) -> nn.Module:
    """Return a copy of a network that has the values of these tensors."""
    net = copy.deepcopy(net)
    with torch.no_grad():
        for name, tensor in named_tensors(net, tensors.keys()).items():
            tensor.data = tensors[name].to(tensor.device, copy=True)
    return net


def written_state(net: nn.Module, inventory: Inventory, tensors: Tensors) -> dict[str, Any]:
    """Return the state dict of a network in which these tensors replace its own.

    The tensors are not copied.
    """
    values = {**named_tensors(net, inventory.names), **tensors}
    saved = inventory.saved
    return {
        key: values[saved[key]].detach() if key in saved else value
        for key, value in net.state_dict().items()
    }


def tensors_digest(tensors: Tensors) -> str:
    """Return sha256 over names, shapes, types and bytes; an empty text if there are no tensors."""
    if not tensors:
        return ""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _check_tensor(key: str, given: Any, expected: Tensor) -> None:
    if not isinstance(given, Tensor):
        raise InputError(f"initial {key!r} must be a tensor, not {type(given).__name__}")
    if is_lazy(given) or given.device.type == "meta":
        raise InputError(
            f"initial {key!r} has no numbers: it is on the meta device, or in a layer that was"
            " never called"
        )
    if given.shape != expected.shape:
        raise InputError(
            f"initial {key!r} has shape {tuple(given.shape)}; the model's has shape"
            f" {tuple(expected.shape)}"
        )
    if _kind(given) != _kind(expected):
        raise InputError(
            f"initial {key!r} must be {_kind(expected)}, like the model's; it is {_kind(given)}"
        )
    trained = isinstance(expected, nn.Parameter) and expected.requires_grad
    if trained and not bool(given.isfinite().all()):
        raise InputError(f"initial {key!r} holds NaN or infinite values")


def _kind(tensor: Tensor) -> str:
    """Return in words the properties that a tensor with other values must share."""
    layout = "dense" if tensor.layout == torch.strided else "sparse"
    numbers = "whole or boolean"
    if tensor.is_floating_point():
        numbers = "floating-point"
    elif tensor.is_complex():
        numbers = "complex"
    return f"a {layout} tensor of {numbers} numbers"
