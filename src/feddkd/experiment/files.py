"""Experiments in TOML files: one, or with a `[sweep]` table a list of them."""

import itertools
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from feddkd.errors import InputError, unknown
from feddkd.experiment.description import KEYS, Experiment
from feddkd.rounds.remarks import remark

# each takes about a millisecond to check
MOST_RUNS = 100_000


def load(path: Path, settings: Sequence[str] = ()) -> list[Experiment]:
    """Return the experiments of a TOML file in the order of its sweep; `key=value` settings replace
    keys of the file.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"cannot read the experiment {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not in UTF-8 (byte {error.start}); save it as UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not TOML: {error}") from None
    try:
        experiments = expand(overlaid(table, settings))
    except InputError as error:
        where = _wrong_setting(table, settings, str(error)) or path
        raise InputError(f"{where}: {error}") from None
    remark((one.parsed_method, one.cohort, one.clients) for one in experiments)
    return experiments


def _wrong_setting(table: Mapping[str, Any], settings: Sequence[str], message: str) -> str | None:
    """Return the setting that brings an error; None if the file has the error without it."""
    for count in range(len(settings), 0, -1):
        if _error(table, settings[: count - 1]) != message:
            return f"--set {settings[count - 1]}"
    return None


def _error(table: Mapping[str, Any], settings: Sequence[str]) -> str | None:
    """Return the message of the error in a table with settings; None if there is none."""
    try:
        expand(overlaid(table, settings))
    except InputError as error:
        return str(error)
    return None


def expand(table: Mapping[str, Any]) -> list[Experiment]:
    """Return one experiment for each combination of the values under [sweep]; the last key varies
    fastest.
    """
    plain = {key: value for key, value in table.items() if key != "sweep"}
    sweep = table.get("sweep", {})
    if not isinstance(sweep, dict):
        raise InputError("sweep must be a table of key = [values]")
    for key, values in sweep.items():
        if not isinstance(values, list) or not values:
            raise InputError(f"sweep.{key} must be a list with at least one value, not {values!r}")
        if key in plain:
            raise InputError(f"{key!r} is given twice: as a key and under sweep")
    runs = math.prod(map(len, sweep.values()))
    if runs > MOST_RUNS:
        raise InputError(
            f"sweep has {runs} combinations; the limit is {MOST_RUNS}, since each is checked before"
            " the first one runs: divide it among several files"
        )
    combinations = itertools.product(*sweep.values())
    experiments = [
        _experiment({**plain, **dict(zip(sweep, values, strict=True))}) for values in combinations
    ]
    if len({experiment.digest for experiment in experiments}) < len(experiments):
        raise InputError(
            "sweep holds the same experiment twice: its values must change the numbers of a run"
        )
    return experiments


def _experiment(table: Mapping[str, Any]) -> Experiment:
    for key in table:
        if key not in KEYS:
            raise unknown(f"unknown key {key!r}", key, (*KEYS, "sweep"))
    if "method" not in table:
        raise InputError("the key 'method' is missing, as in method = \"fedavg() | dkd()\"")
    return Experiment(**table)


def overlaid(table: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Return a table with `key=value` settings in it. A value that is not TOML is a text."""
    result = {
        key: dict(value) if isinstance(value, dict) else value for key, value in table.items()
    }
    for setting in settings:
        key, equals, text = setting.partition("=")
        key = key.strip()
        if not equals or not key:
            raise InputError(f"a setting is written key=value, not {setting!r}")
        swept = key.removeprefix("sweep.")
        result.pop(swept, None)
        sweep = result.setdefault("sweep", {})
        if not isinstance(sweep, dict):
            raise InputError("sweep must be a table of key = [values]")
        sweep.pop(swept, None)
        target = result if key == swept else sweep
        target[swept] = _value(text.strip())
    return result


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text
