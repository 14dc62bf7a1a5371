"""The logits in the return value of a network."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from feddkd.errors import InputError

# an entry's or attribute's name, a position, or a function; None: the return value is the logits,
# or has them under the name `logits`
Choice = str | int | Callable[[Any], Tensor] | None


def find_logits(returned: Any, output: Choice) -> Tensor:
    """Return the logits in a return value; raise an InputError if they cannot be found."""
    chosen = _chosen(returned, output)
    if not isinstance(chosen, Tensor):
        raise InputError(
            f"the network returns {_described(returned)}, and it is not clear where its logits are:"
            " give their place, as in functional(net, output=0), output='logits' or"
            " output=lambda returned: returned[0]"
        )
    return chosen


def _chosen(returned: Any, output: Choice) -> Any:
    try:
        if output is None:
            return _default(returned)
        if callable(output):
            return output(returned)
        if isinstance(output, int) or isinstance(returned, Mapping):
            return returned[output]
        return getattr(returned, output)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"output={output!r} does not fit the network's return value,"
            f" {_described(returned)}: {error}"
        ) from error


def _default(returned: Any) -> Any:
    if isinstance(returned, Tensor):
        return returned
    if isinstance(returned, Mapping):
        return returned.get("logits")
    return getattr(returned, "logits", None)


def _described(returned: Any) -> str:
    kind = type(returned).__name__
    if isinstance(returned, Mapping):
        return f"a {kind} with {', '.join(map(repr, returned)) or 'nothing'}"
    if isinstance(returned, tuple | list):
        return f"a {kind} of {len(returned)}"
    return f"a {kind}"
