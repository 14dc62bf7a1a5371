"""Compute every number of docs/reproduction/ again from the records, without the package.

It reads the results, the TOML files and published.csv itself, and compares each line of the
tables: printed, ours, difference, p, runs, rounds, verdict. `make reproduction` runs it.
"""

import ast
import csv
import gzip
import itertools
import json
import math
import statistics
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from scipy.stats import ttest_ind_from_stats

ROOT = Path(__file__).parents[1]
PAPER, PAGES = ROOT / "papers" / "feddkd", ROOT / "docs" / "reproduction"
# keys of an experiment that a file need not give, as docs/experiments.md has them
USUAL = {
    **{"data": "digits", "partition": "dirichlet(alpha=0.1)", "model": "mlp", "clients": 10},
    **{"cohort": 1.0, "rounds": 10, "seed": 0, "validation": 0.1, "shuffle": True},
    **{"split_seed": None, "training": None, "transform": None, "evaluation": "auto"},
}
Calls = list[tuple[str, dict[str, Any]]]


@cache
def calls(text: str) -> Any:
    """Return the name and the options of each part of a text a(x=1) | b."""
    parts: list[ast.expr] = []
    node = ast.parse(text, mode="eval").body
    while isinstance(node, ast.BinOp):
        parts.insert(0, node.right)
        node = node.left
    return [_call(part) for part in (node, *parts)]


def _call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    if isinstance(node, ast.Name):
        return node.id, {}
    assert isinstance(node, ast.Call)
    assert isinstance(node.func, ast.Name)
    return node.func.id, {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}


@cache
def records() -> list[dict[str, Any]]:
    """Return all runs; of two of one experiment, the longer."""
    longest: dict[str, dict[str, Any]] = {}
    for file in sorted((PAPER / "results").glob("*.jsonl.gz")):
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            for run in map(json.loads, lines):
                name = json.dumps([run["manifest"]["canonical"]], sort_keys=True)
                if name not in longest or len(run["rounds"]) > len(longest[name]["rounds"]):
                    longest[name] = run
    return list(longest.values())


@cache
def experiments(file: str) -> list[dict[str, Any]]:
    """Return the experiments of a TOML file, each with all its keys."""
    table = tomllib.loads((PAPER / file).read_text(encoding="utf-8"))
    sweep = table.pop("sweep", {})
    return [
        {**USUAL, **table, **dict(zip(sweep, values, strict=True))}
        for values in itertools.product(*sweep.values())
    ]


def same(wanted: dict[str, Any], run: dict[str, Any]) -> bool:
    """Return True if a run is that of an experiment."""
    given = {**USUAL, **run["manifest"]["experiment"]}
    texts = ("method", "data", "partition", "model")
    plain = set(USUAL) - {"training", "transform", *texts}
    written_out = run["manifest"]["canonical"]["transform"]
    return (
        all(calls(wanted[key]) == calls(given[key]) for key in texts)
        and all(wanted[key] == given[key] for key in plain)
        and with_defaults(wanted["transform"] or usual_transform(wanted["data"]), written_out)
    )


def with_defaults(text: str, written_out: str) -> bool:
    """Return True if a text's options are those of a text that has all of them."""
    short, long = calls(text), calls(written_out)
    return len(short) == len(long) and all(
        name == found and options.items() <= every.items()
        for (name, options), (found, every) in zip(short, long, strict=True)
    )


@cache
def usual_transform(data: str) -> str:
    """Return the transform of the records of these data that name none."""
    return next(
        str(run["manifest"]["canonical"]["transform"])
        for run in records()
        if run["manifest"]["experiment"]["data"] == data
        and not run["manifest"]["experiment"].get("transform")
    )


def of_column(experiment: dict[str, Any], where: dict[str, Any]) -> bool:
    """Return True if an experiment has the keys of a column."""
    return all(
        calls(experiment[key] or "usual") == calls(value)
        if isinstance(value, str)
        else experiment[key] == value
        for key, value in where.items()
    )


