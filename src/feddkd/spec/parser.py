"""Text of the form `name(key=value, ...) | name(...)` -> names and arguments. Nothing in it is run."""

import ast
import warnings

from feddkd.errors import InputError
from feddkd.spec.types import Value

# nobody spells a method longer than this; a parser fed garbage should stop early
LONGEST_TEXT = 10_000


def read_calls(kind: str, text: str) -> list[tuple[str, dict[str, Value]]]:
    """Name and arguments of each part. A bare name has none."""
    if len(text) > LONGEST_TEXT:
        raise InputError(
            f"this {kind} is spelled with {len(text)} characters; at most {LONGEST_TEXT} are read"
        )
    try:
        with warnings.catch_warnings(action="ignore"):  # of odd literals, such as '\d'
            tree = ast.parse(" ".join(text.splitlines()).strip(), mode="eval").body
        return [_read_call(node) for node in _parts(tree)]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        reason = (
            str(error)
            if isinstance(error, InputError)
            else "it does not read as name(key=value, ...)"
        )
        raise InputError(f"cannot read the {kind} {text[:200]!r}: {reason}") from None


def _parts(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_parts(node.left), *_parts(node.right)]
    return [node]


def _read_call(node: ast.expr) -> tuple[str, dict[str, Value]]:
    if isinstance(node, ast.Name):
        return node.id, {}
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise InputError(f"{ast.unparse(node)[:80]!r} is not of the form name(key=value, ...)")
    if node.args:
        raise InputError(
            f"options are given by name, as in key=value, not {ast.unparse(node.args[0])[:80]!r}"
        )
    arguments: dict[str, Value] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise InputError("** has no meaning here")
        if keyword.arg in arguments:
            raise InputError(f"{keyword.arg} is given twice")
        arguments[keyword.arg] = _read_value(keyword.arg, keyword.value)
    return node.func.id, arguments


def _read_value(key: str, node: ast.expr) -> Value:
    value = ast.literal_eval(node)  # a ValueError here is reported by read_calls
    if value is not None and not isinstance(value, bool | int | float | str):
        raise InputError(f"{key} must be a number, a text, True, False or None")
    return value
