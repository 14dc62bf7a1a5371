"""Exceptions with a name: wrong input, a client that failed, a run that cannot continue."""

import traceback
from collections.abc import Iterable
from difflib import get_close_matches


class InputError(ValueError):
    """Something that the user wrote or passed cannot be used.

    The message is one line: it names the wrong thing and the right choices.
    """


class ClientError(RuntimeError):
    """A client failed in an exchange.

    The message names the phase, the client and its key, so that the failure can be repeated.
    """


class RunError(RuntimeError):
    """A run cannot continue. Other runs of the same command can."""


class NobodyAnsweredError(RunError):
    """No client answered in an exchange; the message names the phase and the round."""


class DivergedError(RunError):
    """A number is not finite.

    The message names the phase, and the client and its key if a client computed the number.
    """


# names that papers and other packages use, and those that stand for them here
ELSEWHERE = {
    "feddkd": "fedavg() | dkd()",
    "gamma": "lr",
    "eta": "lr",
    "learning_rate": "lr",
    "local_steps": "steps",
}


def choices(names: Iterable[str]) -> str:
    """Return the right choices as a list in words, for the end of an error message."""
    return ", ".join(sorted(names))


def unknown(
    problem: str, name: object, known: Iterable[str], they: str = "there are"
) -> InputError:
    """Return the error for a name that is not one of the known names.

    The message is the problem, the known name that is most like the wrong one, and all of them.
    """
    names = list(known)
    return InputError(f"{problem}{did_you_mean(name, names)}; {they}: {choices(names)}")


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return " (did you mean ...?)" with the known name that is most like this one, or nothing.

    Names with different numbers in them, such as float16 and float64, are not alike.
    """
    by_lower_case = {other.lower(): other for other in known}
    usual = ELSEWHERE.get(str(name).lower(), "")
    if usual in by_lower_case or "(" in usual:
        return f" (did you mean {usual!r}?)"
    for near in get_close_matches(str(name).lower(), by_lower_case):
        if "" in (_digits(near), _digits(str(name))) or _digits(near) == _digits(str(name)):
            return f" (did you mean {by_lower_case[near]!r}?)"
    return ""


def _digits(name: str) -> str:
    return "".join(filter(str.isdigit, name))


def line_of(error: BaseException) -> str:
    """Return the line of the user's code that raised an error, for the end of a message."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "/torch/" not in frame.filename and "/feddkd/" not in frame.filename
    ]
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