def of_line(experiment: dict[str, Any], text: str) -> bool:
    """Return True if an experiment's method has these calls with these options."""
    wanted, own = calls(text), calls(experiment["method"])
    return len(wanted) == len(own) and all(
        name == found and options.items() <= {**DEFAULTS.get(name, {}), **given}.items()
        for (name, options), (found, given) in zip(wanted, own, strict=True)
    )


# defaults of options by which tables.toml tells rows apart
DEFAULTS: dict[str, dict[str, Any]] = {
    "dkd": {"momentum": 0.0, "student": "eval", "teacher": "eval"},
    "fedprox": {"form": "sum"},
    "fedavg": {"momentum": 0.0, "amsgrad": False},
    "fedgen": {"weighting": "intended"},
}


def behind(table: dict[str, Any], setting: str, method: str) -> list[dict[str, Any]]:
    """Return the experiments of a cell."""
    column, line = table["settings"][setting], table["methods"][method]
    return [
        one
        for one in experiments(column["file"])
        if of_column(one, column.get("where", {})) and of_line(one, line["method"])
    ]


@cache
def _run(name: str) -> dict[str, Any] | None:
    return next((run for run in records() if same(json.loads(name), run)), None)


def run_of(experiment: dict[str, Any]) -> dict[str, Any] | None:
    """Return the recorded run of an experiment."""
    return _run(json.dumps(experiment, sort_keys=True))


# A number of a run


def chosen(at: str, rows: list[dict[str, Any]], target: float | None) -> list[dict[str, Any]]:
    """Return the rows that a number is taken from."""
    if at == "last":
        return rows[-1:]
    if at == "target":
        return [r for r in rows if target is not None and r["test_accuracy"] >= target][:1]
    by, count = {
        "best_validation": ("validation_accuracy", 1),
        "best": ("test_accuracy", 1),
        "five_best": ("test_accuracy", 5),
    }[at]
    return sorted(rows, key=lambda row: -row[by])[:count]  # stable: the earliest of equals


def value(quantity: dict[str, Any], row: dict[str, Any]) -> float:
    found: Any = row
    for part in quantity["column"].split("."):
        found = found[part]
    if quantity.get("of"):
        found = statistics.fmean(found[at] for at in quantity["of"])
    return float(quantity.get("scale", 1.0) * found)


# A cell


def cell(table: dict[str, Any], setting: str, method: str, name: str) -> dict[str, Any]:
    """Return ours, runs and rounds of a cell as the page writes them, and what p needs."""
    quantity, wanted = table["quantities"][name], behind(table, setting, method)
    length, at = table["methods"][method].get("rounds"), quantity["at"]
    needed = sum(min(length or one["rounds"], one["rounds"]) for one in wanted)
    found = []  # of each run: its rounds, whether more would change nothing, its numbers
    for one, run in ((one, run_of(one)) for one in wanted):
        if run is not None:
            limit = min(length or one["rounds"], one["rounds"])
            rows = run["rounds"][:limit]
            used = chosen(at, rows, one.get("target"))
            done = len(rows) == limit or "ended" in run["manifest"]
            settled = done or (at == "target" and bool(used))
            found.append((len(rows), settled, [value(quantity, row) for row in used]))
    # of unfinished runs those with the most rounds count, so that means are of equal rounds
    most = max((count for count, _, _ in found), default=0)
    level = [one for one in found if one[1] or one[0] == most]
    by_seed = [values for _, _, values in level if values]
    return {
        "values": list(itertools.chain.from_iterable(by_seed)),
        "by_seed": [statistics.fmean(own) for own in by_seed],
        "runs": f"{len(level)}/{len(wanted)}",
        "rounds": f"{sum(count for count, _, _ in level)}/{needed}",
        "complete": all(settled for _, settled, _ in level) and len(level) == len(wanted),
        "missed": sum(settled and not values for _, settled, values in level),
    }


