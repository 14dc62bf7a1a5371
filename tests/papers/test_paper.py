"""The paper's tables: printed cells as data, runs behind them, verdicts; `feddkd paper`."""

import gzip
import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scipy.stats import ttest_ind

from feddkd.cli.app import main
from feddkd.engines.select import find_device
from feddkd.errors import InputError
from feddkd.experiment import Experiment, load
from feddkd.papers.cells import AT, Cell, RunValues, cells, orders
from feddkd.papers.comparison import compare
from feddkd.papers.definitions import Paper, Printed, PrintedCell, Quantity, read
from feddkd.papers.figures import Panel, curves, figures, missing
from feddkd.papers.report import pages
from feddkd.papers.results import RecordedRun, Runs, collect, foreign_runs, recorded
from feddkd.papers.status import progress
from feddkd.papers.tables import FORMATS, as_json
from feddkd.reports.statistics import apart, paired, spread
from feddkd.rounds.loop import Row
from feddkd.runs.circumstances import circumstances
from feddkd.runs.description import manifest_of
from feddkd.runs.record import folder_name
from feddkd.runs.runner import execute
from feddkd.runs.session import Every
from playing import execute as execute_watched

PAPER = Path(__file__).parents[2] / "papers" / "feddkd"

TINY = """
model = "mlp(hidden='4')"
clients = 4
rounds = 4
target = 0.5

[sweep]
cohort = [0.5, 1.0]
method = ["fedavg(epochs=1)", "fedavg(epochs=1) | dkd(steps=1)"]
seed = [0, 1]
"""
TABLES = """
[tiny]
title = "A tiny table"
lead = "FedDKD"
tested = ["accuracy"]
note = "made up"

[tiny.settings]
"c=0.5" = { file = "tiny.toml", where = { cohort = 0.5 } }
"c=1" = { file = "tiny.toml", where = { cohort = 1.0 } }

[tiny.methods]
FedAvg = { method = "fedavg()" }
FedDKD = { method = "fedavg() | dkd(student='eval')" }
"FedDKD@2" = { method = "fedavg() | dkd()", rounds = 2 }

[tiny.quantities]
accuracy.at = "best_validation"
accuracy.column = "test_accuracy"
accuracy.scale = 100
accuracy.decimals = 1
accuracy.better = "higher"
rounds_to_target = { at = "target", column = "round", better = "lower" }
"""
CELLS = """table,method,setting,quantity,mean,std,runs,note
tiny,FedAvg,c=0.5,accuracy,60.0,1.0,,
tiny,FedDKD,c=0.5,accuracy,70.0,1.0,2,a slip
tiny,FedAvg,c=0.5,rounds_to_target,3,1,2,
tiny,FedDKD,c=0.5,rounds_to_target,1,0,2,
"""


@pytest.fixture
def paper(tmp_path: Path) -> Paper:
    for name, text in (("tiny.toml", TINY), ("tables.toml", TABLES), ("published.csv", CELLS)):
        (tmp_path / "papers" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "papers" / name).write_text(text, encoding="utf-8")
    return read(tmp_path / "papers")


def made(experiment: Experiment, accuracies: list[float], seconds: float = 1.0) -> RecordedRun:
    """A run that had these test accuracies, and the same on the validation set."""
    manifest = {**manifest_of(experiment), **circumstances("serial", find_device("cpu"))}
    rows = [
        {
            "round": t,
            "test_accuracy": a,
            "validation_accuracy": a,
            "communications": 2 * t,
            "local_steps": 5.0 * t,
        }
        for t, a in enumerate(accuracies, 1)
    ]
    return RecordedRun(manifest, seconds, rows)


def runs_of(
    paper: Paper, method: str, accuracies: list[list[float]], setting: str = "c=0.5"
) -> Runs:
    behind = paper.behind(paper.table("tiny"), setting, method)
    return {one.digest: made(one, values) for one, values in zip(behind, accuracies, strict=False)}


def cell(paper: Paper, runs: Runs, method: str, quantity: str = "accuracy") -> Cell:
    return next(
        one
        for one in cells(paper, paper.table("tiny"), runs)
        if one.place == PrintedCell("tiny", method, "c=0.5", quantity)
    )


def call(
    *arguments: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    status: int = 0,
) -> str:
    monkeypatch.setattr(sys, "argv", ["feddkd", "paper", *map(str, arguments)])
    with pytest.raises(SystemExit) as left:
        main()
    told = capsys.readouterr()
    assert (left.value.code or 0) == status, told.err
    return told.out if status == 0 else told.err


# The printed cells


def test_every_cell_of_the_papers_result_tables_is_there() -> None:
    counts = Counter(place.table for place in read(PAPER).printed)
    # methods x E x c x quantities; methods x quantities for CIFAR; methods x alphas; methods x
    # (best, final)
    assert counts == {
        "femnist-target": 5 * 2 * 3 * 3,
        "femnist-accuracy": 7 * 2 * 3 * 2,
        "cifar10": 4 * 7,
        "cifar100": 4 * 7,
        "emnist": 5 * 2,
        "digits": 5 * 2,
    }


