"""A proof, on a few examples, that a network's functional form computes what the network itself
computes.

Before anything runs, both are called in evaluation mode and in training mode, with the same draws,
and their gradients are compared. What differs, what draws by a generator instead of the key, and
what changes although it should be constant is refused by name.
"""

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad

from feddkd.errors import InputError, line_of
from feddkd.models.functional import Mode, Model, Output
from feddkd.models.keyed_draws import keyed
from feddkd.models.strays import NoStrays
from feddkd.tensors import Tensors

FEW = 4  # examples
EXACT, COARSE = 1e-9, 1e-3  # rounding in float64 and in other types, relative to the largest number
# more than rounding makes of batches of two sizes, for which libraries take other ways
COUPLING = 1e-2
WORDS: dict[Mode, str] = {"eval": "in evaluation mode", "train": "in training mode"}


def prove(model: Model, params: Tensors, buffers: Tensors, x: Tensor) -> Model:
    """Return the model once the proof holds, with what was learnt of it; raise an InputError
    otherwise. x: a few examples.
    """
    state, dtype = (
        model.state_dict(params, buffers),
        next(tensor.dtype for tensor in params.values()),
    )
    net = _moved(copy.deepcopy(model.net), x.device, dtype)
    x = x[:FEW] if len(x) > 1 else torch.cat([x, x])  # batch norm wants two examples
    key = torch.tensor(12345, device=x.device)
    couples, reaches_head = model.couples, False
    with torch.no_grad():
        for mode in WORDS:
            trial = NetworkTrial(model, params, buffers, net, x, key, mode)
            net.load_state_dict(state)
            found = trial.check()
            net.load_state_dict(state)
            trial.check_gradient()
            couples = couples or trial.couples(found)
            reaches_head = found.features is not found.logits
    return replace(model, couples=couples, head=model.head if reaches_head else None)


@dataclass(frozen=True)
class NetworkTrial:
    """A network and its functional form on the same numbers, in one mode."""

    model: Model
    params: Tensors
    buffers: Tensors
    net: nn.Module
    x: Tensor
    key: Tensor
    mode: Mode

    def call(self, x: Tensor) -> Output:
        return self.model(self.params, self.buffers, x, mode=self.mode, key=self.key)

    def check(self) -> Output:
        """Return what the functional form computes; raise an InputError if that is not what the
        network computes.
        """
        expected, before = self._expected(), _generators(self.x)
        found = self.call(self.x)
        if before != _generators(self.x):
            self._refuse(
                f"{self._drawing_layer()} draws random numbers in forward that cannot follow the"
                " seed",
                "use dropout layers or torch's rand, randn, randint, randperm, bernoulli or normal",
            )
        if not _close(expected.logits, found.logits):
            self._refuse(
                f"{self._differing_layer()} computes something else as a function of its tensors"
                " than as a module"
            )
        for name in sorted(found.buffers):
            if not _close(expected.buffers[name], found.buffers[name]):
                self._refuse(
                    f"the network changes its buffer {name!r} in a way that cannot be followed"
                )
        with NoStrays(self.params):
            again = self.call(self.x)
        if not _same(found.logits, again.logits):
            self._refuse(
                "the network gives other outputs when it is called again: it keeps a state outside"
                " its tensors"
            )
        return found

    def check_gradient(self) -> None:
        """Raise an InputError if the functional form's gradient is not the module's."""
        expected = self._expected_gradient()
        found = self._found_gradient() if expected else {}
        largest = max(
            (float(slope.abs().max()) for slope in expected.values() if slope.numel()), default=0.0
        )
        for name in sorted(found):
            if not _close(expected[name], found[name], least=1e-2 * largest):
                self._refuse(
                    f"the gradient of {name!r} as a function of the network's tensors is not the"
                    " module's"
                )

    def _expected_gradient(self) -> dict[str, Tensor]:
        """Return the module's gradient; an empty dict if it has none in evaluation mode, where not
        every method wants one.
        """
        self.net.zero_grad()
        try:
            with torch.enable_grad(), keyed(self.net, self.key):
                _trial_loss(self.model.logits(self.net(self.x.clone()))).backward()  # type: ignore[no-untyped-call]
        except Exception as error:
            if self.mode == "eval":
                return {}
            self._refuse(
                "the network's gradient cannot be computed:"
                f" {_first_sentence(error)}{line_of(error)}"
            )
        trained = {
            name: weight for name, weight in self.net.named_parameters() if weight.requires_grad
        }
        return {
            name: torch.zeros_like(w) if w.grad is None else w.grad.to_dense()
            for name, w in trained.items()
        }

    def _found_gradient(self) -> Tensors:
        def loss(params: Tensors) -> Tensor:
            return _trial_loss(replace(self, params=params).call(self.x).logits)

        try:
            found: Tensors = grad(loss)(self.params)
            return found
        except InputError:
            raise
        except Exception as error:
            self._refuse(
                "torch.func cannot compute the gradient of this network:"
                f" {_first_sentence(error)}{line_of(error)}",
                "leave out checkpointing, backward hooks, packed sequences, torch.autograd.grad in"
                " forward, and an autograd.Function without setup_context()",
            )

    def couples(self, found: Output) -> bool:
        """Return whether one more example in the batch changes what comes out for the others, or
        what buffers become.
        """
        try:
            more = self.call(torch.cat([self.x, self.x[:1]]))
        except Exception:  # made for batches of one size
            return True
        alike = _close(found.logits, more.logits[: len(self.x)], COUPLING)
        return not (
            alike
            and all(
                _close(found.buffers[name], more.buffers[name], COUPLING) for name in found.buffers
            )
        )

    def _expected(self) -> Output:
        """Return what the module computes; raise an InputError if it cannot, or changes what must
        stay.
        """
        self.net.train(self.mode == "train")
        before, x = (
            {name: tensor.clone() for name, tensor in _every(self.net).items()},
            self.x.clone(),
        )
        try:
            with keyed(self.net, self.key):
                logits = self.model.logits(self.net(x))
        except InputError:
            raise
        except Exception as error:
            whole = (
                ""
                if self.x.is_floating_point()
                else ", whole numbers (tokens; give a table of numbers as floats)"
            )
            self._refuse(
                f"the network cannot read examples of shape {tuple(self.x.shape[1:])}{whole}:"
                f" {error}{line_of(error)}"
            )
        self._check_logits(logits)
        if not _same(x, self.x):
            self._refuse(
                "the network changes its input in place", "let forward begin with x = x.clone()"
            )
        self._check_changes(before)
        after = dict(self.net.named_buffers())
        return Output(
            logits, logits, {name: after[name].clone() for name in self.model.buffer_names}
        )

    def _check_logits(self, logits: Tensor) -> None:
        if logits.dim() != 2 or len(logits) != len(self.x) or not logits.is_floating_point():
            self._refuse(
                "logits must be floating-point numbers of shape (N, classes); for N ="
                f" {len(self.x)} examples the network's are {logits.dtype} of shape"
                f" {tuple(logits.shape)}"
            )

    def _check_changes(self, before: Tensors) -> None:
        """Raise an InputError if the module has changed a tensor that must stay as it is."""
        for name, weight in self.net.named_parameters():
            if not _same(before[name], weight):
                self._refuse(
                    f"the network changes its parameter {name!r} in forward",
                    "compute with a changed copy",
                )
        for name, after in sorted(self.net.named_buffers()):
            constant = self.model.tensors.slots[name] in self.model.tensors.constants
            if not _same(before[name], after) and (self.mode == "eval" or constant):
                why = (
                    "it is not saved (persistent=False), so it must stay as it is"
                    if constant
                    else "it must stay as it is then"
                )
                self._refuse(f"the network changes its buffer {name!r}", why)

    def _refuse(self, what: str, why: str = "") -> NoReturn:
        raise InputError(f"{what} ({WORDS[self.mode]}){f': {why}' if why else ''}")

    # --- naming the layer

    def _differing_layer(self) -> str:
        """Return the first layer whose output is not that of the module's."""
        theirs, ours = dict[str, Tensor](), dict[str, Tensor]()

        def keep(
            kept: dict[str, Tensor], name: str, module: nn.Module, inputs: Any, output: Any
        ) -> None:
            if isinstance(output, Tensor):
                kept.setdefault(name, output.detach().clone())

        with _hooks(self.net, after=partial(keep, theirs)), keyed(self.net, self.key):
            self.net(self.x.clone())
        with _hooks(self.model.nets[self.mode], after=partial(keep, ours)):
            self.call(self.x)
        return self._layer(
            next(
                (name for name in theirs if name in ours and not _close(theirs[name], ours[name])),
                "",
            )
        )

    def _drawing_layer(self) -> str:
        """Return the innermost layer in whose call a generator moves."""
        begun, moved = dict[str, Any](), list[str]()

        def before(name: str, *_: Any) -> None:
            begun[name] = _generators(self.x)

        def after(name: str, *_: Any) -> None:
            if begun[name] != _generators(self.x):
                moved.append(name)

        with _hooks(self.model.nets[self.mode], before, after):
            self.call(self.x)
        return self._layer(next(iter(moved), ""))  # inner layers end before those around them

    def _layer(self, name: str) -> str:
        return (
            f"layer {name!r} ({type(self.net.get_submodule(name)).__name__})"
            if name
            else "the network"
        )


