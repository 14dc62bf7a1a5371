"""A proof, on a few examples, that a network's functional form computes the same as the network.

Before anything runs, both are called in evaluation mode and in training mode, with the same draws,
and their outputs, buffers and gradients are compared. A network is refused, with the name of the
layer or tensor, if the two differ, if it draws from a generator instead of the key, or if it
changes a tensor that must be constant.
"""

import copy
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor, nn
from torch.func import grad

from feddkd.errors import InputError, line_of
from feddkd.models.comparison import is_close, is_same
from feddkd.models.coupling import couples_examples
from feddkd.models.functional import Mode, Model, Output, arguments
from feddkd.models.keyed_draws import keyed
from feddkd.models.layer_search import described_layer, differing_layer, drawing_layer
from feddkd.models.seeded_build import draws_globally
from feddkd.models.state_dicts import written_state
from feddkd.models.unread_parameters import RefuseUnread
from feddkd.tensors import Tensors
from feddkd.trees import Tree, cat, first_tensor, kind_in_words, map_tensors, take, tensors_of

FEW = 4  # examples
WORDS: dict[Mode, str] = {"eval": "in evaluation mode", "train": "in training mode"}


def prove(model: Model, params: Tensors, buffers: Tensors, x: Tree) -> Model:
    """Return the model with the facts that the proof has found; raise an InputError if it fails.

    x: a few examples.
    """
    dtype = next(tensor.dtype for tensor in params.values())
    state = written_state(model.net, model.tensors, {**params, **buffers})
    device, count = first_tensor(x).device, len(first_tensor(x))
    net = _moved(copy.deepcopy(model.net), device, dtype)
    x = take(x, slice(FEW)) if count > 1 else cat([x, x])  # batch norm needs two examples
    key = torch.tensor(12345, device=device)
    couples, reaches_head = model.couples, False
    with torch.no_grad():
        for mode in WORDS:
            trial = NetworkTrial(model, params, buffers, net, x, key, mode)
            net.load_state_dict(state)
            output = trial.check()
            if mode == "eval":
                trial.check_size()
            net.load_state_dict(state)
            trial.check_gradient()
            couples = couples or couples_examples(model, params, buffers, net, x, mode)
            reaches_head = output.features is not output.logits
    return replace(model, couples=couples, head=model.head if reaches_head else None)


