"""`make methods-table`: every method of the package, with and without DKD behind it, on one small
job -> docs/methods/table.md, and the numbers behind it, run by run -> table.json beside it.

Each is run twice: once the shared model is judged, and once each client's model on its own tests.
Seeds of one method run in lock-step. What the same code has run already is not run again, so a
table that was stopped goes on; methods that are not named keep their lines. It is a smoke test and
no ranking.
"""

import argparse
import hashlib
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import feddkd
from feddkd import METHODS, Experiment, InputError, __version__, parse
from feddkd.method_docs.metadata import entry
from feddkd.runs.record import Record, find, folder_name
from feddkd.runs.runner import execute
from feddkd.runs.summary import mean_and_std, summarise

ROOT = Path(__file__).parents[2]
JOB: dict[str, Any] = {
    "data": "digits",
    "partition": "dirichlet(alpha=0.1)",
    "model": "mlp(hidden='64')",
    "clients": 10,
    "rounds": 10,
    "public": 0.1,  # the same for all, though few methods need it
    "client_tests": "own",
}
SEEDS = 5
LOCAL = {"epochs": 5, "batch_size": 32, "lr": 0.1}  # of every method that trains locally
DKD = "dkd(steps=10, batch_size=32, lr=0.2)"
FIRST = "fedavg"  # goes before a method that needs another one before it
# What else a method needs to make sense on so small a job, after a trial or two on one seed: name
# -> options. All others are its own defaults.
SERVER = {"server_steps": 100, "server_batch_size": 64}
OPTIONS: dict[str, dict[str, Any]] = {
    "fedprox": {"mu": 0.1},
    "feddyn": {"alpha": 0.1},
    "feddf": SERVER,
    "feded": SERVER,
    "fedavgm": {"server_momentum": 0.5},
    "fedadam": {"server_lr": 0.03},
    "fedyogi": {"server_lr": 0.03},
    "mix2fld": {"server_steps": 300, "server_lr": 0.1},
    "pfedme": {"lr": 0.01, "inner_lr": 0.05},
    "per_fedavg": {"alpha": 0.05},
    "private": {"names": "3.*"},  # the head of this network
    "fedrep": {"head_epochs": 5},
    "server_momentum": {"momentum": 0.5},
    "server_adam": {"lr": 0.03},
    "server_yogi": {"lr": 0.03},
}


EVALUATIONS: tuple[Literal["global", "client_mean"], ...] = ("global", "client_mean")
Runs = dict[str, list[dict[str, Any]]]  # evaluation -> the runs' numbers; none: it is refused