def test_every_printed_cell_has_runs_behind_it() -> None:
    real = read(PAPER)
    for place in real.printed:
        table = real.table(place.table)
        assert place.quantity in table.quantities
        assert table.lead in table.methods
        assert set(table.tested) <= set(table.quantities)
        seeds = [one.seed for one in real.behind(table, place.setting, place.method)]
        assert seeds == list(range({"emnist": 10, "digits": 5}.get(place.table, 3)))


def test_a_cells_runs_differ_in_their_seed_alone_and_no_two_rows_share_them() -> None:
    real = read(PAPER)
    for table in real.tables.values():
        firsts = [
            one
            for setting in table.settings
            for method in table.whole
            for one in real.behind(table, setting, method)[:1]
        ]
        # a table may compare splits
        families = Counter((one.family, one.split_seed) for one in firsts)
        assert set(families.values()) == {1}


@pytest.mark.parametrize(("table", "factor"), [("femnist-target", 11), ("cifar10", 4)])
def test_printed_communications_are_rounds_times_one_and_the_dkd_steps(
    table: str, factor: int
) -> None:
    printed = read(PAPER).printed
    for place, comm in printed.items():
        if place.table == table and place.quantity == "comm_to_target":
            rounds = float(printed[place._replace(quantity="rounds_to_target")].mean)
            share = factor if place.method.startswith("FedDKD") else 1
            assert abs(float(comm.mean) - share * rounds) <= 0.5 * share + 0.5


def test_printed_steps_on_femnist_are_49_batches_an_epoch_and_the_dkd_steps() -> None:
    printed = read(PAPER).printed
    for place, steps in printed.items():
        if place.table == "femnist-target" and place.quantity == "steps_to_target":
            rounds = float(printed[place._replace(quantity="rounds_to_target")].mean)
            a_round = 49 * int(place.setting.split("E=")[1]) + 10 * place.method.startswith(
                "FedDKD"
            )
            assert abs(float(steps.mean) - rounds * a_round / 1000) <= 0.5 + 0.5 * a_round / 1000


def test_the_known_slips_are_noted_and_are_slips() -> None:
    printed = read(PAPER).printed
    comm = printed[PrintedCell("cifar100", "FedDKD", "alpha=0.1", "comm_to_target")]
    assert comm.note
    assert float(comm.mean) == pytest.approx(3 * 81, abs=1.5)
    assert abs(float(comm.mean) - (30 + 4 * 51)) > 2.5
    noted = {place for place, one in printed.items() if one.note}
    assert {place.quantity for place in noted if place.table == "cifar100"} == {
        "comm",
        "steps",
        "comm_to_target",
        "steps_to_target",
    }


def test_cifars_settings_are_those_of_the_paper() -> None:
    ten, hundred = (load(PAPER / f"cifar{n}.toml")[0] for n in (10, 100))
    assert (ten.clients, ten.rounds, ten.target, ten.partition) == (
        16,
        350,
        0.74,
        "dirichlet(alpha=0.1)",
    )
    assert (hundred.target, dict(hundred.parsed_method.calls[1].complete)["warmup"]) == (0.514, 30)


# Cells and verdicts


def test_accuracy_is_taken_at_the_best_validation_round_the_earliest_of_equals() -> None:
    rows = [
        {"round": t, "validation_accuracy": v, "test_accuracy": a}
        for t, (v, a) in enumerate([(1, 7), (2, 5), (2, 9)], 1)
    ]
    assert [row["test_accuracy"] for row in AT["best_validation"](rows, None)] == [5]
    assert [row["round"] for row in AT["best"](rows, None)] == [3]
    assert [row["round"] for row in AT["last"](rows, None)] == [3]
    assert [row["round"] for row in AT["target"](rows, 6)] == [1]
    assert AT["target"](rows, 10) == []
    assert len(AT["five_best"](rows * 3, None)) == 5


@pytest.mark.parametrize(
    ("ours", "better", "verdict"),
    [
        (61.04, "higher", "within the printed spread"),  # 60.0 may have been 60.04
        (61.1, "higher", "better"),
        (58.9, "higher", "worse"),
        (61.1, "lower", "worse"),
        (58.9, "lower", "better"),
        (61.1, "neither", "above"),
        (58.9, "neither", "below"),
    ],
)
def test_a_whole_cell_is_within_the_printed_spread_or_better_or_worse(
    ours: float, better: str, verdict: str
) -> None:
    place = PrintedCell("t", "m", "s", "q")
    one = Cell(
        place,
        Quantity("best", "x", better=better),
        Printed("60.0", "1.0"),
        [RunValues(0, [ours], 4, True)],
        1,
        4,
    )
    assert one.verdict == verdict
    assert replace(one, runs_wanted=2).verdict == "partial"
    assert replace(one, runs_wanted=2).tendency == verdict
    assert replace(one, readings=[]).verdict == "nothing yet"
    assert replace(one, printed=None).verdict == "not printed"


def test_means_are_over_seeds_with_the_population_deviation(paper: Paper) -> None:
    one = cell(
        paper, runs_of(paper, "FedAvg", [[0.1, 0.6, 0.6, 0.5], [0.1, 0.2, 0.3, 0.62]]), "FedAvg"
    )
    assert one.ours == pytest.approx((61.0, 1.0))
    assert one.difference == pytest.approx(1.0)
    assert (one.rounds, one.rounds_wanted, one.runs_wanted, one.verdict) == (
        8,
        8,
        2,
        "within the printed spread",
    )


