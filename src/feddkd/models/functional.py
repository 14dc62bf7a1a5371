"""A network as a pure function of its tensors.

`functional(net)` wraps any `nn.Module`. `model(params, buffers, x, mode=..., key=...)` returns
logits, features and the new buffers, and changes nothing: not its arguments, not the module, no
generator. So one network serves every client, and an engine may loop, vmap, compile or capture the
call. A network that cannot be wrapped is refused with the name of the layer or tensor.

Inputs that are a tuple are given to the network in order, net(*x), those that are a dict by name,
net(**x).
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.conv import _ConvNd

from feddkd.errors import InputError
from feddkd.models.network_output import Choice, find_logits
from feddkd.models.seeded_build import seeded_generators
from feddkd.models.skeleton import CallState, copied, find_head, uncompiled
from feddkd.models.skeleton import Mode as Mode
from feddkd.models.state_dicts import (
    named_tensors,
    read_state,
    tensors_digest,
    with_tensors,
    written_state,
)
from feddkd.models.tensor_kinds import Inventory, inventory, loose_tensors
from feddkd.randomness import Key
from feddkd.tasks.labels import CLASSIFICATION
from feddkd.tasks.task import Task
from feddkd.tensors import Tensors, only, to
from feddkd.trees import Tree, first_tensor, map_tensors


class Output(NamedTuple):
    """The result of a call."""

    logits: Tensor
    # the input of the last linear layer; the logits themselves if a network has none
    features: Tensor
    buffers: dict[str, Tensor]


@dataclass(frozen=True)
class Model:
    """A network as a function, and the tensors it came with."""

    net: nn.Module = field(repr=False)  # a copy of the given network, with its weights
    call_state: CallState = field(repr=False)
    head: str | None
    tensors: Inventory = field(repr=False)
    # frozen parameters and non-persistent buffers: the same for all clients
    constants: Tensors = field(repr=False)
    output: Choice = None
    # the type of its arithmetic, if it is not the type of its parameters
    inside: torch.dtype | None = None
    # its result for an example depends on the others in the batch, as with batch norm
    couples: bool = False
    task: Task = field(default=CLASSIFICATION, repr=False)  # what it learns

    @property
    def nets(self) -> dict[Mode, nn.Module]:
        """The skeletons of this thread by mode; they hold no numbers."""
        return self.call_state.nets

    @property
    def param_names(self) -> frozenset[str]:
        """The names of the parameters that are trained."""
        return self.tensors.trainable

    @property
    def buffer_names(self) -> frozenset[str]:
        """The names of the buffers that are part of a model's state."""
        return self.tensors.buffers

    @property
    def norm_names(self) -> frozenset[str]:
        """The names of batch norm's parameters and buffers, without constants."""
        return self.tensors.norms - self.tensors.constants

    @property
    def head_names(self) -> frozenset[str]:
        """The names of the trained parameters of the last linear layer."""
        if self.head is None:
            raise InputError(
                "this network has no linear layer that could be its head: name the tensors, as in"
                " names='classifier.*'"
            )
        slots = (f"{self.head}.{part}" if self.head else part for part in ("weight", "bias"))
        return frozenset(self.tensors.slots.get(slot, slot) for slot in slots) & self.param_names

    @property
    def convolves(self) -> bool:
        """The network has a convolution."""
        return any(isinstance(module, _ConvNd) for module in self.net.modules())

    def on(self, device: torch.device, dtype: torch.dtype) -> "Model":
        """Return the same network with its constants on a device and of a type."""
        return replace(self, constants=to(self.constants, device, dtype))

    def computing_in(self, dtype: torch.dtype) -> "Model":
        """Return the same network with its arithmetic in another type.

        Its parameters and results keep their type, and so does batch norm.
        """
        return replace(self, inside=dtype, constants=self._lowered(self.constants, dtype))

    def _lowered(self, tensors: Tensors, dtype: torch.dtype) -> dict[str, Tensor]:
        keep = self.tensors.norms
        return {
            n: t if n in keep or not t.is_floating_point() else t.to(dtype)
            for n, t in tensors.items()
        }

    def __call__(
        self, params: Tensors, buffers: Tensors, x: Tree, *, mode: Mode, key: Tensor | None = None
    ) -> Output:
        dtype = next((tensor.dtype for tensor in params.values()), first_tensor(x).dtype)
        if self.inside is not None and self.inside != dtype:
            return self._call_inside(self.inside, params, buffers, x, dtype, mode, key)
        fresh = {
            name: tensor.clone() if mode == "train" else tensor for name, tensor in buffers.items()
        }
        given = {**self.constants, **params, **fresh}
        tensors = {slot: given[name] for slot, name in self.tensors.slots.items()}
        inputs, named = arguments(x)
        with self.call_state.open(key):
            # tie_weights=False: `tensors` has every slot
            returned = functional_call(
                self.nets[mode], tensors, inputs, dict(named), tie_weights=False
            )
        logits = self.logits(returned)
        features = self.call_state.take()
        return Output(logits, logits if features is None else features, fresh)

    def _call_inside(
        self,
        inside: torch.dtype,
        params: Tensors,
        buffers: Tensors,
        x: Tree,
        dtype: torch.dtype,
        mode: Mode,
        key: Tensor | None,
    ) -> Output:
        low, low_buffers = self._lowered(params, inside), self._lowered(buffers, inside)
        low_x = map_tensors(lambda t: t.to(inside) if t.is_floating_point() else t, x)
        output = replace(self, inside=None)(low, low_buffers, low_x, mode=mode, key=key)
        # only the change is added, so that unchanged buffers keep their last bit
        moved = {}
        for name, after in output.buffers.items():
            before = buffers[name]
            changed = after.dtype != before.dtype
            moved[name] = before + (after - low_buffers[name]).to(dtype) if changed else after
        return Output(output.logits.to(dtype), output.features.to(dtype), moved)

    def logits(self, returned: Any) -> Tensor:
        """Return the logits in the network's return value; raise an InputError if not found."""
        return find_logits(returned, self.output)

    # --- the tensors of the network

    def start(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return copies of the parameters and buffers the network came with, on the CPU."""
        named = named_tensors(self.net, self.param_names | self.buffer_names)
        state = {name: tensor.detach().to("cpu", copy=True) for name, tensor in named.items()}
        return only(state, self.param_names), only(state, self.buffer_names)

    def initial(self, key: Key) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return new parameters and buffers, as each layer's `reset_parameters` draws them.

        The draws follow the key; the tensors are on the CPU.
        """
        net = copy.deepcopy(self.net)
        with seeded_generators(key), torch.no_grad():
            for module in net.modules():
                reset = getattr(module, "reset_parameters", None)
                if callable(reset):
                    reset()
        named = named_tensors(net, self.param_names | self.buffer_names)
        state = {name: tensor.detach() for name, tensor in named.items()}
        return only(state, self.param_names), only(state, self.buffer_names)

    def loaded(self, state: Mapping[str, Any]) -> "Model":
        """Return the same network with the values of a state dict, which must fit."""
        net = with_tensors(self.net, read_state(self.net, self.tensors, state))
        return replace(self, net=net, constants=named_tensors(net, self.tensors.constants))

    def split(self, state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the parameters and buffers in a state dict, which must fit."""
        return self.loaded(state).start()

    def state_dict(self, params: Tensors, buffers: Tensors) -> dict[str, Any]:
        """Return a state dict that the network's own `load_state_dict` takes.

        It has the constants too, and all names of tied tensors.
        """
        state = written_state(self.net, self.tensors, {**params, **buffers})
        return {
            key: value.cpu().clone() if key in self.tensors.saved else value
            for key, value in state.items()
        }

    def is_alike(self, other: "Model") -> bool:
        """Return whether one program can compute both networks.

        It can if all tensors are equal that are neither trained nor averaged.
        """
        ours = {**dict(loose_tensors(self.net)), **self.constants}
        theirs = {**dict(loose_tensors(other.net)), **other.constants}
        return ours.keys() == theirs.keys() and all(
            torch.equal(ours[name], theirs[name]) for name in ours
        )

    @property
    def constants_digest(self) -> str:
        """A digest of the constants; an empty text if there are none."""
        return tensors_digest(named_tensors(self.net, self.tensors.constants))

    def tensor(self, params: Tensors, name: str) -> Tensor | None:
        """Return the parameter with this name in state_dict(), trainable or not, or None."""
        first_name = self.tensors.slots.get(name, name)
        return params[first_name] if first_name in params else self.constants.get(first_name)

    def apply_head(self, params: Tensors, features: Tensor) -> Tensor:
        """Return the outputs of the last layer alone, for features."""
        prefix = f"{self.head}." if self.head else ""
        weight = None if self.head is None else self.tensor(params, f"{prefix}weight")
        if weight is None:
            raise InputError(
                "this network has no plain linear layer, so it has no head that takes features"
            )
        return nn.functional.linear(features, weight, self.tensor(params, f"{prefix}bias"))


def arguments(x: Tree) -> tuple[tuple[Tree, ...], Mapping[str, Tree]]:
    """Return a network's positional and named arguments for an input."""
    if isinstance(x, Mapping):
        return (), x
    return x if isinstance(x, tuple) else (x,), {}


def functional(
    net: "nn.Module | Model", *, head: str | None = None, output: Choice = None
) -> Model:
    """Return a network as a function; it keeps its weights.

    `head` is the name of the layer whose input is the features; by default the last `nn.Linear`.
    `output` says where the logits are in the network's return value: the name of an entry or
    attribute, a position, or a function. By default they are the returned tensor, or the entry
    `logits`.
    """
    if isinstance(net, Model):
        return net
    net = uncompiled(net)
    # of the original network: a copy no longer shares memory between its tensors
    tensors, head = inventory(net), find_head(net, head)
    copy_of_net = copied(net)
    constants = named_tensors(copy_of_net, tensors.constants)
    return Model(
        net=copy_of_net,
        call_state=CallState(copy_of_net, head),
        head=head,
        tensors=tensors,
        constants={name: tensor.detach() for name, tensor in constants.items()},
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
