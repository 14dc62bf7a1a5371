"""Functions in a user's Python file: `FILE.py:function` or `FILE.py:function(key=value)`.

Reading such a text reads the file's bytes, for their sha256, and runs nothing. Calling the function
runs the file, with all rights of the user: run only files that you trust.
"""

import hashlib
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from feddkd.errors import InputError, line_of
from feddkd.spec.parser import read_calls
from feddkd.spec.registry import Call
from feddkd.spec.types import Value

IN_FILE = re.compile(r"\s*(?P<file>[^()|]+\.py)\s*:(?P<call>.*)", re.DOTALL)


def names_file(text: Any) -> bool:
    """Return whether a text names a function in a Python file."""
    return isinstance(text, str) and IN_FILE.fullmatch(text) is not None


@dataclass(frozen=True)
class FileCall(Call):
    """A call of a function in a file. Its canonical text holds the file's sha256, not its path."""

    sha256: str = ""

    @property
    def canonical(self) -> str:
        _, _, function = self.name.rpartition(":")
        arguments = ", ".join(f"{key}={value!r}" for key, value in self.complete)
        return f"python:{self.sha256}:{function}({arguments})"


@dataclass(frozen=True)
class FileFunction:
    """A function in a Python file, and the options it is called with."""

    path: Path
    name: str
    options: tuple[tuple[str, Value], ...]
    sha256: str

    @property
    def spelled(self) -> FileCall:
        """Return the call with its written and its canonical text."""
        name = f"{self.path}:{self.name}"
        return FileCall(name, self.options, tuple(sorted(self.options)), sha256=self.sha256)

    def __call__(self, **available: Any) -> Any:
        """Run the file, call the function with its options, and return what it returns.

        `available` are values that the function gets if it has parameters of these names.
        """
        function = self._function()
        options = dict(self.options)
        parameters = inspect.signature(function).parameters
        more = {k: v for k, v in available.items() if k in parameters and k not in options}
        try:
            return function(**options, **more)
        except InputError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}{line_of(error)}"
            raise InputError(f"{self.path}:{self.name} failed: {reason}") from error

    def _function(self) -> Callable[..., Any]:
        found = getattr(self._module(), self.name, None)
        if not callable(found):
            raise InputError(f"{self.path} has no function {self.name!r}")
        return found  # type: ignore[no-any-return]

    def _module(self) -> ModuleType:
        """Return the file as a module. It is run once for each content."""
        name = f"feddkd_python_file_{self.sha256}"
        if name not in sys.modules:
            module = ModuleType(name)
            module.__file__ = str(self.path)
            content = _content(self.path)
            if hashlib.sha256(content).hexdigest() != self.sha256:
                raise InputError(f"{self.path} has changed since the experiment was read")
            sys.modules[name] = module  # dataclasses and pickle look a class's module up
            try:
                exec(compile(content, str(self.path), "exec"), module.__dict__)
            except Exception as error:
                del sys.modules[name]
                reason = f"{type(error).__name__}: {error}{line_of(error)}"
                raise InputError(f"{self.path} cannot be run: {reason}") from error
        return sys.modules[name]


def read_file_function(kind: str, text: str) -> FileFunction:
    """Return the function that a text names, with the sha256 of its file; run nothing."""
    match = IN_FILE.fullmatch(text)
    assert match is not None
    path = Path(match["file"])
    calls = read_calls(kind, match["call"])
    if len(calls) != 1:
        raise InputError(f"one {kind} is wanted here, not {len(calls)}: {text!r}")
    (name, options) = calls[0]
    sha256 = hashlib.sha256(_content(path)).hexdigest()
    return FileFunction(path, name, tuple(options.items()), sha256)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
