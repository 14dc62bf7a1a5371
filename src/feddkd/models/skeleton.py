"""Skeletons: copies of a network without numbers, which compute with tensors given in each call."""

import copy
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from feddkd.errors import InputError
from feddkd.models.keyed_draws import KeyedDraws, announce_dropout

# train: everything as in training. eval: running statistics, no dropout.
# batch: normalise by the batch's own statistics, no dropout, buffers unchanged.
Mode = Literal["train", "eval", "batch"]


class CallState(threading.local):
    """The skeletons for each mode, and the random draws and features of the current call.

    Each thread has its own, since a call puts its tensors into a skeleton. So several threads may
    call one model at the same time.
    """

    def __init__(self, net: nn.Module, head: str | None) -> None:
        """Make the skeletons of the current thread; Python calls this once in each thread."""
        self.features: Tensor | None = None
        self.draws: KeyedDraws | None = None
        self.nets = skeletons(net, head, self)

    @contextmanager
    def open(self, key: Tensor | None) -> Iterator[None]:
        """Begin a call whose random draws follow a key."""
        self.features, self.draws = None, KeyedDraws(key)
        try:
            with self.draws:
                yield
        finally:
            self.draws = None

    def take(self) -> Tensor | None:
        """Return the features of the call, and forget them."""
        features, self.features = self.features, None
        return features


def skeletons(net: nn.Module, head: str | None, state: CallState) -> dict[Mode, nn.Module]:
    """Return a skeleton for each mode, so that no call changes the mode of a module."""
    skeleton = _skeleton(net, head, state)
    return {
        "train": _in_mode(skeleton, "train"),
        "eval": _in_mode(skeleton, "eval"),
        "batch": _in_mode(skeleton, "batch"),
    }


def _skeleton(net: nn.Module, head: str | None, state: CallState) -> nn.Module:
    """Return the network with its tensors on the meta device.

    Its dropout layers follow the call's key, and the input of its head becomes the call's features.
    """
    skeleton = copy.deepcopy(net, _aliases(net)).to("meta")
    announce_dropout(skeleton, lambda: state.draws)
    for module in skeleton.modules():
        # on a GPU this would rearrange the weights in memory, but each call has its own weights
        if isinstance(module, nn.RNNBase):
            setattr(module, "flatten_parameters", lambda: None)  # noqa: B010
    if head is not None:

        def keep_features(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            state.features = inputs[0] if inputs else None

        skeleton.get_submodule(head).register_forward_pre_hook(keep_features)
    return skeleton


def _aliases(net: nn.Module) -> dict[int, Any]:
    """Return a memo for `copy.deepcopy` by which a copy shares the memory of the network's tensors.

    The copy has its own tensor objects, so that moving it does not move the network.
    """
    memo: dict[int, Any] = {}
    for tensor in (*net.parameters(), *net.buffers()):
        if tensor.layout != torch.strided:
            continue
        if type(tensor) is nn.Parameter:
            memo[id(tensor)] = nn.Parameter(tensor.detach(), tensor.requires_grad)
        elif type(tensor) is Tensor and not tensor.requires_grad:
            memo[id(tensor)] = tensor.detach()
    return memo


def _in_mode(skeleton: nn.Module, mode: Mode) -> nn.Module:
    net = copy.deepcopy(skeleton)
    net.train(mode == "train")
    for module in net.modules():
        if isinstance(module, _BatchNorm):
            module.training = module.training or mode == "batch"
            # statistics change in mode "train" only
            module.track_running_stats = module.track_running_stats and (
                mode == "train" or not module.training
            )
    return net


class _Uncompiled(nn.Module):
    """A torch.compile'd network without the compiler, with the same names of tensors.

    Engines compile the network themselves.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self._orig_mod(*inputs, **named)


def uncompiled(net: nn.Module) -> nn.Module:
    """Return a network without torch.compile's wrapper."""
    # importing torch._dynamo takes a second; if it is not imported, nothing is compiled
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and isinstance(net, dynamo.OptimizedModule):
        return _Uncompiled(net._orig_mod)
    return net


def copied(net: nn.Module) -> nn.Module:
    """Return a copy of a network; raise an InputError if it cannot be copied."""
    try:
        return copy.deepcopy(net)
    except Exception as error:
        raise InputError(
            f"this {type(net).__name__} cannot be copied ({error}); if the reason is"
            " torch.nn.utils.weight_norm or spectral_norm, use those of"
            " torch.nn.utils.parametrizations"
        ) from error


def find_head(net: nn.Module, head: str | None) -> str | None:
    """Return the name of the layer whose input is the features.

    If no name is given, it is the last linear layer that is called, or None if there is none.
    """
    linear = {name: layer for name, layer in net.named_modules() if isinstance(layer, nn.Linear)}
    if head is None:
        # nn.MultiheadAttention uses the weights of its projection without calling it
        called = [
            name
            for name, layer in linear.items()
            if not isinstance(layer, NonDynamicallyQuantizableLinear)
        ]
        return called[-1] if called else None
    if head not in linear:
        raise InputError(
            f"the network has no linear layer {head!r}; it has: {', '.join(linear) or 'none'}"
        )
    return head
