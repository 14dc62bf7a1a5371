"""A network as a pure function of its tensors.

`functional(net)` wraps any `nn.Module`; `model(params, buffers, x, mode=..., key=...)` returns
logits, features and the new buffers and changes nothing: not its arguments, not the module, no
generator. So one network serves every client, and an engine may loop, vmap, compile or capture the
call. What cannot be wrapped is refused with the name of the layer or tensor.
"""

import copy
import hashlib
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from feddkd.errors import InputError
from feddkd.models.keyed_draws import KeyedDraws, announce_dropout
from feddkd.models.seeded_build import seeded_generators
from feddkd.models.tensor_kinds import Inventory, inventory, loose_tensors
from feddkd.randomness import Key
from feddkd.tensors import Tensors, only, to

# train: everything as in training. eval: running statistics, no dropout.
# batch: normalise by the batch's own statistics, no dropout, buffers left as they were.
Mode = Literal["train", "eval", "batch"]
# where the logits are in what the network returns
Choice = str | int | Callable[[Any], Tensor] | None


class Output(NamedTuple):
    logits: Tensor
    # the input of the last linear layer; the logits themselves where a network has none
    features: Tensor
    buffers: dict[str, Tensor]


class _Tap(threading.local):
    """What flows beside the tensors during one call: the features on their way out, random draws on
    their way in.

    Every thread has its own, so that several may call one model at a time.
    """

    features: Tensor | None = None
    draws: KeyedDraws | None = None

    @contextmanager
    def open(self, key: Tensor | None) -> Iterator[None]:
        self.features, self.draws = None, KeyedDraws(key)
        try:
            with self.draws:
                yield
        finally:
            self.draws = None

    def take(self) -> Tensor | None:
        features, self.features = self.features, None
        return features


