"""Random draws from a generator of our own in place of torch's global one, in one thread."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from feddkd.randomness import Key, fold

# functions that take a generator
DRAWING = frozenset(
    {
        *("rand", "randn", "randint", "randperm", "bernoulli", "multinomial", "normal", "poisson"),
        *("rand_like", "randn_like", "randint_like"),
        *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "normal_"),
        *("random_", "uniform_", "kaiming_normal_", "kaiming_uniform_", "orthogonal_", "sparse_"),
        *("trunc_normal_", "xavier_normal_", "xavier_uniform_"),
    }
)


class OwnGenerator(TorchFunctionMode):
    """A context in which draws on a device come from a generator that a key seeds.

    The numbers are those of torch's global generator with the same seed. No other thread can
    change them, and the global generator is not used.
    """

    def __init__(self, key: Key, device: torch.device) -> None:
        super().__init__()
        self.device, self.generator = device, torch.Generator(device).manual_seed(fold(key))

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in DRAWING and self._serves(args, kwargs):
            kwargs = {**kwargs, "generator": self.generator}
        return func(*args, **kwargs)

    def _serves(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Return whether a drawing function has no generator and draws on this device."""
        absent = kwargs.get("generator") is None
        return absent and _device_of(args, kwargs).type == self.device.type


def _device_of(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.device:
    """Return the device on which a function with these arguments draws."""
    if kwargs.get("device") is not None:
        return torch.device(kwargs["device"])
    given = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    return next((tensor.device for tensor in given), torch.get_default_device())