def _moved(net: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Return the network on a device.

    Only floating-point tensors change their type; `Module.to` would make complex ones real.
    """
    net = net.to(device)
    return net.double() if dtype == torch.float64 else net.float()


def _every(net: nn.Module) -> dict[str, Tensor]:
    return {**dict(net.named_parameters()), **dict(net.named_buffers())}


def _trial_loss(logits: Tensor) -> Tensor:
    return logits.square().sum()


def _first_sentence(error: BaseException) -> str:
    return " ".join(str(error).split()).split(". ")[0].removesuffix(".")


@contextmanager
def _hooks(
    net: nn.Module,
    before: Callable[..., None] = lambda *_: None,
    after: Callable[..., None] = lambda *_: None,
) -> Iterator[None]:
    """Call functions before and after each layer, with its name first."""
    handles = []
    for name, module in net.named_modules():
        handles.append(module.register_forward_pre_hook(partial(before, name)))
        handles.append(module.register_forward_hook(partial(after, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _generators(x: Tensor) -> tuple[Any, ...]:
    """Return the states of all global generators."""
    state = torch.cuda.get_rng_state(x.device) if x.is_cuda else torch.get_rng_state()
    return state.numpy().tobytes(), repr(np.random.get_state()), random.getstate()


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(a.nan_to_num(), b.nan_to_num()))


def _close(a: Tensor, b: Tensor, tolerance: float | None = None, least: float = 1e-6) -> bool:
    """Return whether two tensors are the same but for rounding, which is relative to the largest
    number, or to `least`.
    """
    if a.shape != b.shape:
        return False
    if not a.is_floating_point() or not a.numel():
        return bool(torch.equal(a, b))
    tolerance = (EXACT if a.dtype == torch.float64 else COARSE) if tolerance is None else tolerance
    a, b = a.double().nan_to_num(), b.double().nan_to_num()
    return bool((a - b).abs().max() <= tolerance * a.abs().max().clamp(min=max(least, 1e-6)))