@dataclass(frozen=True)
class Model:
    """A network as a function, and the tensors it came with."""

    net: nn.Module = field(repr=False)  # as it was given, with its weights
    nets: Mapping[Mode, nn.Module] = field(repr=False)
    tap: _Tap = field(repr=False)
    head: str | None
    tensors: Inventory = field(repr=False)
    # frozen parameters and non-persistent buffers: the same for all clients
    constants: Tensors = field(repr=False)
    output: Choice = None
    # what it computes in, where that is not the type of its numbers
    inside: torch.dtype | None = None
    # what it computes for an example depends on the others in the batch, as with batch norm
    couples: bool = False

    @property
    def param_names(self) -> frozenset[str]:
        """Names of what is trained."""
        return self.tensors.trainable

    @property
    def buffer_names(self) -> frozenset[str]:
        """Names of the buffers that are part of a model's state."""
        return self.tensors.buffers

    @property
    def norm_names(self) -> frozenset[str]:
        """Names of batch norm's parameters and buffers, constants left out."""
        return self.tensors.norms - self.tensors.constants

    @property
    def convolves(self) -> bool:
        return any(isinstance(module, _ConvNd) for module in self.net.modules())

    def on(self, device: torch.device, dtype: torch.dtype) -> "Model":
        """Return the same network with its constants on a device and of a type."""
        return replace(self, constants=to(self.constants, device, dtype))

    def computing_in(self, dtype: torch.dtype) -> "Model":
        """Return the same network with its arithmetic in another type.

        Its numbers and results stay, and so does batch norm.
        """
        return replace(self, inside=dtype, constants=self._lowered(self.constants, dtype))

    def _lowered(self, tensors: Tensors, dtype: torch.dtype) -> dict[str, Tensor]:
        keep = self.tensors.norms
        return {
            n: t if n in keep or not t.is_floating_point() else t.to(dtype)
            for n, t in tensors.items()
        }

    def __call__(
        self, params: Tensors, buffers: Tensors, x: Tensor, *, mode: Mode, key: Tensor | None = None
    ) -> Output:
        dtype = next((tensor.dtype for tensor in params.values()), x.dtype)
        if self.inside is not None and self.inside != dtype:
            return self._call_inside(params, buffers, x, dtype, mode, key)
        fresh = {
            name: tensor.clone() if mode == "train" else tensor for name, tensor in buffers.items()
        }
        given = {**self.constants, **params, **fresh}
        tensors = {slot: given[name] for slot, name in self.tensors.slots.items()}
        with self.tap.open(key):
            # `tensors` has every slot
            found = functional_call(self.nets[mode], tensors, (x,), tie_weights=False)
        logits = self.logits(found)
        features = self.tap.take()
        return Output(logits, logits if features is None else features, fresh)

    def _call_inside(
        self,
        params: Tensors,
        buffers: Tensors,
        x: Tensor,
        dtype: torch.dtype,
        mode: Mode,
        key: Tensor | None,
    ) -> Output:
        assert self.inside is not None
        low, low_buffers = (self._lowered(tensors, self.inside) for tensors in (params, buffers))
        seen = x.to(self.inside) if x.is_floating_point() else x
        output = replace(self, inside=None)(low, low_buffers, seen, mode=mode, key=key)
        # what the call has added, so that buffers it leaves alone keep their last bit
        moved = {
            name: (
                after
                if after.dtype == buffers[name].dtype
                else buffers[name] + (after - low_buffers[name]).to(dtype)
            )
            for name, after in output.buffers.items()
        }
        return Output(output.logits.to(dtype), output.features.to(dtype), moved)

    def logits(self, found: Any) -> Tensor:
        """Return the logits in what the network returned, or raise an InputError that says how to
        choose them.
        """
        chosen = _chosen(found, self.output)
        if not isinstance(chosen, Tensor):
            raise InputError(
                f"the network returns {_described(found)}, and its logits are not plain to see: say"
                " where they are, as in functional(net, output=0), output='logits' or"
                " output=lambda found: found[0]"
            )
        return chosen

    # --- the tensors a network has

    def start(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return copies of the parameters and buffers the network came with, on the CPU."""
        state = {
            name: tensor.detach().to("cpu", copy=True)
            for name, tensor in _tensors(self.net, self.tensors).items()
        }
        return only(state, self.param_names), only(state, self.buffer_names)

    def initial(self, key: Key) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return parameters and buffers as each layer's own `reset_parameters` draws them by the
        key, on the CPU.
        """
        net = copy.deepcopy(self.net)
        with seeded_generators(key), torch.no_grad():
            for module in net.modules():
                reset = getattr(module, "reset_parameters", None)
                if callable(reset):
                    reset()
        state = {name: tensor.detach() for name, tensor in _tensors(net, self.tensors).items()}
        return only(state, self.param_names), only(state, self.buffer_names)

    def loaded(self, state: Mapping[str, Any]) -> "Model":
        """Return the same network with the numbers of a state dict, which must fit."""
        own = _tensors(self.net, self.tensors)
        found: dict[str, Tensor] = {}
        for key, given in state.items():
            name = self.tensors.saved.get(key, key)
            if name not in own:
                # no tensor, but what a module's get_extra_state() returns
                if key in self.net.state_dict():
                    continue
                raise InputError(f"the initial state holds {key!r}, which the model does not have")
            _check_tensor(key, given, own[name])
            if name in found and not torch.equal(found[name], given.detach().cpu()):
                raise InputError(
                    f"the initial state holds two values for one tensor, {name!r}, which is also"
                    f" called {key!r}"
                )
            found[name] = given.detach().cpu()
        for name in sorted(self.param_names | self.buffer_names):
            if name not in found:
                raise InputError(
                    f"the initial state lacks {name!r}, a tensor of shape {tuple(own[name].shape)}"
                )
        net = copy.deepcopy(self.net)
        with torch.no_grad():
            for name, tensor in _tensors(net, self.tensors).items():
                if name in found:
                    tensor.data = found[name].to(tensor.device, copy=True)
        return replace(
            self, net=net, constants=only(_tensors(net, self.tensors), self.tensors.constants)
        )

    def split(self, state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the parameters and buffers in a state dict, which must fit."""
        return self.loaded(state).start()

    def state_dict(self, params: Tensors, buffers: Tensors) -> dict[str, Any]:
        """Return what the network's own `load_state_dict` takes: constants too, and all names of
        tied tensors.
        """
        known = {**_tensors(self.net, self.tensors), **params, **buffers}
        saved = self.tensors.saved
        return {
            key: known[saved[key]].detach().cpu().clone() if key in saved else value
            for key, value in self.net.state_dict().items()
        }

    def is_alike(self, other: "Model") -> bool:
        """Return whether one program can compute both networks: all that is neither trained nor
        averaged is the same.
        """
        ours, theirs = ({**dict(loose_tensors(one.net)), **one.constants} for one in (self, other))
        return ours.keys() == theirs.keys() and all(
            torch.equal(ours[name], theirs[name]) for name in ours
        )

    @property
    def constants_digest(self) -> str:
        """Tells two sets of constants apart; empty where there are none."""
        return tensors_digest(only(_tensors(self.net, self.tensors), self.tensors.constants))

    def tensor(self, params: Tensors, name: str) -> Tensor | None:
        """Return the parameter with this name in state_dict(), trainable or not; None if there is
        none.
        """
        own = self.tensors.slots.get(name, name)
        return params[own] if own in params else self.constants.get(own)

    def apply_head(self, params: Tensors, features: Tensor) -> Tensor:
        """Return the outputs of the last layer alone, for features: what methods that generate
        features need.
        """
        prefix = f"{self.head}." if self.head else ""
        weight = None if self.head is None else self.tensor(params, f"{prefix}weight")
        if weight is None:
            raise InputError(
                "this network has no plain linear layer, so it has no head to feed features to"
            )
        return nn.functional.linear(features, weight, self.tensor(params, f"{prefix}bias"))


def functional(
    net: "nn.Module | Model", *, head: str | None = None, output: Choice = None
) -> Model:
    """Wrap a network, which keeps its weights.

    `head` names the layer whose input counts as the features; the last `nn.Linear` unless said.
    `output` says where the logits are in what the network returns: the name of an entry or
    attribute, a position, or a function. Unless said they are the tensor it returns, or the entry
    `logits`.
    """
    if isinstance(net, Model):
        return net
    net = _uncompiled(net)
    # of the original: a copy no longer shares memory
    tensors, tap, head = inventory(net), _Tap(), _find_head(net, head)
    given = _copied(net)
    skeleton = _skeleton(given, head, tap)
    return Model(
        net=given,
        nets={
            "train": _in_mode(skeleton, "train"),
            "eval": _in_mode(skeleton, "eval"),
            "batch": _in_mode(skeleton, "batch"),
        },
        tap=tap,
        head=head,
        tensors=tensors,
        constants={
            name: tensor.detach()
            for name, tensor in only(_tensors(given, tensors), tensors.constants).items()
        },
        output=output,
        couples=bool(tensors.norms),
    )


def built(build: "Callable[[], nn.Module | Model]", key: Key) -> Model:
    """Return the network that a function builds under the seed that the key gives."""
    with seeded_generators(key):
        net = build()
    if not isinstance(net, nn.Module | Model):
        raise InputError(
            "a function that builds a network must return a torch.nn.Module, not"
            f" {type(net).__name__}"
        )
    return functional(net)


def tensors_digest(tensors: Tensors) -> str:
    """Return sha256 over names, shapes, types and bytes; the empty text of no tensors."""
    if not tensors:
        return ""
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype};".encode())
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def _tensors(net: nn.Module, names: Inventory) -> dict[str, Tensor]:
    """Return a network's tensors by name, each one once."""
    every = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    return {
        name: every[name]
        for name in every
        if name in names.trainable | names.buffers | names.constants
    }


def _check_tensor(key: str, given: Any, own: Tensor) -> None:
    if not isinstance(given, Tensor):
        raise InputError(f"initial {key!r} must be a tensor, not {type(given).__name__}")
    if is_lazy(given) or given.device.type == "meta":
        raise InputError(
            f"initial {key!r} has no numbers: it is on the meta device, or in a layer that was"
            " never called"
        )
    if given.shape != own.shape:
        raise InputError(
            f"initial {key!r} has shape {tuple(given.shape)}, the model's has {tuple(own.shape)}"
        )
    if _kind(given) != _kind(own):
        raise InputError(
            f"initial {key!r} must be {_kind(own)}, as the model's is; not {_kind(given)}"
        )
    if isinstance(own, nn.Parameter) and own.requires_grad and not bool(given.isfinite().all()):
        raise InputError(f"initial {key!r} holds NaN or infinite values")


def _kind(tensor: Tensor) -> str:
    """Return in words what must not change when numbers take the place of others."""
    numbers = (
        "floating-point"
        if tensor.is_floating_point()
        else "complex"
        if tensor.is_complex()
        else "whole or boolean"
    )
    return (
        f"a {'dense' if tensor.layout == torch.strided else 'sparse'} tensor of {numbers} numbers"
    )


def _chosen(found: Any, output: Choice) -> Any:
    try:
        if callable(output):
            return output(found)
        if isinstance(output, int):
            return found[output]
        name = "logits" if output is None else output
        if isinstance(found, Mapping):
            return found[name] if output is not None else found.get(name)
        return (
            getattr(found, name)
            if output is not None
            else found
            if isinstance(found, Tensor)
            else getattr(found, name, None)
        )
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"output={output!r} does not fit what the network returns, {_described(found)}: {error}"
        ) from error


def _described(found: Any) -> str:
    if isinstance(found, Mapping):
        return f"a {type(found).__name__} with {', '.join(map(repr, found)) or 'nothing'}"
    if isinstance(found, tuple | list):
        return f"a {type(found).__name__} of {len(found)}"
    return f"a {type(found).__name__}"


class _Uncompiled(nn.Module):
    """A torch.compile'd network without the compiler, under the same names: engines compile for
    themselves.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self._orig_mod(*inputs, **named)


def _uncompiled(net: nn.Module) -> nn.Module:
    # to import it takes a second, and without it nothing is compiled
    dynamo = sys.modules.get("torch._dynamo")
    return (
        _Uncompiled(net._orig_mod)
        if dynamo is not None and isinstance(net, dynamo.OptimizedModule)
        else net
    )


def _copied(net: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(net)
    except Exception as error:
        raise InputError(
            f"this {type(net).__name__} cannot be copied ({error}); where"
            " torch.nn.utils.weight_norm or spectral_norm is the reason, use those of"
            " torch.nn.utils.parametrizations"
        ) from error


def _find_head(net: nn.Module, head: str | None) -> str | None:
    linear = [name for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    if head is None:  # nn.MultiheadAttention uses its projection's weights without calling it
        called = [
            name
            for name in linear
            if not isinstance(net.get_submodule(name), NonDynamicallyQuantizableLinear)
        ]
        return called[-1] if called else None
    if head not in linear:
        raise InputError(
            f"the network has no linear layer {head!r}; it has: {', '.join(linear) or 'none'}"
        )
    return head


def _skeleton(net: nn.Module, head: str | None, tap: _Tap) -> nn.Module:
    """Return the network's structure without its memory: tensors on the meta device, dropout keyed,
    the head's input tapped.
    """
    skeleton = copy.deepcopy(net).to("meta")
    announce_dropout(skeleton, lambda: tap.draws)
    for module in skeleton.modules():
        # on a GPU it would lay out its weights anew, which come with each call
        if isinstance(module, nn.RNNBase):
            setattr(module, "flatten_parameters", _do_nothing)  # noqa: B010
    if head is not None:

        def tapped(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            tap.features = inputs[0] if inputs else None

        skeleton.get_submodule(head).register_forward_pre_hook(tapped)
    return skeleton


def _do_nothing() -> None:
    pass


def _in_mode(skeleton: nn.Module, mode: Mode) -> nn.Module:
    """Return one module for each mode, so that no call ever flips a flag."""
    twin = copy.deepcopy(skeleton)
    twin.train(mode == "train")
    for module in twin.modules():
        if isinstance(module, _BatchNorm):
            module.training = module.training or mode == "batch"
            # outside full training statistics are read or left alone, never tracked
            module.track_running_stats = module.track_running_stats and (
                mode == "train" or not module.training
            )
    return twin
