"""Networks from a function in a user's own Python file."""

from typing import Any

from torch import nn

from feddkd.errors import InputError
from feddkd.models.functional import Model
from feddkd.models.registry import MODELS, Architecture
from feddkd.spec.python_file import names_file, read_file_function


def find_architecture(text: str) -> Architecture:
    """Return the architecture of a text: a registered name, or `FILE.py:function(options)`.

    The function gets the options as keywords, and `shape` and `classes` if it has parameters of
    these names. It returns a module, or what builds one from a shape and a number of classes: an
    `Architecture` or a function. It is called under the run's seed.
    """
    if not names_file(text):
        return MODELS.one(text)
    function = read_file_function("model", text)

    def build(shape: tuple[int, ...], classes: int) -> Any:
        made: Any = function(shape=shape, classes=classes)
        if isinstance(made, Architecture):
            return made.build(shape, classes)
        if isinstance(made, nn.Module | Model) or not callable(made):
            return _checked(made, text)
        return _checked(made(shape, classes), text)

    return Architecture(build, calls=(function.spelled,))


def _checked(made: Any, text: str) -> Any:
    """Return a module or a wrapped one; raise an InputError if it is something else."""
    if not isinstance(made, nn.Module | Model):
        raise InputError(f"{text} must return a torch.nn.Module, not {type(made).__name__}")
    return made
