"""Experiments in TOML files: one, or with `[[variant]]` tables and a `[sweep]` table a list of
them.
"""

import copy
import itertools
import json
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

LISTS = ("sweep", "variant")


def load(path: Path, settings: Sequence[str] = ()) -> list[Experiment]:
    """Return the experiments of a TOML file in the order of its sweep; `key=value` settings replace
    keys of the file.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InputError(f"cannot read the experiment {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        reason = f"it is not in UTF-8 (byte {error.start}); save it as UTF-8"
        raise InputError(f"cannot read the experiment {path}: {reason}") from None
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
    """Return for each [[variant]], whose keys replace those of the file, one experiment for each
    combination of the values under [sweep]; the last key varies fastest.
    """
    plain = {key: value for key, value in table.items() if key not in LISTS}
    variants, sweep = _variants(table), _sweep(table)
    for key in sweep:
        for place, given in (("as a key", [plain]), ("under variant", variants)):
            if any(key in keys for keys in given):
                raise InputError(f"{key!r} is given twice: {place} and under sweep")
    runs = len(variants) * math.prod(map(len, sweep.values()))
    if runs > MOST_RUNS:
        raise InputError(
            f"sweep has {runs} combinations; the limit is {MOST_RUNS}, since each is checked before"
            " the first one runs: divide it among several files"
        )
    experiments = [
        _experiment({**plain, **variant, **dict(zip(sweep, values, strict=True))})
        for variant, *values in itertools.product(variants, *sweep.values())
    ]
    if len({experiment.digest for experiment in experiments}) < len(experiments):
        where = "sweep holds" if variants == [{}] else "sweep and variant hold"
        raise InputError(
            f"{where} the same experiment twice: their values must change the numbers of a run"
        )
    return experiments


def _variants(table: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tables under [[variant]], or an empty one if there are none."""
    variants: list[dict[str, Any]] = table.get("variant", [{}])
    right = isinstance(variants, list) and all(isinstance(one, dict) for one in variants)
    if not right or not variants:
        raise InputError("variant must be a list of tables, each written [[variant]]")
    return variants


def _sweep(table: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the lists of values under [sweep]."""
    sweep = table.get("sweep", {})
    if not isinstance(sweep, dict):
        raise InputError("sweep must be a table of key = [values]")
    for key, values in sweep.items():
        if not isinstance(values, list) or not values:
            raise InputError(f"sweep.{key} must be a list with at least one value, not {values!r}")
    return sweep


def _experiment(table: Mapping[str, Any]) -> Experiment:
    for key in table:
        if key not in KEYS:
            raise unknown(f"unknown key {key!r}", key, (*KEYS, *LISTS))
    if "method" not in table:
        raise InputError("the key 'method' is missing, as in method = \"fedavg() | dkd()\"")
    return Experiment(**table)


def overlaid(table: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Return a table with `key=value` settings in it. A value that is not TOML is a text."""
    result = copy.deepcopy(dict(table))
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
        for variant in _variants(result):
            variant.pop(swept, None)
        target = result if key == swept else sweep
        target[swept] = _value(text.strip())
    return result


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def write(path: Path, variants: Sequence[Experiment], seeds: Sequence[int]) -> None:
    """Write experiments to a TOML file as variants, each to be run with these seeds."""
    tables = [{k: v for k, v in one.as_dict().items() if k != "seed"} for one in variants]
    usual = Experiment("fedavg").as_dict()
    shared = {k: v for k, v in tables[0].items() if all(one.get(k) == v for one in tables)}
    lines = [_line(k, v) for k, v in shared.items() if usual.get(k) != v]
    for one in tables:
        lines += ["", "[[variant]]", *(_line(k, v) for k, v in one.items() if k not in shared)]
    lines += ["", "[sweep]", _line("seed", list(seeds)), ""]
    try:
        path.write_text("\n".join(lines), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None


def _line(key: str, value: Any) -> str:
    return f"{key} = {json.dumps(value, ensure_ascii=False)}"  # a TOML value, too
