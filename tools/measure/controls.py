"""Write docs/when-dkd-helps.md from the records of papers/controls and papers/feddkd.

`--costs DIR` first counts the floating-point operations of each run again, with data in DIR, and
keeps them in papers/controls/costs.json.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from feddkd.papers.cells import Cell
from feddkd.papers.comparison import Comparison, compare
from feddkd.papers.definitions import read
from feddkd.papers.results import RecordedRun, Runs, recorded
from feddkd.reports.formats import piped
from feddkd.reports.statistics import Paired, effect_size, holm, paired
from feddkd.runs.run_costs import run_costs
from feddkd.runs.summary import best_row

ROOT = Path(__file__).parents[2]
FOLDER, PAGE = ROOT / "papers" / "controls", ROOT / "docs" / "when-dkd-helps.md"
COSTS = FOLDER / "costs.json"
BUDGETS = (66, 220, 660)  # communications

HEAD = """# When does DKD help?

DKD adds J exchanges to each round, so FedDKD communicates 1 + J times as often as FedAvg, and it
computes more. Beside FedAvg with as many *rounds* it is far ahead. This page asks what the lead is
made of: of more frequent averaging, or of distillation. `feddkd controls FILE` writes the controls
of any experiment with DKD; the tables below are written by `python tools/measure/controls.py` from
the records in `papers/controls`, and a test compares them.

## The answer so far

