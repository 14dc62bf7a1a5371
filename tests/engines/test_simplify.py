"""A trimmed step is the same step:

no bit of it changes, nothing it is given is written to, and less is launched.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from feddkd.engines.compile.simplify import trimmed


def local_step(w: Tensor, b: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """A step of SGD over lanes, as tracing meets it."""

    def loss(w: Tensor, b: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(torch.relu(torch.nn.functional.linear(x, w, b)), y)

    slopes = vmap(grad(loss, (0, 1)))(w, b, x, y)
    return w - 0.1 * slopes[0], b - 0.1 * slopes[1]


def read_twice(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    product = a * b
    return product + 1, product - 1


def all_in_a_row(a: Tensor) -> Tensor:
    return (a * 1).view(-1) + torch.ones_like(a).sum()


def written_to(a: Tensor) -> Tensor:
    place = torch.zeros_like(a)
    place[0] = 2.0
    return a * torch.ones_like(a) + place


def by_a_number(a: Tensor) -> Tensor:
    return 1 + (2 * (a * a))


def made() -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(0)
    w, b, x = (torch.randn(shape, generator=random) for shape in ((4, 3, 5), (4, 3), (4, 6, 5)))
    return w, b, x, torch.randint(0, 3, (4, 6), generator=random)


CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "a step": (local_step, made()),
    "an operand with two readers": (read_twice, (made()[0], made()[0] + 1)),
    "a view of a copy": (all_in_a_row, (made()[1],)),
    "a constant that is written to": (written_to, (made()[1],)),
    "numbers": (by_a_number, (made()[1],)),
}


@pytest.mark.parametrize("case", CASES)
def test_trimming_changes_no_bit_and_writes_to_nothing_that_it_is_given(case: str) -> None:
    function, given = CASES[case]
    before, shorter = [tensor.clone() for tensor in given], trimmed(function, *given)
    for _ in range(2):  # a constant that was spoilt would show in the second call
        found, expected = tree_leaves(shorter(*given)), tree_leaves(function(*given))
        assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, before, given))


def test_a_trimmed_function_takes_inputs_that_lie_otherwise_in_memory() -> None:
    row = torch.arange(3.0)
    shorter = trimmed(all_in_a_row, row.repeat(4, 1))
    assert torch.equal(shorter(row.expand(4, 3)), row.repeat(4) + 12)


def test_a_step_is_launched_in_half_as_many_operations() -> None:
    class Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.operations = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.operations += 1
            return func(*args, **(kwargs or {}))

    def operations(function: Callable[..., Any], *given: Tensor) -> int:
        with Count() as count:
            function(*given)
        found: int = count.operations
        return found

    assert 2 * operations(trimmed(local_step, *made()), *made()) < operations(local_step, *made())
