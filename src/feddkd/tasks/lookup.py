"""Tasks by their text: a registered name, or `FILE.py:function(options)`."""

from dataclasses import replace
from typing import Any

from feddkd.errors import InputError
from feddkd.spec.python_file import names_file, read_file_function
from feddkd.tasks import labels as _labels  # noqa: F401  # registers its tasks
from feddkd.tasks import positions as _positions  # noqa: F401
from feddkd.tasks import regression as _regression  # noqa: F401
from feddkd.tasks.task import TASKS as TASKS
from feddkd.tasks.task import Task


def task_digest_text(text: str) -> str:
    """Return a task's text in digests; a Python file is read and not run."""
    if names_file(text):
        return read_file_function("task", text).spelled.canonical
    return TASKS.one(text).canonical


def find_task(given: Any) -> Task:
    """Return the task of a text, or the given one; a function in a file is called."""
    if isinstance(given, Task):
        return given
    if not isinstance(given, str):
        raise InputError(
            "task must be a task or its text, such as \"regression(loss='huber')\", not"
            f" {type(given).__name__}"
        )
    if not names_file(given):
        return TASKS.one(given)
    function = read_file_function("task", given)
    made = function()
    if not isinstance(made, Task):
        raise InputError(f"{given} must return a feddkd.Task, not {type(made).__name__}")
    return replace(made, calls=(function.spelled,))
