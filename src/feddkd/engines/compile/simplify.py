"""A traced graph without what computes nothing: for a CPU, where every operation is launched by
Python, and small ones cost more to launch than to carry out.

Tracing through vmap and grad leaves views that change nothing, constants made anew in every step, a
loss that nobody reads, and a new tensor for every link of a chain. What is done about it here
changes no bit of the results.
"""

import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from feddkd.engines.compile.trace import traced

aten = torch.ops.aten
RESHAPES = {aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.expand.default}
LIKE = {
    aten.ones_like.default,
    aten.zeros_like.default,
    aten.new_full.default,
    aten.new_zeros.default,
    aten.new_ones.default,
}
PRODUCTS = {aten.mul.Scalar, aten.mul.Tensor}
COMMUTE = {aten.add.Tensor, aten.mul.Tensor}
HELD = 1 << 16  # numbers of a constant: a larger one costs more to hold than to make


def trimmed(function: Callable[..., Any], *example: Any) -> Callable[..., Any]:
    """The traced function, for inputs of the example's shapes, in fewer and cheaper operations."""
    module = traced(function, *example)
    # else a constant may be written to, a view of anything read
    pure = not any(_writes(node) for node in module.graph.nodes)
    held = _constants(module) if pure else {}
    for node in module.graph.nodes:
        if (same := _same(node, held)) is not None:
            _put_in_place(node, same)
    for number, (node, value) in enumerate(held.items()):
        if node.users:
            setattr(module, f"held_{number}", value)
            with module.graph.inserting_before(node):
                node.replace_all_uses_with(module.graph.create_node("get_attr", f"held_{number}"))
    module.graph.eliminate_dead_code()
    for node in module.graph.nodes if pure else ():
        _write_over(node)
    module.recompile()
    result: Callable[..., Any] = module.forward
    return result


def _writes(node: Node) -> bool:
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    return not isinstance(node.target, OpOverload) or node.target._schema.is_mutable


def _constants(module: GraphModule) -> dict[Node, Tensor]:
    """What depends on no input, computed once."""
    held: dict[Node, Tensor] = {}
    for node in module.graph.nodes:
        inputs = node.all_input_nodes
        like = node.target in LIKE  # their numbers do not count
        known = {one: _blank(one) if like else held[one] for one in inputs if like or one in held}
        if len(known) == len(inputs) and _is_plain(node):
            args, kwargs = map_arg((node.args, dict(node.kwargs)), known.__getitem__)
            held[node] = node.target(*args, **kwargs)
    return held


def _is_plain(node: Node) -> bool:
    """One small tensor, made without chance."""
    val, target = node.meta.get("val"), node.target
    chance = not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded in target.tags
    return isinstance(val, Tensor) and val.numel() <= HELD and not chance


def _blank(node: Node) -> Tensor:
    val = node.meta["val"]
    return torch.empty(val.shape, dtype=val.dtype, device=val.device)


def _same(node: Node, held: dict[Node, Tensor]) -> Node | None:
    """The node that has the same value already, where there is one."""
    given: tuple[Any, ...] = node.args
    first, *rest = given or (None,)
    if node.target in RESHAPES and _alike(node, first):
        return cast(Node, first)
    if (
        node.target is aten.transpose.int
        and first.target is node.target
        and sorted(first.args[1:]) == sorted(rest)
    ):
        return cast(Node, first.args[0])
    if node.target is aten.mul.Scalar and rest == [1] and _alike(node, first):
        return cast(Node, first)
    factors = {rest[0]: first, first: rest[0]} if node.target is aten.mul.Tensor else {}
    return next(
        (
            other
            for one, other in factors.items()
            if one in held and _alike(node, other) and (held[one] == 1).all()
        ),
        None,
    )


def _put_in_place(node: Node, same: Node) -> None:
    """Products are written out anew, so that a view can be taken of them; of what was multiplied by
    one that need not be so.
    """
    for user in node.users if node.target in PRODUCTS else ():
        user.target = aten.reshape.default if user.target is aten.view.default else user.target
    node.replace_all_uses_with(same)


def _alike(*nodes: Any) -> bool:
    """Whether both are one tensor, of the same shape and type."""
    a, b = (node.meta.get("val") if isinstance(node, Node) else None for node in nodes)
    return (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and a.shape == b.shape
        and a.dtype == b.dtype
    )


def _write_over(node: Node) -> None:
    """In the place of an operand that nobody else reads, where it can be."""
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.pointwise not in target.tags or node.kwargs:
        return
    in_place = getattr(
        getattr(aten, f"{target._schema.name.removeprefix('aten::')}_", None),
        target._overloadname,
        None,
    )
    if target in COMMUTE and not _is_spare(node, node.args[0]) and _is_spare(node, node.args[1]):
        node.args = (node.args[1], node.args[0])
    if in_place is not None and _is_spare(node, node.args[0]):
        node.target = in_place


def _is_spare(node: Node, operand: Any) -> bool:
    """Whether the operand was made in the graph, for this node alone, and lies in memory as the
    result would.
    """
    if (
        not isinstance(operand, Node)
        or operand.op != "call_function"
        or list(operand.users) != [node]
    ):
        return False
    made = (
        isinstance(operand.target, OpOverload)
        and not operand.target.is_view
        and operand.target not in RESHAPES
    )
    once = node.args.count(operand) == 1 and _alike(node, operand)
    return made and once and bool(node.meta["val"].stride() == operand.meta["val"].stride())