@dataclass(frozen=True)
class NetworkTrial:
    """A network and its functional form with the same numbers, in one mode."""

    model: Model
    params: Tensors
    buffers: Tensors
    net: nn.Module
    x: Tree
    key: Tensor
    mode: Mode

    @property
    def count(self) -> int:
        """The number of examples."""
        return len(first_tensor(self.x))

    def call_net(self, x: Tree) -> Tensor:
        """Return the module's logits for a copy of an input."""
        inputs, named = arguments(x)
        return self.model.logits(self.net(*inputs, **named))

    def call(self, x: Tree) -> Output:
        """Return what the functional form computes."""
        return self.model(self.params, self.buffers, x, mode=self.mode, key=self.key)

    def check(self) -> Output:
        """Return what the functional form computes; raise an InputError if the module differs."""
        expected = self._expected()
        actual, draws = draws_globally(
            lambda: self.call(self.x), self.key, lambda a, b: is_same(a.logits, b.logits)
        )
        if draws:
            self._refuse(
                f"{self._drawing_layer()} draws random numbers in forward that cannot follow the"
                " seed",
                "use dropout layers or torch's rand, randn, randint, randperm, bernoulli or normal",
            )
        if not is_close(expected.logits, actual.logits):
            self._refuse(
                f"{self._differing_layer()} computes other numbers as a function of its tensors"
                " than as a module"
            )
        for name in sorted(actual.buffers):
            if not is_close(expected.buffers[name], actual.buffers[name]):
                self._refuse(
                    f"the network changes its buffer {name!r} in a way that its functional form"
                    " does not"
                )
        with RefuseUnread(self.params):
            again = self.call(self.x)
        if not is_same(actual.logits, again.logits):
            self._refuse(
                "the network gives other outputs when it is called again: it keeps a state outside"
                " its tensors"
            )
        return actual

    def check_size(self) -> None:
        """Raise an InputError if the network cannot read a batch of another size."""
        half = self.count // 2
        try:
            self.call(take(self.x, slice(half)))
        except Exception as error:
            self._refuse(
                f"the network reads {self.count} examples, but not {half}:"
                f" {_first_sentence(error)}{line_of(error)}",
                "forward must read any number of examples: the last batch of an epoch is smaller",
            )

    def check_gradient(self) -> None:
        """Raise an InputError if the functional form's gradient is not the module's."""
        expected = self._expected_gradient()
        actual = self._actual_gradient() if expected else {}
        slopes = [
            float(slope.abs().nan_to_num().max()) for slope in expected.values() if slope.numel()
        ]
        largest = max(slopes, default=0.0)
        for name in sorted(actual):
            if not is_close(expected[name], actual[name], least=1e-2 * largest):
                self._refuse(
                    f"the gradient of {name!r} as a function of the network's tensors is not the"
                    " module's"
                )
        self.net.zero_grad()  # frees the gradient

    def _expected_gradient(self) -> dict[str, Tensor]:
        """Return the module's gradient.

        It is empty if the module has none in evaluation mode, where not every method needs one.
        """
        self.net.zero_grad()
        try:
            with torch.enable_grad(), keyed(self.net, self.key):
                logits = self.call_net(map_tensors(torch.clone, self.x))
                _trial_loss(logits).backward()  # type: ignore[no-untyped-call]
        except Exception as error:
            if self.mode == "eval":
                return {}
            self._refuse(
                "the network's gradient cannot be computed:"
                f" {_first_sentence(error)}{line_of(error)}"
            )
        return {
            name: torch.zeros_like(weight) if weight.grad is None else weight.grad.to_dense()
            for name, weight in self.net.named_parameters()
            if weight.requires_grad
        }

    def _actual_gradient(self) -> Tensors:
        def loss(params: Tensors) -> Tensor:
            return _trial_loss(replace(self, params=params).call(self.x).logits)

        try:
            gradient: Tensors = grad(loss)(self.params)
            return gradient
        except InputError:
            raise
        except Exception as error:
            self._refuse(
                "torch.func cannot compute the gradient of this network:"
                f" {_first_sentence(error)}{line_of(error)}",
                "leave out checkpointing, backward hooks, packed sequences, torch.autograd.grad in"
                " forward, and an autograd.Function without setup_context()",
            )

    def _expected(self) -> Output:
        """Return what the module computes.

        Raise an InputError if it cannot compute it, or changes a tensor that must stay the same.
        """
        self.net.train(self.mode == "train")
        tensors = {**dict(self.net.named_parameters()), **dict(self.net.named_buffers())}
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        x = map_tensors(torch.clone, self.x)
        try:
            with keyed(self.net, self.key):
                logits = self.call_net(x)
        except InputError:
            raise
        except Exception as error:
            self._refuse(
                f"the network cannot read examples of shape {self._shape_in_words()}:"
                f" {error}{line_of(error)}"
            )
        self._check_logits(logits)
        if not all(map(is_same, tensors_of(x), tensors_of(self.x))):
            self._refuse(
                "the network changes its input in place", "begin forward with x = x.clone()"
            )
        self._check_changes(before)
        after = dict(self.net.named_buffers())
        buffers = {name: after[name].clone() for name in self.model.buffer_names}
        return Output(logits, logits, buffers)

    def _shape_in_words(self) -> str:
        if not isinstance(self.x, Tensor):
            return kind_in_words(self.x)
        shape = str(tuple(self.x.shape[1:]))
        if self.x.is_floating_point():
            return shape
        return f"{shape}, whole numbers (tokens; give a table of numbers as floats)"

    def _check_logits(self, logits: Tensor) -> None:
        rows = len(logits) if logits.dim() else 0
        if rows != self.count or not logits.is_floating_point():
            self._refuse(
                "logits must be floating-point numbers of shape (N, ...), with N the number of"
                f" examples; for N = {self.count} the network's are {logits.dtype} of shape"
                f" {tuple(logits.shape)}"
            )

    def _check_changes(self, before: Tensors) -> None:
        """Raise an InputError if the module has changed a tensor that must stay the same."""
        for name, weight in self.net.named_parameters():
            if not is_same(before[name], weight):
                self._refuse(
                    f"the network changes its parameter {name!r} in forward",
                    "compute with a changed copy",
                )
        for name, after in sorted(self.net.named_buffers()):
            constant = self.model.tensors.slots[name] in self.model.tensors.constants
            if is_same(before[name], after) or not (self.mode == "eval" or constant):
                continue
            reason = "in evaluation mode it must not change"
            if constant:
                reason = "it is not saved (persistent=False), so it must not change"
            self._refuse(f"the network changes its buffer {name!r}", reason)

    def _differing_layer(self) -> str:
        def call() -> None:
            with keyed(self.net, self.key):
                self.call_net(map_tensors(torch.clone, self.x))

        other = self.model.nets[self.mode]
        name = differing_layer(self.net, call, other, lambda: self.call(self.x))
        return described_layer(self.net, name)

    def _drawing_layer(self) -> str:
        name = drawing_layer(self.model.nets[self.mode], lambda: self.call(self.x), self.key)
        return described_layer(self.net, name)

    def _refuse(self, problem: str, remedy: str = "") -> NoReturn:
        raise InputError(f"{problem} ({WORDS[self.mode]}){f': {remedy}' if remedy else ''}")


def _moved(net: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return the network on a device, with its floating-point tensors in a type.

    `Module.to` would also make complex tensors real.
    """
    net = net.to(device)
    return net.double() if dtype == torch.float64 else net.float()


def _trial_loss(logits: Tensor) -> Tensor:
    return logits.square().sum()


def _first_sentence(error: BaseException) -> str:
    return " ".join(str(error).split()).split(". ")[0].removesuffix(".")
