"""The committed records of the paper: what the tables, the README and the findings say of them."""

import itertools
import re
import statistics
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from feddkd.papers.comparison import Comparison, compare
from feddkd.papers.definitions import Paper, PrintedCell, read
from feddkd.papers.evidence import independent, whole
from feddkd.papers.figures import figures
from feddkd.papers.results import Runs, recorded

PAPER = Path(__file__).parents[2] / "papers" / "feddkd"


@pytest.fixture(scope="module")
def real() -> Paper:
    return read(PAPER)


@pytest.fixture(scope="module")
def committed(real: Paper) -> Runs:
    return recorded(real)


@pytest.fixture(scope="module")
def readme() -> str:
    return (PAPER / "README.md").read_text(encoding="utf-8")


def quoted(text: str) -> set[str]:
    """Return the numbers that a text quotes."""
    return set(re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?", text))


def shown(found: Comparison, method: str, setting: str, quantity: str) -> tuple[str, str]:
    """Ours and the printed cell, as a reader sees them; of what has not been run, neither."""
    one = next(
        c
        for c in found.cells
        if c.place == PrintedCell(found.table.name, method, setting, quantity)
    )
    if one.ours is None:
        return "-", "-"
    digits = one.quantity.decimals
    return (
        f"{one.ours[0]:.{digits}f} ± {one.ours[1]:.{digits}f}",
        "-" if one.printed is None else str(one.printed),
    )


@pytest.mark.parametrize("table", ["emnist", "emnist-shuffled"])
def test_the_committed_emnist_results_are_whole_and_the_readmes_tables(
    real: Paper, committed: Runs, readme: str, table: str
) -> None:
    found = compare(real, table, committed)
    assert all(one.complete and len(one.readings) == 10 for one in found.cells)
    for method in real.table(table).methods:
        cells = [
            text
            for setting in ("alpha=0.05", "alpha=0.1")
            for text in shown(found, method, setting, "accuracy")
        ]
        assert f"| {' | '.join([method, *cells])} |" in readme


def wins(found: Comparison, setting: str) -> dict[str, int]:
    """In how many seeds the lead is ahead of each method."""
    tests = [(cell.place, test) for cell, test in found.tests if cell.place.quantity == "accuracy"]
    return {place.method: test.wins for place, test in tests if place.setting == setting}


def test_unshuffled_emnist_is_near_the_printed_table_and_says_where_feddkd_does_not_lead(
    real: Paper, committed: Runs
) -> None:
    found = compare(real, "emnist", committed)
    within = {
        one.place.method + one.place.setting[5:]
        for one in found.cells
        if one.printed and "within" in one.tendency
    }
    assert within == {"FedDKD=0.05", "FedAvg=0.1", "FedProx=0.1", "FedDistill+=0.1", "FedDKD=0.1"}
    assert [order.swapped for order in found.orders] == [[], [("FedDKD", "FedGen")]]
    assert wins(found, "alpha=0.05") == {
        "FedAvg": 10,
        "FedProx": 10,
        "FedDistill+": 10,
        "FedGen": 10,
    }
    assert wins(found, "alpha=0.1") == {"FedAvg": 10, "FedProx": 10, "FedDistill+": 9, "FedGen": 4}
    accuracies = [one for one in found.cells if one.place.quantity == "accuracy"]
    # after as many communications it is behind them all
    for setting in ("alpha=0.05", "alpha=0.1"):
        means = {
            one.place.method: one.ours[0]
            for one in accuracies
            if one.ours and one.place.setting == setting
        }
        assert min(means, key=lambda method: means[method]) == "FedDKD@50"
    rows = [
        row
        for one in real.experiments["emnist.toml"]
        if "dkd" in one.method
        for row in committed[one.digest].rounds
    ]
    assert (
        len(rows),
        sum(row["test_accuracy"] < row["average_test_accuracy"] for row in rows),
    ) == (4000, 3561)
    assert quoted((PAPER / "findings.toml").read_text(encoding="utf-8")) >= {"3,561", "4,000"}


def test_shuffled_emnist_learns_more_in_nine_seeds_and_nothing_in_the_tenth(
    real: Paper, committed: Runs, readme: str
) -> None:
    found = compare(real, "emnist-shuffled", committed)
    assert shown(found, "FedAvg", "alpha=0.1", "accuracy") == ("71.64 ± 1.72", "69.07 ± 1.71")
    medians = [
        f"{one.median:.2f}"
        for c, one in found.spreads
        if c.place.quantity == "best_accuracy" and c.place.method == "FedDKD"
    ]
    assert quoted(readme) >= set(medians)
    assert ("FedDKD", "FedGen") in found.orders[0].swapped
    assert wins(found, "alpha=0.1") == {"FedAvg": 9, "FedProx": 9, "FedDistill+": 9, "FedGen": 9}


def test_steps_that_are_judged_one_by_one_are_hardly_ever_kept_on_emnist(
    real: Paper, committed: Runs, readme: str
) -> None:
    def gains(method: str) -> dict[int, list[float]]:
        runs = [
            committed[one.digest]
            for one in real.experiments["emnist-auto.toml"]
            if method in one.method
        ]
        return {
            run.experiment.seed: [
                row["test_accuracy"] - row["average_test_accuracy"] for row in run.rounds
            ]
            for run in runs
        }

    cautious = [gain for own in gains("steps='auto'").values() for gain in own]
    assert (len(cautious), sum(gain != 0 for gain in cautious)) == (2000, 19)
    plain = [gain for seed, own in gains("dkd(steps=3").items() if seed != 8 for gain in own]
    assert (
        len(plain),
        sum(gain < 0 for gain in plain),
        round(-100 * statistics.mean(plain), 1),
    ) == (1800, 1457, 1.9)
    assert quoted(readme) >= {"19", "2,000", "1,457", "1,800", "1.9"}
    found = compare(real, "emnist-auto", committed)
    assert shown(found, "FedDKD, auto", "alpha=0.1", "accuracy")[0] in readme


FIVE, FIFTEEN = ([f"c={c},E={epochs}" for c in ("0.25", "0.5", "0.75")] for epochs in (5, 15))


def test_the_committed_femnist_results_are_the_readmes(
    real: Paper, committed: Runs, readme: str
) -> None:
    for table, quantity in (
        ("femnist-accuracy", "accuracy"),
        ("femnist-target", "rounds_to_target"),
    ):
        found = compare(real, table, committed)
        partial = {(one.place.method, one.place.setting) for one in found.cells if not one.complete}
        assert partial == {("FedProx", FIFTEEN[-1]), ("FedMAX", FIFTEEN[-1])}
        for method in real.table(table).methods:
            for settings in (FIVE, FIFTEEN):
                cells = [
                    text
                    for setting in settings
                    for text in (
                        ("-", "-")
                        if (method, setting) in partial
                        else shown(found, method, setting, quantity)
                    )
                ]
                assert f"| {' | '.join([method, *cells])} |" in readme
    for epochs in (5, 15):
        for method in ("FedDKD", "FedAvg"):
            assert shown(found, method, f"c=0.5,E={epochs}", "comm_to_target")[0] in readme


@pytest.mark.parametrize(
    ("table", "settings", "part"),
    [
        ("femnist-accuracy", FIVE + FIFTEEN[:2], ""),
        ("femnist-60", FIVE + FIFTEEN, "@60"),
        ("femnist-exact", FIVE, ""),
        ("femnist-exact-60", FIVE + FIFTEEN, "@60"),
    ],
)
def test_femnist_is_whole_and_both_forms_of_feddkd_lead_every_baseline_in_every_seed(
    real: Paper, committed: Runs, table: str, settings: list[str], part: str
) -> None:
    found = [one for one in compare(real, table, committed).cells if one.place.setting in settings]
    assert all(one.complete and len(one.readings) == 3 for one in found)
    by_seed = {
        (one.place.setting, one.place.method): one.by_seed
        for one in found
        if one.place.quantity == "accuracy"
    }
    for setting in settings:
        for lead in ("FedDKD", "FedDKD_MAX"):
            for baseline in ("FedAvg", "FedProx", "FedMAX"):
                own, other = by_seed[setting, lead + part], by_seed[setting, baseline + part]
                assert all(own[seed] > other[seed] for seed in range(3)), (setting, lead, baseline)


def test_the_results_of_disjoint_femnist_clients_are_the_readmes(
    real: Paper, committed: Runs, readme: str
) -> None:
    found = compare(real, "femnist-exact", committed)
    for method in real.table("femnist-exact").methods:
        cells = [text for setting in FIVE for text in shown(found, method, setting, "accuracy")]
        assert f"| {' | '.join([method, *cells])} |" in readme


def test_with_fifteen_epochs_and_most_clients_both_forms_of_feddkd_lead_fedavg_in_every_seed(
    real: Paper, committed: Runs
) -> None:
    found = [
        one
        for one in compare(real, "femnist-accuracy", committed).cells
        if one.place.setting == FIFTEEN[-1]
    ]
    by_seed = {one.place.method: one.by_seed for one in found if one.place.quantity == "accuracy"}
    for lead in ("FedDKD", "FedDKD_MAX"):
        assert all(by_seed[lead][seed] > by_seed["FedAvg"][seed] for seed in range(3))


def test_distillation_costs_accuracy_in_cifars_first_rounds_and_gains_in_every_later_one(
    real: Paper, committed: Runs
) -> None:
    """Findings.toml and the README give the numbers of the records."""

    def gains(file: str, having: str = "") -> list[dict[int, float]]:
        wanted = [
            one
            for one in real.experiments[file]
            if "dkd" in one.method and having in one.partition + one.method
        ]
        rows = [committed[one.digest].rounds for one in wanted if one.digest in committed]
        judged = [[row for row in own if "average_test_accuracy" in row] for own in rows]
        return [
            {row["round"]: row["test_accuracy"] - row["average_test_accuracy"] for row in own}
            for own in judged
        ]

    def lost(own: dict[int, float]) -> tuple[int, int, int]:
        less = {t: gain for t, gain in own.items() if gain < 0}
        return len(less), max(less), round(100 * min(less.values()))

    first, second = gains("cifar10.toml")
    assert (lost(first), lost(second)) == ((7, 12, -12), (5, 8, -11))
    later = [[gain for t, gain in own.items() if t > lost(own)[1]] for own in (first, second)]
    assert [round(100 * statistics.mean(own), 1) for own in later] == [3.6, 3.6]
    (mild,), (harsh,), (wild,) = (
        gains("cifar10-splits.toml", "0.5"),
        gains("cifar10-splits.toml", "fedma"),
        gains("cifar10-options.toml", "0.32"),
    )
    assert lost(mild)[2] == -43
    assert abs(statistics.mean(gain for t, gain in mild.items() if t > 15)) < 0.001
    assert (lost(harsh)[0], len(harsh), lost(wild)[0], len(wild)) == (17, 40, 20, 30)
    (hundred,) = gains("cifar100.toml")
    assert (min(hundred), len(hundred)) == (31, 30)
    assert min(hundred.values()) > 0


def test_the_committed_cifar_results_are_the_readmes(
    real: Paper, committed: Runs, readme: str
) -> None:
    found = compare(real, "cifar10", committed)
    both = next(
        c for c in found.cells if c.place.method == "FedDKD@87" and c.place.quantity == "accuracy"
    ).by_seed
    assert quoted(readme) >= {f"{both[0]:.4f}", f"{both[1]:.4f}"}
    assert f"| FedDKD | {shown(found, 'FedDKD', 'alpha=0.1', 'accuracy')[0]} |" in readme
    firsts = [
        max(run.rounds[:31], key=lambda row: row["validation_accuracy"])["test_accuracy"]
        for run in (
            committed[one.digest]
            for one in real.experiments["cifar10.toml"]
            if one.digest in committed
        )
        if run.experiment.seed == 1
    ]
    assert sorted(f"{first:.4f}" for first in firsts) == ["0.5958", "0.7139"]
    assert quoted(readme) >= {"31", "0.5958", "0.7139"}
    hundred = compare(real, "cifar100", committed)
    for name in ("FedDKD", "FedAvg", "FedProx"):
        ours = shown(hundred, name, "alpha=0.1", "accuracy")[0].split()[0]
        assert f"{name} {ours}" in " ".join(readme.split())


CALIBRATION = {
    "femnist-classes": ["FedDKD@60", "FedAvg@60"],
    "femnist-momentum": ["FedDKD@60", "FedAvg@60"],
    "femnist-half": ["FedDKD"],
    "femnist-half-40": ["FedDKD@40"],
    "femnist-draws-60": ["FedDKD@60"],
    "femnist-options": ["FedDKD@20"],
    "cifar10-images": ["FedDKD@80", "FedAvg@80"],
    "cifar10-splits": ["FedDKD@40", "FedAvg@40"],
    "cifar10-options": ["FedDKD@30", "FedAvg@30"],
    "search-mu-cifar10": ["mu="],
    "emnist-statistics": ["student"],
    "emnist-splits": ["FedAvg", "FedGen", "FedDKD"],
    "emnist-letters": ["FedAvg", "FedGen", "FedDKD"],
    "emnist-drawn": ["FedDKD"],
    "emnist-rate": ["gamma=0.4", "gamma=0.3", "gamma=0.2"],
    "emnist-fedgen": ["FedGen, intended", "FedGen, published"],
}


@pytest.mark.parametrize("table", CALIBRATION)
def test_calibrations_are_whole_and_what_the_readme_says_of_them(
    real: Paper, committed: Runs, readme: str, table: str
) -> None:
    found = [c for c in compare(real, table, committed).cells if c.place.quantity == "accuracy"]
    assert all(one.complete for one in found)
    (line,) = [line for line in readme.splitlines() if line.startswith(f"| `{table}`,")]
    for method in CALIBRATION[table]:
        numbers = [
            (c.ours, c.runs_wanted, c.quantity.decimals)
            for c in found
            if c.place.method.startswith(method)
        ]
        told = [
            f"{ours[0]:.{n}f}" + (f" ± {ours[1]:.{n}f}" if many > 1 else "")
            for ours, many, n in numbers
            if ours
        ]
        assert "; ".join(told) in line


def test_femnist_is_as_printed_if_each_client_draws_its_classes_and_better_if_clients_are_disjoint(
    real: Paper, committed: Runs, readme: str
) -> None:
    def verdicts(
        tables: Sequence[str], methods: Sequence[str], settings: Sequence[str] = FIVE
    ) -> Counter[str]:
        found = [
            one for table in tables for one in compare(real, table, committed).cells if one.printed
        ]
        meant = [
            one for one in found if one.place.method in methods and one.place.setting in settings
        ]
        return Counter(one.verdict.split(";")[0] for one in meant if one.place.quantity != "round")

    both, baselines = ("femnist-accuracy", "femnist-target"), ("FedAvg", "FedProx", "FedMAX")
    assert verdicts(both, baselines) == {"within the printed spread": 36}
    assert verdicts(both, baselines, FIFTEEN) == {
        "within the printed spread": 21,
        "better": 4,
        "worse": 3,
        "partial": 8,
    }
    assert verdicts(both, ["FedDKD"], ["c=0.5,E=5"]) == {"within the printed spread": 4}
    assert verdicts(["femnist-accuracy"], ["FedDKD_MAX"]) == {"worse": 3}
    longer = verdicts(both, [*baselines, "FedDKD", "FedDKD_MAX"], FIFTEEN)
    assert longer == {"within the printed spread": 37, "better": 6, "worse": 9, "partial": 8}
    assert quoted(readme) >= {"52", "37"}
    assert verdicts(["femnist-exact"], [*baselines, "FedDKD", "FedDKD_MAX"]) == {"better": 45}


def of_methods(
    real: Paper, committed: Runs, methods: Sequence[str], settings: Sequence[str]
) -> Counter[str]:
    """Count the verdicts of methods in both tables of FEMNIST; the best round is no result."""
    return Counter(
        one.verdict.split(";")[0]
        for table in ("femnist-accuracy", "femnist-target")
        for one in compare(real, table, committed).cells
        if one.place.method in methods and one.place.setting in settings
        if one.place.quantity != "round"
    )


def test_the_front_page_gives_the_tally_of_all_methods_and_each_share_of_clients(
    real: Paper, committed: Runs
) -> None:
    front = " ".join((PAPER.parent.parent / "README.md").read_text(encoding="utf-8").split())
    distilling, others = ("FedDKD", "FedDKD_MAX"), ("FedAvg", "FedProx", "FedMAX")
    ours = of_methods(real, committed, distilling, [*FIVE, *FIFTEEN])
    within = ours["within the printed spread"]
    assert f"{within} of the {ours.total()} figures of FedDKD and FedDKD_MAX" in front
    assert f"{ours['worse']} are worse and {ours['better']} better" in front
    theirs = of_methods(real, committed, others, [*FIVE, *FIFTEEN])
    whole = theirs.total() - theirs["partial"]
    assert f"of the baselines {theirs['within the printed spread']} of {whole} do" in front
    found = compare(real, "femnist-accuracy", committed)
    for method in (*others, *distilling):
        cells = [
            next(c for c in found.cells if c.place[1:] == (method, setting, "accuracy"))
            for setting in sorted(FIVE)
        ]
        shown_ = [f"{c.ours[0]:.4f} ({c.printed.mean})" for c in cells if c.ours and c.printed]
        words = ", ".join(
            c.verdict.split(";")[0].removesuffix(" the printed spread") for c in cells
        )
        assert f"| {' | '.join([method, *shown_, words])} |" in front


def test_feddkd_lies_below_print_in_all_columns_with_five_epochs(
    real: Paper, committed: Runs, readme: str
) -> None:
    found = compare(real, "femnist-accuracy", committed)
    gaps = [
        one.difference
        for one in found.cells
        if one.place.method in ("FedDKD", "FedDKD_MAX") and one.place.setting in FIVE
        if one.place.quantity == "accuracy" and one.difference is not None
    ]
    assert (len(gaps), sum(gap < 0 for gap in gaps)) == (6, 6)
    mean = statistics.fmean(gaps)
    assert f"below print in 6 of 6 cells, by {-mean:.4f} in the mean" in " ".join(readme.split())


def test_chance_explains_how_far_femnist_lies_from_the_printed_cells(
    real: Paper, committed: Runs, readme: str
) -> None:
    def unlikely(*tables: str) -> tuple[list[str], int]:
        found = [
            (c.place.quantity, c.chance)
            for table in tables
            for c in compare(real, table, committed).cells
        ]
        known = [(quantity, chance) for quantity, chance in found if chance is not None]
        return [quantity for quantity, chance in known if chance < 0.05], len(known)

    assert unlikely("femnist-accuracy", "femnist-target") == (["round"] * 4, 164)
    figures = [
        independent(whole(compare(real, table, committed)))
        for table in ("femnist-accuracy", "femnist-target")
    ]
    assert sum(len(some) for some in figures) == 108
    exact, of = unlikely("femnist-exact")
    assert quoted(readme) >= {"164", str(len(exact)), str(of)}


def test_on_other_draws_of_the_split_feddkd_is_as_quick_as_printed_but_not_as_accurate(
    real: Paper, committed: Runs, readme: str
) -> None:
    found = compare(real, "femnist-draws", committed)
    rounds = next(iter(found.cells)).by_seed
    assert sorted(rounds) == list(range(9))
    assert shown(found, "FedDKD", "c=0.75,E=5", "rounds_to_target") == ("15 ± 2", "13 ± 2")
    told = "; ".join(
        ", ".join(f"{rounds[seed]:.0f}" for seed in some) for some in (range(3), range(3, 9))
    )
    (line,) = [line for line in readme.splitlines() if line.startswith("| `femnist-draws`,")]
    assert f"{told}; 15 ± 2" in line
    mean = statistics.fmean(rounds[seed] for seed in range(3, 9))
    findings = (PAPER / "findings.toml").read_text(encoding="utf-8")
    assert findings.count(f"in round {mean:.0f} (table `femnist-draws`") == 2
    (sixty,) = compare(real, "femnist-draws-60", committed).cells
    assert sixty.ours is not None
    assert sixty.chance is not None
    mean, deviation = (100 * value for value in sixty.ours)
    best = 100 * max(sixty.by_seed.values())
    assert f"{sixty.chance:.3f}" in quoted(readme)
    assert f"{mean:.2f} ± {deviation:.2f} %" in findings
    assert quoted(findings) >= {f"{sixty.chance:.3f}", f"{best:.2f}"}
    half = compare(real, "femnist-half", committed)
    (line,) = [line for line in readme.splitlines() if line.startswith("| `femnist-half`,")]
    assert (
        "; ".join(shown(half, "FedDKD", f"c={c},E=5", "rounds_to_target")[0] for c in (0.5, 0.75))
        in line
    )


def test_findings_on_calibration_quote_the_tables(real: Paper, committed: Runs) -> None:
    findings = tomllib.loads((PAPER / "findings.toml").read_text(encoding="utf-8"))
    said = {one["question"]: one.get("showed", "") for one in findings["open"]}

    def per_cent(table: str, method: str, setting: str, quantity: str = "accuracy") -> str:
        ours, _ = shown(compare(real, table, committed), method, setting, quantity)
        return f"{100 * float(ours.split()[0]):.2f}"

    def quotes(
        question: str, table: str, *places: tuple[str, str], quantity: str = "accuracy"
    ) -> None:
        wanted = [per_cent(table, method, setting, quantity) for method, setting in places]
        assert [number for number in wanted if number not in said[question]] == []

    quotes(
        '"6 of 26 classes"', "femnist-classes", ("FedDKD@60", "independent"), ("FedDKD@60", "exact")
    )
    momenta = [
        (f"{method}@60, {size}", "c=0.5,E=5")
        for method in ("FedDKD", "FedAvg")
        for size in ("0.1", "0.5", "0.9")
    ]
    quotes("Momentum on FEMNIST", "femnist-momentum", *momenta)
    quotes(
        "Momentum on FEMNIST",
        "femnist-half-40",
        *((f"FedDKD@40, {size}", "c=0.5,E=5") for size in ("0.1", "0.5")),
    )
    quotes("Momentum on FEMNIST", "femnist-accuracy", ("FedDKD@60", "c=0.5,E=5"))
    quotes(
        "Optimiser of DKD",
        "femnist-options",
        ("FedDKD@20", "32x32"),
        ("FedDKD@20, DKD with momentum 0.5", "32x32"),
    )
    quotes("FEMNIST geometry", "femnist-options", ("FedDKD@20", "32x32"), ("FedDKD@20", "28x28"))
    both = ("FedDKD", "FedAvg")
    quotes(
        "CIFAR's images",
        "cifar10-images",
        *((f"{m}@80", s) for m in both for s in ("none", "flips", "flips and crops")),
    )
    splits = ("alpha=0.1", "alpha=0.1, balanced", "alpha=0.5")
    quotes("Dirichlet split", "cifar10-splits", *((f"{m}@40", s) for m in both for s in splits))
    quotes(
        "Adam",
        "cifar10-options",
        *((f"{m}@30{how}", "alpha=0.1") for m in both for how in ("", ", AMSGrad")),
    )
    rates = [(f"FedDKD@30{how}", "alpha=0.1") for how in ("", ", gamma=0.02", ", gamma=0.32")]
    quotes("Optimiser of DKD", "cifar10-options", *rates)
    dropout = [(f"FedDKD@30{how}", "alpha=0.1") for how in ("", ", student with dropout")]
    quotes("Dropout and batch norm in DKD", "cifar10-options", *dropout)
    mus = [(f"mu={mu}", "alpha=0.1") for mu in ("0.001", "0.01", "0.1", "0.01 of the mean")]
    quotes("FedProx", "search-mu-cifar10", *mus, quantity="validation")
    quotes("FedProx", "search-mu-cifar10", mus[-1])
    for table, methods in (("emnist", ("FedDKD", "FedGen")), ("emnist-shuffled", ("FedGen",))):
        for place in (
            (method, setting) for method in methods for setting in ("alpha=0.05", "alpha=0.1")
        ):
            assert (
                shown(compare(real, table, committed), *place, "accuracy")[0].split()[0]
                in said["Shuffling in FedGen's EMNIST setting"]
            )
    runs = [committed[one.digest] for one in real.experiments["emnist-statistics.toml"]]
    assert [len(run.rounds) + 1 for run in runs if run.broke_off] == [21, 14]


def by_draw(found: Comparison, alpha: str) -> dict[str, list[float]]:
    """Method -> its means on the draws of the split."""
    cells = [
        (one.place, one.ours) for one in found.cells if one.place.setting.startswith(f"{alpha} ")
    ]
    return {
        m: [ours[0] for at, ours in cells if at.method == m and ours]
        for m in ("FedAvg", "FedGen", "FedDKD")
    }


def test_findings_on_emnist_quote_the_draws_of_the_split_with_and_without_the_z(
    real: Paper, committed: Runs
) -> None:
    findings = tomllib.loads((PAPER / "findings.toml").read_text(encoding="utf-8"))
    classes, shuffling = (
        next(one["showed"] for one in findings["open"] if one["question"] == question)
        for question in ("EMNIST's classes", "Shuffling in FedGen's EMNIST setting")
    )
    why, leads = findings["mismatch"][0]["why"], dict[tuple[str, str], list[float]]()
    for table, alpha in itertools.product(
        ("emnist-splits", "emnist-letters"), ("alpha=0.05", "alpha=0.1")
    ):
        means = by_draw(compare(real, table, committed), alpha)
        for method, own in means.items() if table == "emnist-splits" else ():
            assert quoted(why) >= {f"{min(own):.2f}", f"{max(own):.2f}"}, method
        assert quoted(classes) >= {f"{statistics.fmean(own):.2f}" for own in means.values()}
        assert all(fedavg < min(others) for fedavg, *others in zip(*means.values(), strict=True))
        leads[table, alpha] = [round(b - a, 1) for _, a, b in zip(*means.values(), strict=True)]
    assert min(leads["emnist-splits", "alpha=0.05"]) > 0
    assert sorted(leads["emnist-letters", "alpha=0.05"])[:2] == [-0.4, 3.0]  # three of four
    assert sorted(leads["emnist-splits", "alpha=0.1"]) == [-2.0, -1.0, -0.2, 0.8]
    assert sorted(leads["emnist-letters", "alpha=0.1"]) == [-1.3, -0.5, 0.1, 0.2]
    fedgen = compare(real, "emnist-fedgen", committed)
    for method in ("FedGen, published", "FedGen, intended"):
        assert shown(fedgen, method, "alpha=0.1", "accuracy")[0].split()[0] in quoted(why)
    rates = {one.place.method: one.by_seed for one in compare(real, "emnist-rate", committed).cells}
    by_rate = {f"{rates[f'gamma={gamma}'][seed]:.2f}" for gamma in (0.3, 0.2) for seed in (8, 0)}
    assert quoted(findings["mismatch"][1]["why"]) >= by_rate
    drawn = compare(real, "emnist-drawn", committed)
    ours = [
        shown(drawn, "FedDKD", f"alpha={alpha} drawn", "accuracy")[0].split()[0]
        for alpha in (0.05, 0.1)
    ]
    assert quoted(shuffling) >= set(ours)


def test_the_committed_digits_results_are_the_readmes(
    real: Paper, committed: Runs, readme: str
) -> None:
    found = compare(real, "digits", committed)
    for method in real.table("digits").methods:
        best, last = (
            shown(found, method, "T=100", f"{which}_accuracy") for which in ("best", "final")
        )
        parts = [
            shown(found, method, "T=100", f"final_{which}")[0]
            for which in ("real_domains", "generated_domain")
        ]
        assert f"| {' | '.join([method, *best, *last, *parts])} |" in readme


def test_the_four_real_domains_are_whole_and_the_readmes(
    real: Paper, committed: Runs, readme: str
) -> None:
    found = compare(real, "digits-real", committed)
    assert all(one.complete and len(one.readings) == 5 for one in found.cells)
    assert all(test.wins == 5 for _, test in found.tests), (
        "FedDKD_BN leads every other method in every seed"
    )
    for method in real.table("digits-real").methods:
        cells = [
            shown(found, method, "T=100", f"{which}_accuracy")[0] for which in ("best", "final")
        ]
        assert f"| {' | '.join([method, *cells])} |" in readme


def test_the_digit_files_have_a_client_for_each_domain(real: Paper) -> None:
    for file, domains in (("digits.toml", 5), ("digits-real.toml", 4)):
        for one in real.experiments[file]:
            options = one.parsed_data.canonical
            named = options[options.index("'") + 1 : options.rindex("'")].split(",")
            assert (one.clients, len(named), "generated" in named) == (
                domains,
                domains,
                domains == 5,
            )
            assert one.diagnostics


def test_the_grids_of_the_searches_are_the_papers(real: Paper) -> None:
    def tried(table: str, option: str) -> set[tuple[object, ...]]:
        calls = [
            dict(one.parsed_method.calls[0].complete) for one in real.wanted(real.table(table))
        ]
        return {(call[option], call.get("form")) for call in calls}

    assert tried("search-mu", "mu") == {
        (mu, form) for mu in (0.01, 0.1, 1.0, 10.0) for form in ("mean", "sum")
    }
    assert tried("search-beta", "beta") == {
        (beta, None) for beta in (1.0, 10.0, 100.0, 1000.0, 10000.0)
    }
    assert tried("search-mu-cifar10", "mu") == {
        (mu, "sum") for mu in (0.001, 0.01, 0.1, 1.0, 10.0)
    } | {(0.01, "mean")}


def test_every_figure_of_the_paper_with_results_has_a_definition_that_fits_its_table(
    real: Paper,
) -> None:
    found = figures(real)
    assert list(found) == [
        "comm-e5",
        "steps-e5",
        "comm-e15",
        "steps-e15",
        "steps-c25",
        "training-loss",
    ]
    for figure in found.values():
        assert {panel.setting for panel in figure.panels.values()} <= set(
            real.table(figure.table).settings
        )
    e5, e15 = found["steps-e5"].up_to, found["steps-e15"].up_to
    assert (e5, e15) == (660 * 49 * 5, 660 * 49 * 15)  # what a baseline's 660 rounds take
    assert [panel.of for panel in found["training-loss"].panels.values()] == [[n] for n in range(5)]