* **At equal rounds FedDKD is ahead of FedAvg** on every job that was measured.
* **On the small digits jobs that lead is averaging more often, not distillation.** Labels in the
  teachers' place do as well: a client's model is nearly the label on its own data (L1' below). And
  FedAvg with as many communications and local steps, in rounds of three steps, is level with FedDKD
  in its best round, ahead in its last, and reaches 80 % with less than half the communications and
  steps. At equal local steps or equal compute in long rounds FedDKD is ahead.
* **On EMNIST in FedGen's setting distillation counts.** Clients read their examples class by class,
  so a mini-batch holds a class or two. With DKD's rate of 0.4, labels lose much or stay at chance,
  where the teachers' soft outputs are stable; and FedAvg in rounds of six steps stays behind FedDKD
  by a point or two. Three seeds, one split, and no other rate was tried for the labels: so this is
  a first indication and no more.
* **A teacher must be trained on the examples that it sees.** With shuffled teachers, which know
  other classes, the model is destroyed. With the average as teacher nothing happens, as it should.
* **On the paper's FEMNIST job** FedDKD is ahead of FedAvg with rounds of five epochs at equal
  communications, from a few hundred communications on, if half of the clients or more take part
  (last table). The controls with short rounds and with labels have not been run there, nor on
  CIFAR-10: they need a GPU. Nor have J, the rates, E and a server optimiser been tuned with as many
  trials for each side.

* **Rules that distil less in late rounds did not help** on the digits: constant gamma is level with
  them or ahead, and all are ahead of FedAvg at equal rounds ([below](#when-to-distil)).

* **After one round of training** DKD's steps lift the average above the ensemble of the clients; short
  rounds of FedAvg do as well ([one round](one-round.md)).

What follows for its use: if local steps and communications are what you pay for, first try FedAvg
with shorter rounds (`fedavg(steps=...)`), which needs no teacher. DKD is worth trying where local
rounds must be long, where mini-batches are too one-sided to average gradients of their labels, and
where the same clients stay for 1 + J exchanges.
"""
COLUMNS = (
    *("run", "seeds", "rounds", "comms", "steps", "GFLOP", "MB"),
    *("best", "last", "comms to 80 %", "steps to 80 %"),
)
TESTS = ("FedDKD against", "seeds", "ahead in", "difference", "95 %", "d", "95 %", "p", "verdict")
NOTES = """Costs are those of a whole run: communications; local steps of the average active client,
in which DKD's steps count as one each, whatever their batch; floating-point operations of all
clients, counted, with the teachers' forward passes; bytes of all clients. Best: as the job's table
says; last: in the last round. Mean ± population standard deviation, in %.

d is Cohen's d of the paired differences, with its 95 % interval. p is the paired t-test's, corrected
for the number of rows by Holm's method. Where p is 0.05 or more, the verdict is *level* if the
interval of the difference lies within two points on both sides, and else *undecided*."""
MARGIN = 2.0  # points


def costs(folder: Path | None) -> dict[str, dict[str, dict[str, float]]]:
    """Return what each run of the controls costs, by file and name, for its first seed."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for file, experiments in read(FOLDER).experiments.items():
        by_name = {one.name: one for one in reversed(experiments)}
        found[file] = {
            name: asdict(run_costs(one, folder)) for name, one in reversed(by_name.items())
        }
    return found


def page() -> str:
    """Return the page."""
    paper = read(FOLDER)
    runs, spent = recorded(paper), json.loads(COSTS.read_text(encoding="utf-8"))
    parts = [HEAD, NOTES]
    for name, table in paper.tables.items():
        comparison = compare(paper, name, runs)
        parts += [f"## {table.title}", *_job(comparison, spent[f"{name}.toml"])]
    parts += ["## When to distil", RULES, *(_rules(name, runs) for name in ("demo", "dirichlet"))]
    parts += ["## L1' and L2', before and after DKD", MECHANISM, piped(LOSSES, [*_losses(runs)])]
    parts += ["## FEMNIST at equal communications", BUDGET, piped(BUDGET_COLUMNS, [*_budgets()])]
    return "\n\n".join(parts) + "\n"


def _job(comparison: Comparison, spent: dict[str, dict[str, float]]) -> list[str]:
    """Return the two tables of a job, and what has not been run."""
    table = comparison.table
    cells = {cell.place[1:]: cell for cell in comparison.cells}
    lines, missing = [], []
    for method in table.methods:
        own = {q: cells[method, next(iter(table.settings)), q] for q in table.quantities}
        if own["accuracy"].readings:
            lines.append(_line(method, own, spent[method]))
        else:
            missing.append(method)
    said = [f"Not run yet: {'; '.join(missing)}."] if missing else []
    return [piped(COLUMNS, lines), piped(TESTS, [*_tests(comparison)]), *said]


def _line(method: str, own: dict[str, Cell], spent: dict[str, float]) -> list[str]:
    accuracy = own["accuracy"]
    rounds = accuracy.rounds_wanted // accuracy.runs_wanted
    return [
        method,
        str(len(accuracy.readings)),
        str(rounds),
        *(f"{spent[key]:,.0f}" for key in ("communications", "steps")),
        f"{spent['operations'] / 1e9:,.4g}",
        f"{spent['bytes'] / 1e6:,.4g}",
        *(
            _mean(own.get(key))
            for key in ("accuracy", "final", "comm_to_target", "steps_to_target")
        ),
    ]


def _mean(cell: Cell | None) -> str:
    if cell is None or cell.ours is None:
        return "-"
    digits = cell.quantity.decimals
    return f"{cell.ours[0]:.{digits}f} ± {cell.ours[1]:.{digits}f}"


def _tests(comparison: Comparison) -> Iterator[list[str]]:
    known = [(cell, test) for cell, test in comparison.tests if test.t_p is not None]
    corrected = iter(holm([test.t_p for _, test in known if test.t_p is not None]))
    lead = next(c for c in comparison.cells if c.place.method == comparison.table.lead).by_seed
    for cell, test in comparison.tests:
        chance = next(corrected) if test.t_p is not None else None
        yield _test(cell, test, lead, chance)


def _test(cell: Cell, test: Paired, lead: dict[int, float], chance: float | None) -> list[str]:
    gap, ours = test.difference, cell.by_seed
    effect = effect_size([lead[seed] - ours[seed] for seed in sorted(lead.keys() & ours.keys())])
    return [
        cell.place.method,
        str(gap.n),
        str(test.wins),
        f"{gap.mean:+.2f}",
        "-" if gap.low is None else f"{gap.low:+.2f} to {gap.high:+.2f}",
        "-" if effect is None else f"{effect[0]:+.2f}",
        "-" if effect is None else f"{effect[1]:+.2f} to {effect[2]:+.2f}",
        "-" if chance is None else f"{chance:.2g}",
        _verdict(test, chance),
    ]


def _verdict(test: Paired, chance: float | None) -> str:
    gap = test.difference
    if chance is None or gap.low is None or gap.high is None:
        return "too few seeds"
    if chance < 0.05:
        return "ahead" if gap.mean > 0 else "behind"
    return "level" if gap.low > -MARGIN and gap.high < MARGIN else "undecided"


RULES = """On the demo a round's distillation gains much in the first three rounds. From the
fourth on it loses: the shared model after DKD is about a point below the average before DKD. So a
rule that distils less later looks better: a gamma that falls over the rounds (`lr_schedule`,
`lr_decay`) or within each (`lr_step_schedule`), or steps that a probe on spare examples ends
(`steps="auto"`). All of these are options already.

No rule was better. With each of them DKD gains more, or loses less, *within* the late rounds, and
the model is still not better in the end, because the average that the next round begins with is
worse. What DKD does in a round shows in the average of later rounds, so the difference of the two
in one round is no reason to stop. Constant gamma was above plain averaging by more than noise on
both jobs, and so was every rule. So there is no new option. Ten seeds of each; gamma was not tuned
for the rules. EMNIST and CIFAR-10 have not been run with these rules.

Gains: accuracy after DKD less that of the average before it, in the same round. Differences are
paired by seed, with p corrected for the rows and columns of the table by Holm's method."""
CONSTANT, PLAIN = "fedavg | dkd", "fedavg, equal rounds"
RULE_COLUMNS = (
    *("run", "comms", "best", "last", "gain in round 1", "in 2, 3", "in 4 to 15"),
    *("last: against fedavg", "best: against constant gamma", "last: against constant gamma"),
)


def _rules(name: str, runs: Runs) -> str:
    """Return the table of the rules of one job."""
    found = rules(name, runs)
    tests = [
        paired(scores(found[rule], at), scores(found[other], at))
        for rule in found
        if rule not in (PLAIN, CONSTANT)
        for at, other in ((-1, PLAIN), (None, CONSTANT), (-1, CONSTANT))
    ]
    known = [test for test in tests if test is not None and test.t_p is not None]
    chances = holm([test.t_p for test in known if test.t_p is not None])
    told = (f"{t.difference.mean:+.2f} (p={p:.2g})" for t, p in zip(known, chances, strict=True))
    lines = [
        [*_rule(run, of), *(["-"] * 3 if run in (PLAIN, CONSTANT) else islice(told, 3))]
        for run, of in found.items()
    ]
    return f"### {read(FOLDER).table(name).title}\n\n{piped(RULE_COLUMNS, lines)}"


def rules(name: str, runs: Runs) -> dict[str, dict[int, RecordedRun]]:
    """Return the runs of plain averaging, of DKD with a constant gamma, and of each rule, by seed."""
    found: dict[str, dict[int, RecordedRun]] = {PLAIN: {}, CONSTANT: {}}
    for one in read(FOLDER).experiments[f"{name}.toml"]:
        if one.name in found or "gamma" in one.name or "auto" in one.name:
            found.setdefault(one.name, {})[one.seed] = runs[one.digest]
    return found


def scores(of: dict[int, RecordedRun], at: int | None) -> dict[int, float]:
    """Return the accuracy in % at this row, or at the best round, by seed."""
    rows = {s: best_row(run.rounds) if at is None else run.rounds[at] for s, run in of.items()}
    return {seed: 100 * row["test_accuracy"] for seed, row in rows.items()}


def _rule(run: str, of: dict[int, RecordedRun]) -> list[str]:
    rows = [one.rounds for one in of.values()]
    gains = ["-"] * 3 if run == PLAIN else [_gain(rows, *cut) for cut in ((0, 1), (1, 3), (3, 15))]
    means = [[*scores(of, at).values()] for at in (None, -1)]
    spent = f"{fmean(row[-1]['communications'] for row in rows):.0f}"
    return [run, spent, *(f"{fmean(m):.2f} ± {pstdev(m):.2f}" for m in means), *gains]


def _gain(runs: Sequence[Sequence[dict[str, Any]]], begin: int, end: int) -> str:
    """Return by how much DKD changes the accuracy within these rounds."""
    rows = [row for run in runs for row in run[begin:end]]
    return (
        f"{100 * fmean(row['test_accuracy'] - row['average_test_accuracy'] for row in rows):+.2f}"
    )


MECHANISM = """L1' is the divergence of the clients' models from the labels, L2' that of the shared
model from the clients' models, on the clients' training data. DKD takes steps down L2'; it lowers
L2' on the whole data in most rounds, but not in all. Records of the last lines are the paper's own
digits jobs."""
LOSSES = (
    *("job", "method", "rounds", "L1'", "L2' before", "L2' after"),
    "DKD lowers L2' in",
)


def _losses(runs: Runs) -> Iterator[list[str]]:
    paper = read(ROOT / "papers" / "feddkd")
    for name, of_paper, known in (
        *((name, read(FOLDER), runs) for name in ("demo", "dirichlet")),
        *((name, paper, recorded(paper)) for name in ("digits", "digits-real")),
    ):
        table = of_paper.table(name)
        for method in table.methods:
            experiments = of_paper.behind(table, next(iter(table.settings)), method)
            if "dkd" in experiments[0].method:
                found = [known[one.digest] for one in experiments if one.digest in known]
                rows = [row for run in found for row in run.rounds if "diagnostics" in row]
                if rows:
                    yield [name, method, *_loss([row["diagnostics"] for row in rows])]


def _loss(rows: Sequence[dict[str, Any]]) -> list[str]:
    lower = sum(row["L2"] < row["L2_average"] for row in rows)
    means = [fmean(row[key] for row in rows) for key in ("L1", "L2_average", "L2")]
    return [str(len(rows)), *(f"{mean:.4f}" for mean in means), f"{lower} of {len(rows)}"]


BUDGET = """From the records of the paper's FEMNIST tables (660 rounds, three seeds): test accuracy
at the best validation round within a number of communications. A round of FedAvg is one of them, a
round of FedDKD eleven. FedAvg's rounds are whole here (E epochs each), so FedAvg computes more."""
BUDGET_COLUMNS = ("c, E", *(f"{n}: FedAvg" for n in BUDGETS), *(f"{n}: FedDKD" for n in BUDGETS))


def _budgets() -> Iterator[list[str]]:
    paper = read(ROOT / "papers" / "feddkd")
    table, runs = paper.table("femnist-accuracy"), recorded(paper)
    for setting in table.settings:
        cells = [
            f"{fmean(_within(run, budget) for run in found):.4f}"
            for method in ("FedAvg", "FedDKD")
            for found in [[runs[one.digest] for one in paper.behind(table, setting, method)]]
            for budget in BUDGETS
        ]
        yield [setting, *cells]


def _within(run: RecordedRun, budget: int) -> float:
    rows = [row for row in run.rounds if row["communications"] <= budget]
    best: Any = max(rows, key=lambda row: row["validation_accuracy"])
    return float(best["test_accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--costs", type=Path, metavar="DIR", help="count the operations again")
    folder = parser.parse_args().costs
    if folder is not None:
        COSTS.write_text(json.dumps(costs(folder), indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    print(f"written to {PAGE}")


if __name__ == "__main__":
    main()
