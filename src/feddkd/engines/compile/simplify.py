"""The removal of useless operations from a traced graph, for CPUs.

There Python launches every operation, and for small ones the launch takes longer than the
operation. Tracing through vmap and grad leaves views that change nothing, constants that every step
makes again, a loss that is not read, and a new tensor for every operation of a chain. Removing
these changes no bit of the results.
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
COMMUTE = {aten.add.Tensor, aten.mul.Tensor}
LARGEST_CONSTANT = 1 << 16  # numbers; a larger one costs more to store than to make


def trimmed(function: Callable[..., Any], *example: Any) -> Callable[..., Any]:
    """Return the traced function, for inputs of the example's shapes, with fewer operations."""
    module = traced(function, *example)
    # if any node writes to a tensor, that may be a constant, or one that a view reads later
    pure = not any(_writes(node) for node in module.graph.nodes)
    constants = _constants(module) if pure else {}
    for node in module.graph.nodes:
        if node.target is aten.view.default:  # later inputs may have another order in memory
            node.target = aten.reshape.default
        if (equal := _equal_node(node, constants)) is not None:
            node.replace_all_uses_with(equal)
    for number, (node, value) in enumerate(constants.items()):
        if node.users:
            name = f"constant_{number}"
            setattr(module, name, value)
            with module.graph.inserting_before(node):
                node.replace_all_uses_with(module.graph.create_node("get_attr", name))
    module.graph.eliminate_dead_code()
    for node in module.graph.nodes if pure else ():
        _make_in_place(node)
    module.recompile()
    result: Callable[..., Any] = module.forward
    return result


def _writes(node: Node) -> bool:
    """Return whether a node may write to one of its inputs."""
    if node.op != "call_function" or node.target is operator.getitem:
        return False
    return not isinstance(node.target, OpOverload) or node.target._schema.is_mutable


def _constants(module: GraphModule) -> dict[Node, Tensor]:
    """Return the values of the nodes that depend on no input."""
    constants: dict[Node, Tensor] = {}
    for node in module.graph.nodes:
        inputs = node.all_input_nodes
        if node.target in LIKE:  # the numbers of its inputs do not matter
            values = {each: _blank(each) for each in inputs}
        else:
            values = {each: constants[each] for each in inputs if each in constants}
        if len(values) == len(inputs) and _is_plain(node):
            args, kwargs = map_arg((node.args, dict(node.kwargs)), values.__getitem__)
            constants[node] = node.target(*args, **kwargs)
    return constants


def _is_plain(node: Node) -> bool:
    """Return whether a node makes one small tensor, without a random draw."""
    val, target = node.meta.get("val"), node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded in target.tags:
        return False
    return isinstance(val, Tensor) and val.numel() <= LARGEST_CONSTANT


def _blank(node: Node) -> Tensor:
    """Return a tensor of the shape and type that a node makes."""
    val = node.meta["val"]
    return torch.empty(val.shape, dtype=val.dtype, device=val.device)


def _equal_node(node: Node, constants: dict[Node, Tensor]) -> Node | None:
    """Return an earlier node that has the same value, or None."""
    inputs: tuple[Any, ...] = node.args
    first, *rest = inputs or (None,)
    if node.target in RESHAPES and _fit(node, first):
        return cast(Node, first)
    if node.target is aten.transpose.int and first.target is node.target:  # twice the same axes
        return cast(Node, first.args[0]) if sorted(first.args[1:]) == sorted(rest) else None
    if node.target is aten.mul.Scalar and rest == [1] and _fit(node, first):
        return cast(Node, first)
    factors = {rest[0]: first, first: rest[0]} if node.target is aten.mul.Tensor else {}
    for factor, other in factors.items():
        if factor in constants and _fit(node, other) and (constants[factor] == 1).all():
            return cast(Node, other)
    return None


def _fit(*nodes: Any) -> bool:
    """Return whether both nodes make one tensor, of the same shape and type."""
    a, b = (node.meta.get("val") if isinstance(node, Node) else None for node in nodes)
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return False
    return a.shape == b.shape and a.dtype == b.dtype


def _make_in_place(node: Node) -> None:
    """Let a node write to the memory of an operand that only it reads, if there is one."""
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.pointwise not in target.tags or node.kwargs:
        return
    name = target._schema.name.removeprefix("aten::")
    in_place = getattr(getattr(aten, f"{name}_", None), target._overloadname, None)
    if target in COMMUTE and not _is_spare(node, node.args[0]) and _is_spare(node, node.args[1]):
        node.args = (node.args[1], node.args[0])
    if in_place is not None and _is_spare(node, node.args[0]):
        node.target = in_place


def _is_spare(node: Node, operand: Any) -> bool:
    """Return whether the result of a node can be written to the memory of an operand.

    The operand must be made in the graph, for this node alone, with the memory layout of the
    result.
    """
    if not isinstance(operand, Node) or operand.op != "call_function":
        return False
    if list(operand.users) != [node]:
        return False
    made = operand.target
    if not isinstance(made, OpOverload) or made.is_view or made in RESHAPES:
        return False
    once = node.args.count(operand) == 1 and _fit(node, operand)
    return once and bool(node.meta["val"].stride() == operand.meta["val"].stride())