def test_runs_cut_short_are_partial_but_a_prefix_and_a_target_once_reached_are_final(
    paper: Paper,
) -> None:
    runs = runs_of(paper, "FedDKD", [[0.4, 0.7], [0.6, 0.7, 0.8]])
    assert cell(paper, runs, "FedDKD").verdict == "partial"
    assert cell(paper, runs, "FedDKD@2").verdict == "not printed"
    assert cell(paper, runs, "FedDKD@2").rounds_wanted == 4
    reached = cell(paper, runs, "FedDKD", "rounds_to_target")
    assert (reached.values, reached.verdict) == ([2, 1], "within the printed spread")
    assert (
        cell(paper, runs_of(paper, "FedDKD", [[0.4, 0.4]]), "FedDKD", "rounds_to_target").verdict
        == "partial"
    )


def test_a_run_that_is_behind_others_of_its_cell_waits_until_it_has_caught_up(paper: Paper) -> None:
    one = cell(paper, runs_of(paper, "FedDKD", [[0.4, 0.5], [0.6, 0.7, 0.8]]), "FedDKD")
    assert ([reading.seed for reading in one.readings], one.rounds, one.verdict) == (
        [1],
        3,
        "partial",
    )
    whole = cell(paper, runs_of(paper, "FedDKD", [[0.4] * 3, [0.7] * 4]), "FedDKD")
    assert ([reading.seed for reading in whole.readings], whole.verdict) == ([1], "partial")


def test_a_run_that_broke_off_is_final_and_is_not_run_again(paper: Paper) -> None:
    runs = runs_of(paper, "FedDKD", [[0.4, 0.5], [0.7] * 4])
    broken, *_ = runs
    assert [
        one.digest
        for one in missing(
            paper.table("tiny"), [run.experiment for run in runs.values()], runs, None
        )
    ] == [broken]
    runs[broken] = replace(
        runs[broken], manifest={**runs[broken].manifest, "ended": "no finite numbers"}
    )
    assert missing(paper.table("tiny"), [run.experiment for run in runs.values()], runs, None) == []
    one = cell(paper, runs, "FedDKD")
    assert (one.complete, one.broke_off, one.values) == (True, 1, [50.0, 70.0])
    assert cell(paper, runs, "FedDKD@2").broke_off == 0
    assert "; 1 run broke off" in FORMATS["text"](compare(paper, "tiny", runs))
    done = next(one for one in progress(paper, runs) if one.name == "tiny")
    assert (done.runs_done, done.rounds_done) == (2, 6)


def test_a_whole_cell_says_how_likely_it_lies_so_far_from_the_printed_one_by_chance(
    paper: Paper,
) -> None:
    runs = runs_of(paper, "FedDKD", [[0.7] * 4, [0.74] * 4]) | runs_of(
        paper, "FedAvg", [[0.6] * 4, [0.61] * 4]
    )
    found = compare(paper, "tiny", runs)
    one = cell(paper, runs, "FedDKD")
    assert one.chance == apart([70.0, 74.0], 70.0, 1.0, 2)
    assert f"{one.chance:.2g}" in FORMATS["text"](found)
    assert (
        next(
            told["p"]
            for told in as_json(found)["cells"]
            if told["ours"] == {"mean": 72.0, "std": 2.0}
        )
        == one.chance
    )
    assert cell(paper, runs, "FedAvg").chance is None  # it is not known how many runs were printed
    assert cell(paper, runs, "FedDKD@2").chance is None  # nothing was printed
    assert replace(one, runs_wanted=3).chance is None  # partial
    missed = replace(one, readings=[*one.readings, RunValues(2, [], 4, True)], runs_wanted=3)
    assert missed.complete
    assert missed.chance is None


def test_a_method_that_a_column_has_no_runs_for_is_not_in_it(paper: Paper) -> None:
    text = TINY.replace("cohort = [0.5, 1.0]", "cohort = [1.0]").replace(
        ', "fedavg(epochs=1) | dkd(steps=1)"', ""
    )
    (paper.folder / "less.toml").write_text(text, encoding="utf-8")
    (paper.folder / "tables.toml").write_text(
        TABLES.replace('"tiny.toml", where = { cohort = 1.0 }', '"less.toml"')
    )
    less = read(paper.folder)
    runs = runs_of(less, "FedDKD", [[0.7] * 4, [0.9] * 4])
    for setting in ("c=0.5", "c=1"):
        runs |= runs_of(less, "FedAvg", [[0.6] * 4, [0.7] * 4], setting)
    found = compare(less, "tiny", runs)
    # two quantities
    assert [cell.place.method for cell in found.cells if cell.place.setting == "c=1"] == [
        "FedAvg",
        "FedAvg",
    ]
    # where there is a lead to test
    assert [cell.place.setting for cell, _ in found.tests] == ["c=0.5"]


@pytest.mark.parametrize(
    ("right", "wrong", "name"),
    [("cohort = 0.5", "cohort = 0.75", "c=0.5"), ('"fedavg()"', '"fedprox()"', "FedAvg")],
)
def test_columns_and_methods_without_any_experiment_are_mistakes(
    paper: Paper, right: str, wrong: str, name: str
) -> None:
    (paper.folder / "tables.toml").write_text(TABLES.replace(right, wrong), encoding="utf-8")
    with pytest.raises(InputError, match=f"tiny.*{name}"):
        compare(read(paper.folder), "tiny", {})


