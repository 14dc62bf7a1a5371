"""`torch.rand`, `normal`, `bernoulli` and their like, with numbers that follow the key.

Each function replaces one of torch's: (numbers of the key, torch's function, arguments) -> result.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from feddkd.models.keyed_numbers import LEAST, KeyedNumbers


def _made(numbers: Tensor, kind: Any = None, **kwargs: Any) -> Tensor:
    """Return the numbers in the type that a factory function was given."""
    return numbers.to(kwargs.get("dtype") or kind or torch.get_default_dtype())


def _size(args: Sequence[Any], kwargs: Any) -> Sequence[int]:
    size: Sequence[Any] = kwargs.get("size", args)
    return size[0] if len(size) == 1 and not isinstance(size[0], int) else size


def _rand(draws: KeyedNumbers, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    return _made(draws.uniform(_size(args, kwargs)), **kwargs)


def _randn(draws: KeyedNumbers, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    return _made(draws.normal(_size(args, kwargs)), **kwargs)


def _rand_like(draws: KeyedNumbers, func: Any, input: Tensor, **kwargs: Any) -> Tensor:
    return _made(draws.uniform(input.shape), input.dtype, **kwargs)


def _randn_like(draws: KeyedNumbers, func: Any, input: Tensor, **kwargs: Any) -> Tensor:
    return _made(draws.normal(input.shape), input.dtype, **kwargs)


def _randint(draws: KeyedNumbers, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Draw as torch.randint(high, size) or (low, high, size)."""
    size = kwargs.pop("size", None)
    *bounds, size = args if size is None else (*args, size)
    low, high = _bounds(bounds, kwargs)
    return _whole(draws, size, low, high, kwargs.get("dtype") or torch.int64)


def _randint_like(
    draws: KeyedNumbers, func: Any, input: Tensor, *bounds: int, **kwargs: Any
) -> Tensor:
    low, high = _bounds(bounds, kwargs)
    return _whole(draws, input.shape, low, high, kwargs.get("dtype") or input.dtype)


def _bounds(bounds: Sequence[int], kwargs: Any) -> tuple[int, int]:
    """Return the bounds (low, high) of whole numbers, given by position or by name."""
    given = [kwargs.get("low", 0), *bounds]
    if "high" in kwargs:
        given.append(kwargs["high"])
    return given[-2], given[-1]


def _whole(
    draws: KeyedNumbers, size: Sequence[int], low: int, high: int, dtype: torch.dtype
) -> Tensor:
    return (draws.uniform(size).double() * (high - low) + low).floor().to(dtype)


def _randperm(draws: KeyedNumbers, func: Any, n: int, **kwargs: Any) -> Tensor:
    return draws.uniform((n,)).argsort(stable=True).to(kwargs.get("dtype") or torch.int64)


def _bernoulli(
    draws: KeyedNumbers, func: Any, input: Tensor, p: float | None = None, **_: Any
) -> Tensor:
    return (draws.uniform(input.shape) < (input if p is None else p)).to(input.dtype)


def _normal(
    draws: KeyedNumbers, func: Any, mean: Any = 0.0, std: Any = 1.0, size: Any = None, **kwargs: Any
) -> Tensor:
    """Draw as torch.normal, which takes tensors, or numbers and a size."""
    given = [value for value in (mean, std) if isinstance(value, Tensor)]
    shape = (mean + std).shape if given else size
    dtype = given[0].dtype if given else None
    result: Tensor = mean + std * _made(draws.normal(shape), dtype, **kwargs)
    return result


def _fill(numbers: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a tensor method that fills its tensor with these numbers."""

    def method(
        draws: KeyedNumbers,
        func: Any,
        self: Tensor,
        *args: Any,
        generator: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        return self.copy_(numbers(draws, self, *args, **kwargs))

    return method


def _uniform_between(
    draws: KeyedNumbers, self: Tensor, low: float = 0.0, high: float = 1.0, **kwargs: float
) -> Tensor:
    low, high = kwargs.get("from", low), kwargs.get("to", high)
    return draws.uniform(self.shape).to(self.dtype) * (high - low) + low


def _normal_around(
    draws: KeyedNumbers, self: Tensor, mean: float = 0.0, std: float = 1.0
) -> Tensor:
    return draws.normal(self.shape) * std + mean


def _exponential(draws: KeyedNumbers, self: Tensor, lambd: float = 1.0) -> Tensor:
    return -(draws.uniform(self.shape).double() + LEAST).log() / lambd


GENERATORS: dict[str, Callable[..., Any]] = {
    "rand": _rand,
    "randn": _randn,
    "rand_like": _rand_like,
    "randn_like": _randn_like,
    "randint": _randint,
    "randint_like": _randint_like,
    "randperm": _randperm,
    "bernoulli": _bernoulli,
    "bernoulli_": _fill(lambda draws, self, p=0.5: draws.uniform(self.shape) < p),
    "normal": _normal,
    "normal_": _fill(_normal_around),
    "uniform_": _fill(_uniform_between),
    "exponential_": _fill(_exponential),
}