@dataclass(frozen=True)
class Line:
    """A method's runs without and with DKD; where there are none of the latter, the reason."""

    method: str
    plain: Runs
    distilled: Runs
    reason: str = ""


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(
        description="Run every method with and without DKD and write the table."
    )
    options.add_argument("names", nargs="*", help="only these methods")
    options.add_argument("--rounds", type=int, default=JOB["rounds"])
    options.add_argument("--seeds", type=int, default=SEEDS)
    options.add_argument(
        "--runs", type=Path, default=ROOT / "runs" / "methods", help="where the runs are kept"
    )
    options.add_argument("--out", type=Path, default=ROOT / "docs" / "methods" / "table.md")
    given = options.parse_args(arguments)
    job = {**JOB, "rounds": given.rounds}
    names = given.names or [name for name in METHODS if entry(name).own and name != "dkd"]
    before = {}
    if given.names and given.out.with_suffix(".json").exists():
        before = json.loads(given.out.with_suffix(".json").read_text(encoding="utf-8"))
    new = [asdict(line(name, job, given.seeds, given.runs / fingerprint())) for name in names]
    command = shlex.join(
        ["python", "tools/measure/methods.py", *(sys.argv[1:] if arguments is None else arguments)]
    )
    made = {
        "job": job,
        "seeds": given.seeds,
        "command": command,
        "feddkd": __version__,
        "code": fingerprint(),
    }
    kept = joined(before, {**made, "lines": new})
    given.out.with_suffix(".json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    given.out.write_text(page(kept), encoding="utf-8")
    print(f"written to {given.out}")


def joined(before: Mapping[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Return a new table with the other methods' lines of an older table of the same job."""
    if any(before.get(key) != new[key] for key in ("job", "seeds")):
        return new
    lines = {line["method"]: line for line in (*before["lines"], *new["lines"])}
    order = sorted(lines, key=lambda method: parse(method).calls[-1].name)
    codes = {*before["code"].split(", "), new["code"]}
    command = before["command"] if len(lines) > len(new["lines"]) else new["command"]
    return {
        **new,
        "command": command,
        "code": ", ".join(sorted(codes)),
        "lines": [lines[method] for method in order],
    }


def fingerprint() -> str:
    """Return a digest of the package's code; numbers of other code are not reused."""
    assert feddkd.__file__ is not None
    files = sorted(Path(feddkd.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]


def spelled(name: str) -> str:
    """A method as this job runs it."""
    here = entry(name)
    local = {setting.name for setting in here.settings if setting.shared}
    options = {
        **{key: value for key, value in LOCAL.items() if key in local},
        **OPTIONS.get(name, {}),
    }
    text = f"{name}({', '.join(f'{key}={value!r}' for key, value in options.items())})"
    return f"{spelled(FIRST)} | {text}" if here.piece else text


def line(name: str, job: Mapping[str, Any], seeds: int, runs: Path) -> Line:
    method = spelled(name)
    plain = play(method, job, seeds, runs)
    try:
        parse(f"{method} | {DKD}").check_order()
        return Line(method, plain, play(f"{method} | {DKD}", job, seeds, runs))
    except InputError as error:
        return Line(method, plain, {evaluation: [] for evaluation in EVALUATIONS}, str(error))


def play(method: str, job: Mapping[str, Any], seeds: int, runs: Path) -> Runs:
    """Return the results of a method's runs by evaluation; missing runs are run together."""
    found: Runs = {evaluation: [] for evaluation in EVALUATIONS}
    for evaluation in EVALUATIONS if parse(method).shares_all else EVALUATIONS[1:]:
        experiments = [
            Experiment(method=method, seed=seed, evaluation=evaluation, **job)
            for seed in range(seeds)
        ]
        found[evaluation] = [recorded(one, runs) for one in run_missing(experiments, runs)]
    return found


def run_missing(experiments: list[Experiment], runs: Path) -> list[Experiment]:
    """Run the experiments that have no record yet; return all."""
    missing = [
        one for one in experiments if not (runs / folder_name(one) / "summary.json").exists()
    ]
    if missing:
        first = missing[0]
        print(f"{first.method}, {first.evaluation}, {len(missing)} seeds", file=sys.stderr)
        summaries = execute(missing, out=runs)
        if ended := [summary["ended"] for summary in summaries if "ended" in summary]:
            sys.exit("; ".join(ended))
    return experiments


def recorded(experiment: Experiment, runs: Path) -> dict[str, Any]:
    return facts(find(runs / folder_name(experiment))[0])


def facts(record: Record) -> dict[str, Any]:
    """Return the numbers of a run that the table shows."""
    last = record.history[-1]
    return {
        "seed": record.experiment.seed,
        "test_accuracy": summarise(record.history)["test_accuracy"],
        "communications": last["communications"] / last["round"],
        "bytes": (last["bytes_up"] + last["bytes_down"]) / last["round"],
    }


# --- the page


def page(kept: Mapping[str, Any]) -> str:
    lines, seeds = [Line(**one) for one in kept["lines"]], kept["seeds"]
    notes = [f"{first_name(one)} with DKD: {one.reason}" for one in lines if one.reason]
    setting = ", ".join(f"`{key} = {value!r}`" for key, value in kept["job"].items())
    head = (
        "method",
        "global, %",
        "with DKD",
        "personalised, %",
        "with DKD",
        "communications a round",
        "with DKD",
        "MB a round",
        "with DKD",
    )
    cells = [[f"`{first_name(one)}`", *pairs(one)] for one in lines]
    table = "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] + ["---:"] * 8, *cells))
    return (
        "\n\n".join(
            [
                "# All methods, with and without DKD",
                (
                    "Test accuracy at the best validation round, mean ± population standard"
                    f" deviation over {seeds} seeds; {setting}. *Global*: the shared model on the"
                    " whole test set; — where no whole model is shared. *Personalised*: each"
                    " client's model on tests with its own shares of labels, mean over clients;"
                    " where a method gives clients no model of their own, it is the shared one. A"
                    " smoke test: options are the methods' own, or were tried once or twice on one"
                    " seed, so this is no ranking."
                ),
                table,
                *(["\n".join(f"* {note}" for note in notes)] if notes else []),
                f"`{DKD}` is added after each. The methods that were run:",
                "```text\n" + "\n".join(one.method for one in lines) + "\n```",
                (
                    f"Made by `{kept['command']}` (`make methods-table`) with feddkd"
                    f" {kept['feddkd']}, code {kept['code']}."
                ),
            ]
        )
        + "\n"
    )


def first_name(one: Line) -> str:
    """A method without its options."""
    return " | ".join(call.name for call in parse(one.method).calls).replace("|", "\\|")


def pairs(one: Line) -> list[str]:
    """The cells of a line: each number without and with DKD."""
    both = (one.plain, one.distilled)
    accuracies = [accuracy(runs[kind]) for kind in EVALUATIONS for runs in both]
    costs = [cost(runs["client_mean"]) for cost in (communications, megabytes) for runs in both]
    return accuracies + costs


def accuracy(runs: list[dict[str, Any]]) -> str:
    if not runs:
        return "—"
    mean, deviation = mean_and_std([run["test_accuracy"] for run in runs])
    return f"{100 * mean:.1f} ± {100 * deviation:.1f}"


def communications(runs: list[dict[str, Any]]) -> str:
    return _mean([run["communications"] for run in runs])


def megabytes(runs: list[dict[str, Any]]) -> str:
    return _mean([run["bytes"] / 1e6 for run in runs])


def _mean(values: list[float]) -> str:
    return f"{mean_and_std(values)[0]:.3g}" if values else "—"


if __name__ == "__main__":
    main()