def test_a_target_missed_in_a_cell_that_is_not_printed_is_not_called_worse(paper: Paper) -> None:
    one = cell(paper, runs_of(paper, "FedDKD", [[0.4] * 4] * 2), "FedDKD@2", "rounds_to_target")
    assert (one.printed, one.verdict, one.missed) == (None, "not printed", 2)


def test_a_whole_run_that_misses_the_target_makes_the_cell_worse_and_last_in_order(
    paper: Paper,
) -> None:
    runs = runs_of(paper, "FedDKD", [[0.4] * 4, [0.9] * 4]) | runs_of(
        paper, "FedAvg", [[0.1, 0.1, 0.1, 0.6]] * 2
    )
    one = cell(paper, runs, "FedDKD", "rounds_to_target")
    assert (one.verdict, one.missed, one.values) == ("worse", 1, [1])
    order = next(
        o
        for o in orders(paper.table("tiny"), cells(paper, paper.table("tiny"), runs))
        if o.quantity != "accuracy"
    )
    assert order.swapped == [("FedDKD", "FedAvg")]


def test_the_order_of_methods_holds_or_the_lead_says_whom_it_is_not_ahead_of(paper: Paper) -> None:
    ahead = runs_of(paper, "FedDKD", [[0.7] * 4] * 2) | runs_of(paper, "FedAvg", [[0.6] * 4] * 2)
    behind = runs_of(paper, "FedDKD", [[0.5] * 4] * 2) | runs_of(paper, "FedAvg", [[0.6] * 4] * 2)
    assert "the printed order holds" in FORMATS["text"](compare(paper, "tiny", ahead))
    assert "worse; not ahead of FedAvg" in FORMATS["text"](compare(paper, "tiny", behind))
    half = runs_of(paper, "FedDKD", [[0.7] * 4]) | runs_of(paper, "FedAvg", [[0.6] * 4])
    assert "order of what there is so far holds" in FORMATS["text"](compare(paper, "tiny", half))


def test_runs_that_are_there_in_part_stand_in_no_order(paper: Paper) -> None:
    cut = runs_of(paper, "FedDKD", [[0.1] * 2] * 2) | runs_of(paper, "FedAvg", [[0.2] * 4] * 2)
    found = compare(paper, "tiny", cut)
    assert "not ahead of" not in FORMATS["text"](found)
    assert not [order for order in found.orders if order.quantity == "accuracy"]


def test_all_formats_say_the_same(paper: Paper) -> None:
    runs = runs_of(paper, "FedDKD", [[0.7] * 4, [0.72] * 4]) | runs_of(
        paper, "FedAvg", [[0.6] * 4, [0.61] * 4]
    )
    found = compare(paper, "tiny", runs)
    assert all("70.0" in write(found) and "71.0" in write(found) for write in FORMATS.values())
    assert "a slip" in FORMATS["markdown"](found)
    assert r"rounds\_to\_target" in FORMATS["latex"](found)
    said = json.loads(json.dumps(as_json(found)))
    lead = next(
        one for one in said["cells"] if one["method"] == "FedDKD" and one["setting"] == "c=0.5"
    )
    assert lead["ours"] == pytest.approx({"mean": 71.0, "std": 1.0})
    assert lead["verdict"] == "within the printed spread"
    assert said["tests"][0]["difference"]["mean"] == pytest.approx(10.5)


def test_another_reading_is_held_against_the_printed_cells_of_the_table_that_it_stands_beside(
    paper: Paper,
) -> None:
    other = TABLES.replace("tiny", "other").replace("other.toml", "tiny.toml")
    (paper.folder / "tables.toml").write_text(
        TABLES + other.replace("[other]", '[other]\nbeside = ["tiny"]'), encoding="utf-8"
    )
    both = read(paper.folder)
    place = PrintedCell("other", "FedAvg", "c=0.5", "accuracy")
    assert both.cell(both.table("other"), place) == Printed("60.0", "1.0")
    assert both.cell(both.table("tiny"), place._replace(setting="c=1", table="tiny")) is None
    (paper.folder / "tables.toml").write_text(
        TABLES.replace("[tiny]", '[tiny]\nbeside = ["nowhere"]'), encoding="utf-8"
    )
    with pytest.raises(InputError, match="nowhere"):
        read(paper.folder)


# Statistics


def test_a_spread_is_students() -> None:
    found = spread([1.0, 2.0, 3.0, 6.0])
    assert (found.n, found.mean, found.median) == (4, 3.0, 2.5)
    assert found.sample_std == pytest.approx(statistics.stdev([1, 2, 3, 6]))
    assert found.high is not None
    assert found.high - 3 == pytest.approx(3.182446 * statistics.stdev([1, 2, 3, 6]) / 2, rel=1e-6)
    assert spread([1.0]).sample_std is None


