"""Parser of text such as `name(key=value, ...) | name(...)`. It does not execute the text."""

import ast
import warnings

from feddkd.errors import InputError
from feddkd.process_lock import PROCESS_LOCK
from feddkd.spec.types import Value

LONGEST_TEXT = 10_000  # no real text is longer; reject garbage before parsing it


def read_calls(kind: str, text: str) -> list[tuple[str, dict[str, Value]]]:
    """Return the name and the arguments of each part. A bare name has no arguments."""
    if len(text) > LONGEST_TEXT:
        raise InputError(
            f"the text of this {kind} has {len(text)} characters; the limit is {LONGEST_TEXT}"
        )
    try:
        # warnings are about literals such as '\d'
        with PROCESS_LOCK, warnings.catch_warnings(action="ignore"):
            tree = ast.parse(" ".join(text.splitlines()).strip(), mode="eval").body
        return [_read_call(node) for node in _parts(tree)]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError) as error:
        explained = isinstance(error, InputError)
        reason = str(error) if explained else "it is not of the form name(key=value, ...)"
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
            raise InputError("** is not allowed: write each option as key=value")
        if keyword.arg in arguments:
            raise InputError(f"the option {keyword.arg} is given twice")
        arguments[keyword.arg] = _read_value(keyword.arg, keyword.value)
    return node.func.id, arguments


def _read_value(key: str, node: ast.expr) -> Value:
    value = ast.literal_eval(node)  # read_calls reports its ValueError
    if value is not None and not isinstance(value, bool | int | float | str):
        raise InputError(f"{key} must be a number, a text, True, False or None")
    return value
