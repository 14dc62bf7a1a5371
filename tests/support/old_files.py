"""Helpers for the files of older versions: fixtures/make.py and test_old_files.py share them."""

import hashlib
import json
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import typer

from feddkd import METHODS, Experiment, InputError, parse, simulate
from feddkd.cli.app import COMMANDS, app, load_command

KEPT = Path(__file__).parents[1] / "fixtures" / "version-0.1"


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file with one JSON object on each line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_json(path: Path) -> Any:
    """Return what a JSON file holds."""
    return json.loads(path.read_text(encoding="utf-8"))


def find_runs(folder: Path) -> list[Path]:
    """Return the run folders under a folder, by name."""
    return sorted(path.parent for path in folder.rglob("manifest.json"))


# Digests


def short_digest(text: str) -> str:
    """Return the first 16 digits of a text's sha256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digests_of(table: dict[str, Any]) -> dict[str, str]:
    """Return the digests of an experiment, given as the table of a TOML file."""
    experiment = Experiment(**table)
    return {"digest": experiment.digest, "family": experiment.family}


def canonical_methods() -> dict[str, str]:
    """Return the canonical text of every method that has a default for each option."""
    found = {}
    for name in METHODS:
        if ... not in METHODS.options(name).values():
            found[name] = parse(name).canonical
    return found


def varied_methods() -> dict[str, str]:
    """Return a digest of the canonical text of every method with one option at another value."""
    found = {}
    for name in METHODS:
        for option, default in METHODS.options(name).items():
            for value in other_values(option, default):
                text = f"{name}({option}={value!r})"
                canonical = canonical_of(text)
                if canonical:
                    found[text] = short_digest(canonical)
    return found


def canonical_of(text: str) -> str:
    """Return the canonical text of a method, or nothing if the method refuses the text."""
    try:
        return parse(text).canonical
    except InputError:
        return ""


TEXTS: dict[str, list[Any]] = {
    "optimiser": ["adam"],
    "gather": ["median", "trimmed"],
    "steps": [3, "auto"],
}


def other_values(option: str, default: Any) -> list[Any]:
    """Return values to try for an option in place of its default."""
    if option in TEXTS:
        return TEXTS[option]
    if isinstance(default, bool):
        return [not default]
    if isinstance(default, int):
        return [default + 1]
    if isinstance(default, float):
        return [default / 2 if default else 0.5]
    return [2] if default is None else []


def options_of(name: str) -> dict[str, Any]:
    """Return the options of a method with their defaults; None where an option must be given."""
    options = METHODS.options(name)
    return {key: None if value is ... else value for key, value in options.items()}


# The command line


def commands() -> dict[str, dict[str, Any]]:
    """Return the options and arguments of every command with their defaults."""
    whole = dict(_commands(typer.main.get_command(app), "feddkd"))
    for word in COMMANDS:
        whole |= dict(_commands(load_command(word), f"feddkd {word}"))
    return whole


def _commands(command: Any, name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    arguments = [item for item in command.params if item.param_type_name == "argument"]
    options = [item for item in command.params if item.param_type_name == "option"]
    known = {f"argument {place}": _facts(item) for place, item in enumerate(arguments, 1)}
    yield name, {**known, **{item.opts[0]: _facts(item) for item in options}}
    for word, inner in getattr(command, "commands", {}).items():
        yield from _commands(inner, f"{name} {word}")


def _facts(parameter: Any) -> dict[str, Any]:
    """Return what a script relies on in an option or argument."""
    given = parameter.default
    return {
        "default": None if given is None or callable(given) else str(given),
        "required": parameter.required,
        "many": bool(getattr(parameter, "multiple", False)) or parameter.nargs == -1,
        "flag": bool(getattr(parameter, "is_flag", False)),
    }


def key_paths(value: Any, at: str = "") -> set[str]:
    """Return the paths of all keys in a JSON value, as in runs[].digest."""
    if isinstance(value, list):
        return {path for item in value for path in key_paths(item, f"{at}[]")}
    if not isinstance(value, dict):
        return {at}
    found = {at} if at else set()
    for key, inner in value.items():
        found |= key_paths(inner, f"{at}.{key}" if at else key)
    return found


# The machine


def machine() -> dict[str, str]:
    """Return what decides the bits of a float computation: the processor, torch and numpy."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    return {
        "processor": _fact(text, "model name") or platform.machine(),
        "features": short_digest(_fact(text, "flags")),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }


def _fact(text: str, key: str) -> str:
    """Return the first line of a key in /proc/cpuinfo."""
    found = re.search(rf"^{key}\s*: (.*)$", text, re.MULTILINE)
    return found[1] if found else ""


# A run from Python


def simulated() -> dict[str, Any]:
    """Return the rows and the sums of the final tensors of a small run by feddkd.simulate."""
    draw = torch.Generator().manual_seed(0)
    parts = []
    for _ in range(3):
        x = torch.randn(12, 4, generator=draw, dtype=torch.float64)
        parts.append((x, x[:, :3].argmax(1)))
    net = torch.nn.Linear(4, 3, dtype=torch.float64)
    torch.nn.init.constant_(net.weight, 0.1)
    torch.nn.init.zeros_(net.bias)
    method = "fedavg(epochs=1, batch_size=4) | dkd(steps=2, batch_size=4)"
    result = simulate(
        model=net,
        clients=parts[:2],
        test=parts[2],
        method=method,
        rounds=2,
        seed=3,
        engine="serial",
    )
    sums = {name: float(tensor.sum()) for name, tensor in result.params.items()}
    return {"history": result.history, "sums": sums}