def p_value(ours: list[float], printed: dict[str, str]) -> float | None:
    """Return Welch's p, as scipy computes it from means and deviations."""
    n, std = int(printed["runs"]), float(printed["std"])
    if min(n, len(ours)) < 2 or (std == 0 and statistics.stdev(ours) == 0):
        return None
    sample = std * math.sqrt(n / (n - 1))
    own = statistics.fmean(ours), statistics.stdev(ours), len(ours)
    return float(
        ttest_ind_from_stats(*own, float(printed["mean"]), sample, n, equal_var=False).pvalue
    )


def verdict(quantity: dict[str, Any], gap: float, printed: dict[str, str]) -> str:
    decimals = len(printed["mean"].partition(".")[2])
    if abs(gap) <= float(printed["std"]) + 0.5 * 10.0**-decimals:
        return "within the printed spread"
    better = quantity.get("better", "neither")
    return {
        "higher": ("worse", "better"),
        "lower": ("better", "worse"),
        "neither": ("below", "above"),
    }[better][gap > 0]


# The pages


def expected(name: str, table: dict[str, Any], place: tuple[str, str, str]) -> list[str]:
    """Return the cells of a line of a page from `printed` to `verdict`."""
    setting, method, quantity_name = place
    quantity, found = table["quantities"][quantity_name], cell(table, *place)
    printed = next(
        (
            PRINTED[key]
            for other in (name, *table.get("beside", ()))
            if (key := (other, method, setting, quantity_name)) in PRINTED
        ),
        None,
    )
    digits, values = quantity.get("decimals", 0), found["values"]
    shown = "-" if printed is None else f"{printed['mean']} ± {printed['std']}"
    if printed is not None and printed["note"]:
        shown += "*"
    ours = difference = p = "-"
    word = "not printed" if printed is None else "not reached"
    if values:
        mean, std = statistics.fmean(values), statistics.pstdev(values)
        ours = f"{mean:.{digits}f} ± {std:.{digits}f}"
        if printed is not None:
            gap = mean - float(printed["mean"])
            difference = f"{gap:+.{digits}f}"
            word = verdict(quantity, gap, printed)
            if found["complete"] and not found["missed"] and printed["runs"]:
                chance = p_value(found["by_seed"], printed)
                p = "-" if chance is None else f"{chance:.2g}"
    if printed is not None and found["missed"]:
        word = "worse"
    if not found["complete"]:
        word = f"partial, so far {word}"
    return [shown, ours, difference, p, found["runs"], found["rounds"], word]


def lines(path: Path) -> Iterator[list[str]]:
    """Yield the lines of a page's first table."""
    for line in path.read_text(encoding="utf-8").splitlines():
        parts = [part.strip() for part in line.strip("|").split(" | ")]
        if (
            line.startswith("| ")
            and len(parts) == 10
            and parts[0] != "setting"
            and "---" not in line
        ):
            yield parts


def printed_cells() -> dict[tuple[str, ...], dict[str, str]]:
    with (PAPER / "published.csv").open(encoding="utf-8", newline="") as file:
        keys = ("table", "method", "setting", "quantity")
        return {tuple(row[key] for key in keys): row for row in csv.DictReader(file)}


PRINTED = printed_cells()


def main() -> None:
    tables = tomllib.loads((PAPER / "tables.toml").read_text(encoding="utf-8"))
    checked, wrong = 0, []
    for name, table in tables.items():
        for setting, method, quantity, *told in lines(PAGES / f"{name}.md"):
            wanted = expected(name, table, (setting, method, quantity))
            told[-1] = told[-1].partition(";")[0]
            checked += len(wanted)
            if told != wanted:
                wrong.append(f"{name}, {setting}, {method}, {quantity}: {told} is {wanted}")
    print("\n".join(wrong))
    found = f"{checked} numbers and words of {len(tables)} tables computed again"
    print(f"{found}, {len(wrong)} wrong lines")
    sys.exit(bool(wrong) or checked < 4_000)


if __name__ == "__main__":
    main()