def test_seeds_are_paired_and_too_few_of_them_tell_nothing() -> None:
    ours, theirs = {0: 2.0, 1: 3.5, 2: 4.0, 7: 1.0}, {0: 1.0, 1: 2.0, 2: 3.5, 9: 0.0}
    found = paired(ours, theirs)
    assert found is not None
    assert found.difference.n == 3
    assert found.wins == 3
    assert found.wilcoxon_p is None
    t = 1.0 / (0.5 / math.sqrt(3))
    # Student's distribution with two degrees of freedom
    assert found.t_p == pytest.approx(1 - t / math.sqrt(2 + t * t))
    assert paired({0: 1.0}, {1: 1.0}) is None
    same = paired(ours, ours)
    assert same is not None
    assert same.t_p is None
    many = paired({n: n + 1.0 + n / 10 for n in range(6)}, {n: float(n) for n in range(6)})
    assert many is not None
    assert many.wilcoxon_p == pytest.approx(2 / 2**6)


def test_what_is_known_by_its_mean_and_deviation_alone_is_tested_as_if_the_numbers_were_there() -> (
    None
):
    ours, theirs = [2.0, 3.5, 4.0], [1.0, 1.5, 3.0, 2.5]
    assert apart(ours, statistics.fmean(theirs), statistics.pstdev(theirs), 4) == pytest.approx(
        ttest_ind(ours, theirs, equal_var=False).pvalue, rel=1e-12
    )
    assert apart(ours, 2.0, 1.0, 1) is None
    assert apart([2.0], 2.0, 1.0, 3) is None
    assert apart([2.0, 2.0], 3.0, 0.0, 3) is None


# Records


def test_a_run_is_known_by_its_experiment_not_by_spelling_or_folder(paper: Paper) -> None:
    one = paper.wanted(paper.table("tiny"))[0]
    other = replace(one, cohort=2, method="fedavg(epochs=1, lr=0.1)", target=0.1, name="mine")
    file = paper.folder / "results" / "old.jsonl.gz"
    file.parent.mkdir()
    file.write_bytes(gzip.compress(made(other, [0.1, 0.2]).line.encode()))
    assert list(recorded(paper)) == [one.digest]


def folder_of(run: RecordedRun, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(dict(run.manifest)))
    (folder / "rounds.jsonl").write_text(
        "".join(
            json.dumps({**row, "test_client_accuracy": [0.5] * 11}) + "\n" for row in run.rounds
        )
    )
    (folder / "timings.jsonl").write_text(
        "".join(json.dumps({"round": row["round"], "seconds": 0.5}) + "\n" for row in run.rounds)
    )


def test_a_run_that_several_files_want_is_kept_once(paper: Paper, tmp_path: Path) -> None:
    (paper.folder / "again.toml").write_text(
        TINY.replace("seed = [0, 1]", "seed = [0, 2]"), encoding="utf-8"
    )
    again = TABLES.replace("tiny", "again")
    (paper.folder / "tables.toml").write_text(TABLES + again, encoding="utf-8")
    both = read(paper.folder)
    for number, one in enumerate(
        both.wanted(both.table("tiny"), ["c=0.5"]) + both.wanted(both.table("again"), ["c=0.5"])
    ):
        folder_of(made(one, [0.1]), tmp_path / "runs" / str(number))
    assert collect(both, tmp_path / "runs") == {"tiny.jsonl.gz": (4, 4), "again.jsonl.gz": (2, 2)}
    assert len(recorded(both)) == 6


def test_collecting_keeps_the_longer_run_leaves_strangers_out_and_makes_the_same_bytes_again(
    paper: Paper, tmp_path: Path
) -> None:
    first, second = paper.wanted(paper.table("tiny"))[:2]
    folder_of(made(second, [0.1, 0.2]), tmp_path / "runs" / "a")
    folder_of(made(first, [0.1]), tmp_path / "runs" / "b")
    folder_of(made(replace(first, rounds=9), [0.1]), tmp_path / "runs" / "c")
    assert foreign_runs(paper, tmp_path / "runs") == 1
    assert collect(paper, tmp_path / "runs") == {"tiny.jsonl.gz": (2, 2)}
    file = paper.folder / "results" / "tiny.jsonl.gz"
    before = file.read_bytes()
    assert b"client_accuracy" not in gzip.decompress(before)
    # in the file's order
    assert [json.loads(line)["seconds"] for line in gzip.decompress(before).splitlines()] == [
        0.5,
        1.0,
    ]
    assert collect(paper, tmp_path / "runs") == {"tiny.jsonl.gz": (2, 0)}
    folder_of(made(first, [0.1, 0.2, 0.3]), tmp_path / "more" / "b")
    folder_of(made(second, [0.1]), tmp_path / "more" / "a")
    assert len(recorded(paper, tmp_path / "more")[first.digest].rounds) == 3
    assert collect(paper, tmp_path / "more") == {"tiny.jsonl.gz": (2, 1)}
    assert {len(run.rounds) for run in recorded(paper).values()} == {2, 3}
    file.unlink()
    collect(paper, tmp_path / "runs")
    assert file.read_bytes() == before


def test_results_that_cannot_be_read_are_named(paper: Paper) -> None:
    (paper.folder / "results").mkdir()
    (paper.folder / "results" / "torn.jsonl.gz").write_bytes(gzip.compress(b'{"manifest": '))
    with pytest.raises(InputError, match=r"torn\.jsonl\.gz"):
        recorded(paper)


def test_status_counts_runs_and_rounds_once_and_guesses_by_the_work_of_a_round(
    paper: Paper,
) -> None:
    runs = {
        digest: replace(run, seconds=4.0)
        for digest, run in runs_of(paper, "FedAvg", [[0.5] * 4, [0.5] * 2]).items()
    }
    tiny, everything = progress(paper, runs)
    assert replace(everything, name="tiny") == tiny
    assert (tiny.runs_done, tiny.runs_wanted, tiny.rounds_done, tiny.rounds_wanted) == (1, 8, 6, 32)
    # FedAvg took 1 and 2 s a round with 2 clients: 2 rounds more of it, 8 of FedDKD, and 16 with
    # twice the clients
    assert tiny.seconds_left == pytest.approx(2 + 8 + 2 * 16)
    slow = {
        digest: replace(run, seconds=40.0)
        for digest, run in runs_of(paper, "FedDKD", [[0.5] * 4]).items()
    }
    # 10 s a round of FedDKD: 4 rounds more of it and 8 with twice the clients; FedAvg as before
    assert progress(paper, runs | slow)[0].seconds_left == pytest.approx(
        2 + 2 * 8 + 10 * (4 + 2 * 8)
    )
    nothing = progress(paper, {})[0]
    assert (nothing.seconds_left, nothing.runs_of_unknown_cost) == (None, 8)


def test_of_a_table_of_first_parts_alone_no_more_rounds_are_wanted_than_count(paper: Paper) -> None:
    tiny = paper.table("tiny")
    short = replace(tiny, name="short", methods={"FedDKD@2": tiny.methods["FedDKD@2"]})
    runs = runs_of(paper, "FedDKD", [[0.5] * 3, [0.5]])
    first, both = (
        progress(replace(paper, tables={"short": short}), runs),
        progress(replace(paper, tables={"short": short, "tiny": tiny}), runs),
    )
    assert (
        first[0].runs_done,
        first[0].runs_wanted,
        first[0].rounds_done,
        first[0].rounds_wanted,
    ) == (1, 4, 3, 8)
    assert both[-1].rounds_wanted == both[1].rounds_wanted == 32


# Figures

DRAWN = """
[curves]
title = "Accuracy for communications"
table = "tiny"
x = "communications"
column = "test_accuracy"
scale = 100
label = "test accuracy in %"
up_to = 4
panels = { half = { setting = "c=0.5" }, all = { setting = "c=1" } }

[loss]
title = "A client's training loss"
table = "tiny"
x = "round"
column = "diagnostics.global_loss"
label = "loss"
panels = { first = { setting = "c=0.5", of = [0] } }
"""


@pytest.fixture
def drawn(paper: Paper) -> Paper:
    (paper.folder / "figures.toml").write_text(DRAWN, encoding="utf-8")
    (paper.folder / "tiny.toml").write_text("diagnostics = true\n" + TINY, encoding="utf-8")
    return read(paper.folder)


def test_a_figure_shows_what_there_is_up_to_the_common_cost_and_says_what_is_missing(
    drawn: Paper,
) -> None:
    figure = figures(drawn)["curves"]
    runs = runs_of(drawn, "FedAvg", [[0.1, 0.2], [0.2, 0.3, 0.4]]) | runs_of(
        drawn, "FedDKD", [[0.5]]
    )
    half, whole = (curves(drawn, figure, panel, runs) for panel in figure.panels.values())
    assert [(one.method, one.missing) for one in half] == [
        ("FedAvg", ""),
        ("FedDKD", "1 of 2 seeds, 1 of 4 rounds"),
    ]
    # the third round costs too much
    assert half[0].seeds == [[(2, 10.0), (4, 20.0)], [(2, 20.0), (4, 30.0)]]
    assert [(one.seeds, one.missing) for one in whole] == [([], "nothing yet")] * 2


def test_runs_without_the_losses_that_a_figure_draws_are_made_again_and_kept(
    drawn: Paper,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = ("--papers", drawn.folder, "--runs", tmp_path / "runs")
    one = drawn.behind(drawn.table("tiny"), "c=0.5", "FedAvg")[0]
    execute([replace(one, diagnostics=False)], out=tmp_path / "runs", engine="serial")
    part = (
        "run",
        "loss",
        "--method",
        "FedAvg",
        "--seed",
        "0",
        "--engine",
        "serial",
        "--json",
        *where,
    )
    assert (
        len(
            json.loads(call(*part, capsys=capsys, monkeypatch=monkeypatch).splitlines()[-1])["runs"]
        )
        == 1
    )
    assert json.loads(call(*part, capsys=capsys, monkeypatch=monkeypatch)) == {"runs": []}
    run = recorded(drawn, tmp_path / "runs")[one.digest]
    curve, _ = curves(drawn, figures(drawn)["loss"], Panel("c=0.5", [0]), {one.digest: run})
    assert curve.seeds == [
        [(row["round"], row["diagnostics"]["global_loss"][0]) for row in run.rounds]
    ]
    out = ("--out", tmp_path / "loss.png")
    call("figure", "loss", *out, *where, capsys=capsys, monkeypatch=monkeypatch)
    assert (tmp_path / "loss.png").stat().st_size > 1000


def test_the_page_has_tables_figures_and_findings_and_pictures_are_drawn_once(
    drawn: Paper,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runs = runs_of(drawn, "FedAvg", [[0.1, 0.2, 0.3, 0.4]] * 2) | runs_of(drawn, "FedDKD", [[0.5]])
    (drawn.folder / "results").mkdir()
    (drawn.folder / "results" / "tiny.jsonl.gz").write_bytes(
        gzip.compress("".join(r.line for r in runs.values()).encode())
    )
    (drawn.folder / "findings.toml").write_text(
        '[[open]]\nquestion = "Why?"\nshowed = "Because."\nkept = false\n[[open]]\nquestion ='
        ' "When?"\n[[mismatch]]\ntables = ["tiny"]\nwhat = "All of it."\nwhy = "Made up."\n'
    )

    def write() -> str:
        call(
            "report",
            "--out",
            tmp_path / "page.md",
            "--papers",
            drawn.folder,
            capsys=capsys,
            monkeypatch=monkeypatch,
        )
        written = [tmp_path / "page.md", *sorted((tmp_path / "page").glob("*.md"))]
        return "".join(path.read_text(encoding="utf-8") for path in written)

    written = write()
    # of FedDKD's cells one run is there in part
    assert "| [tiny](page/tiny.md) | 2/8 | 4 | 0 | 0 | 2 | 0 | 2 | 2 | - | - |" in written
    assert "partial, so far worse" in written
    assert "![Accuracy for communications](../pictures/curves.png)" in written
    assert "1 of 2 seeds, 1 of 4 rounds: FedDKD (half)" in written
    assert "`loss`" in written
    assert "loss.png" not in written
    assert "| Why? | Because. (*) |" in written
    assert "When?" in written
    assert "| `tiny` | All of it. | Made up. |" in written
    picture = tmp_path / "pictures" / "curves.png"
    before = picture.stat().st_mtime_ns
    assert write() == written
    assert picture.stat().st_mtime_ns == before
    picture.unlink()
    write()
    assert picture.exists()


def test_the_page_counts_the_columns_and_the_pairs_that_stand_in_the_printed_order(
    drawn: Paper,
) -> None:
    slow_and_good, quick = (
        runs_of(drawn, "FedDKD", [[0.4, 0.7, 0.7, 0.7]] * 2),
        runs_of(drawn, "FedAvg", [[0.6] * 4] * 2),
    )
    summary = pages(drawn, slow_and_good | quick, "pictures", "page")[""]
    assert "| holds in 1 of 2 whole columns, 1 of 2 pairs |" in summary


def test_the_page_counts_the_cells_that_are_unlikely_to_differ_by_chance(drawn: Paper) -> None:
    near = runs_of(drawn, "FedDKD", [[0.4, 0.7, 0.7, 0.7], [0.4, 0.71, 0.7, 0.7]])
    far = runs_of(drawn, "FedDKD", [[0.4, 0.1, 0.1, 0.1], [0.41, 0.1, 0.1, 0.1]])
    # the printed rounds to the target, and ours, have no spread
    assert "| 0 of 1 |" in pages(drawn, near, "pictures", "page")[""]
    assert "| 1 of 1 |" in pages(drawn, far, "pictures", "page")[""]


# The commands


def test_the_first_rounds_of_all_come_before_the_rest_and_lead_to_the_same_rows(
    paper: Paper,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ran(
        *arguments: Any, method: Sequence[str] = ("--method", "FedDKD"), runs: str = "runs"
    ) -> list[dict[str, Any]]:
        where = (
            "--papers",
            paper.folder,
            "--runs",
            tmp_path / runs,
            "--engine",
            "serial",
            "--json",
        )
        told = call(
            "run", "tiny", *method, *arguments, *where, capsys=capsys, monkeypatch=monkeypatch
        )
        found: list[dict[str, Any]] = json.loads(told.splitlines()[-1])["runs"]
        return found

    # both settings, both seeds
    assert [one["rounds"] for one in ran("--rounds", "2")] == [2, 2, 2, 2]
    assert ran("--rounds", "2") == []
    assert ran("--method", "FedDKD@2", method=()) == []
    half = recorded(paper, tmp_path / "runs")
    assert {len(run.rounds) for run in half.values()} == {2}
    assert [one["rounds"] for one in ran()] == [4, 4, 4, 4]
    ran(runs="at-once")
    whole, at_once = (recorded(paper, tmp_path / name) for name in ("runs", "at-once"))
    assert {digest: run.rounds for digest, run in whole.items()} == {
        digest: run.rounds for digest, run in at_once.items()
    }
    assert all(run.manifest["resumed"][0]["after"] == 2 for run in whole.values())


def test_run_does_what_is_missing_and_no_more(
    paper: Paper,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def told(*arguments: Any, status: int = 0) -> str:
        where = (
            "--papers",
            paper.folder,
            *(() if arguments[0] == "list" else ("--runs", tmp_path / "runs")),
        )
        return call(*arguments, *where, capsys=capsys, monkeypatch=monkeypatch, status=status)

    assert "tiny: A tiny table (tiny.toml)" in told("list")
    some = (
        "run",
        "tiny",
        "--setting",
        "c=0.5",
        "--method",
        "FedDKD",
        "--engine",
        "serial",
        "--json",
    )
    assert len(json.loads(told(*some, "--seed", "1").splitlines()[-1])["runs"]) == 1
    assert len(json.loads(told(*some).splitlines()[-1])["runs"]) == 1
    assert json.loads(told(*some)) == {"runs": []}
    status = json.loads(told("status", "--json"))
    assert {
        key: status["tables"][0][key]
        for key in ("name", "runs_done", "runs_wanted", "rounds_done", "rounds_wanted")
    } == {
        "name": "tiny",
        "runs_done": 2,
        "runs_wanted": 8,
        "rounds_done": 8,
        "rounds_wanted": 32,
    }
    assert "tiny: 2/8 runs, 8/32 rounds; left: about" in told("status")
    assert "tiny.jsonl.gz: 2 runs, 2 new or longer" in told("collect")
    before = json.loads(told("table", "tiny", "--format", "json"))
    told("figure", "tiny", "--out", tmp_path / "curves.svg")
    assert "<svg" in (tmp_path / "curves.svg").read_text(encoding="utf-8")
    for file in (tmp_path / "runs").rglob("*.json*"):
        file.unlink()
    assert json.loads(told("table", "tiny", "--format", "json")) == before
    assert json.loads(told(*some)) == {"runs": []}  # the committed results count


def test_run_goes_on_with_what_was_cut_short_even_in_the_middle_of_a_line(
    paper: Paper,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def cut(index: int, row: Row) -> None:
        if row["round"] == 3:
            raise KeyboardInterrupt

    one = paper.behind(paper.table("tiny"), "c=1", "FedAvg")[0]
    with pytest.raises(KeyboardInterrupt):
        execute_watched([one], out=tmp_path / "runs", engine="serial", on_row=cut, every=Every(1))
    folder = tmp_path / "runs" / folder_name(one)
    with (folder / "rounds.jsonl").open("a", encoding="utf-8") as lines:
        lines.write('{"round": 4, "te')
    part = ("--setting", "c=1", "--method", "FedAvg", "--seed", "0", "--engine", "serial")
    where = ("--papers", paper.folder, "--runs", tmp_path / "runs")
    assert "1/2   3/8" in call("table", "tiny", *where, capsys=capsys, monkeypatch=monkeypatch)
    call("run", "tiny", *part, *where, capsys=capsys, monkeypatch=monkeypatch)
    assert json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["resumed"]
    assert len(recorded(paper, tmp_path / "runs")[one.digest].rounds) == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("table", "none"), "no table 'none'; there are: tiny"),
        (
            ("table", "tiny", "--format", "pdf"),
            "unknown format 'pdf'; there are: json, latex, markdown, text",
        ),
        (
            ("run", "tiny", "--method", "FedNothing"),
            "no method 'FedNothing'; there are: FedAvg, FedDKD, FedDKD@2",
        ),
        (("run", "tiny", "--setting", "c=7"), "no setting 'c=7'"),
        (("run", "tiny", "--precision", "fp64"), "precision 'fp64'"),
        (("collect", "--runs", "nowhere"), "there is no folder nowhere"),
        (("figure", "tiny", "--out", "a.png"), "there are no runs of table 'tiny' yet"),
        (("figure", "none", "--out", "a.png"), "no table or figure 'none'; there are: tiny"),
        (("run", "tiny", "--seed", "7"), "no runs of seed 7; there are: 0, 1"),
    ],
)
def test_mistakes_are_one_line(
    paper: Paper,
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert message in call(
        *arguments, "--papers", paper.folder, capsys=capsys, monkeypatch=monkeypatch, status=2
    )


def test_without_the_papers_folder_the_error_says_where_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "--papers" in call("list", capsys=capsys, monkeypatch=monkeypatch, status=2)
    (tmp_path / "tables.toml").write_text("[t]\ntitle = 3\n")
    assert "cannot be read" in call(
        "list", "--papers", tmp_path, capsys=capsys, monkeypatch=monkeypatch, status=2
    )


def test_what_is_collected_names_neither_paths_nor_the_machines_system(
    paper: Paper, tmp_path: Path
) -> None:
    first = paper.wanted(paper.table("tiny"))[0]
    folder_of(made(first, [0.1]), tmp_path / "runs" / "a")
    (page,) = (tmp_path / "runs").rglob("manifest.json")
    spoken = [
        "/home/me/feddkd",
        "run",
        "../me/a.toml",
        "--data",
        "runs/mine",
        "--out=/home/me/runs",
        "--device",
        "cuda",
    ]
    told = {"command": spoken, "hardware": {"system": "my own kernel", "device": "cpu"}}
    page.write_text(
        json.dumps({**json.loads(page.read_text()), **told, "resumed": [{"after": 1, **told}]})
    )
    collect(paper, tmp_path / "runs")
    line = gzip.decompress((paper.folder / "results" / "tiny.jsonl.gz").read_bytes())
    assert b"/home/me" not in line
    assert b"my own kernel" not in line
    assert json.loads(line)["manifest"]["command"] == [
        "feddkd",
        "run",
        "a.toml",
        "--data",
        "DIR",
        "--out=DIR",
        "--device",
        "cuda",
    ]
    assert b'"after": 1' in line
