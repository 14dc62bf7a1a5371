"""docs/when-dkd-helps.md: its tables are those of the records, and its claims hold in them."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest

from feddkd.papers.comparison import Comparison, compare
from feddkd.papers.definitions import read
from feddkd.papers.results import recorded
from feddkd.reports.statistics import Paired, holm, paired
from feddkd.runs.run_costs import run_costs

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = ROOT / "tools" / "measure" / "controls.py"
    spec = importlib.util.spec_from_file_location("controls_page", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_what_the_records_say(script: ModuleType) -> None:
    assert script.PAGE.read_text(encoding="utf-8") == script.page(), "run tools/measure/controls.py"


@pytest.mark.parametrize("file", ["demo.toml", "dirichlet.toml"])
def test_the_operations_come_out_again(script: ModuleType, file: str) -> None:
    kept = json.loads(script.COSTS.read_text(encoding="utf-8"))[file]
    experiments = {one.name: one for one in read(script.FOLDER).experiments[file] if not one.seed}
    for name in ("fedavg | dkd", "fedavg, equal compute"):
        assert run_costs(experiments[name], None).operations == kept[name]["operations"]


def found(name: str) -> Comparison:
    paper = read(ROOT / "papers" / "controls")
    return compare(paper, name, recorded(paper))


def against(name: str) -> dict[str, tuple[Paired, float]]:
    """Return the tests of FedDKD against each control, with p corrected by Holm's method."""
    known = [(cell.place.method, test) for cell, test in found(name).tests if test.t_p is not None]
    chances = holm([test.t_p for _, test in known if test.t_p is not None])
    return {
        method.partition(", ")[2]: (test, p)
        for (method, test), p in zip(known, chances, strict=True)
    }


@pytest.mark.parametrize("name", ["demo", "dirichlet"])
def test_on_the_digits_the_lead_is_that_of_averaging_more_often(name: str) -> None:
    by_control = against(name)
    for control in ("equal rounds", "equal local steps", "equal compute", "shuffled teachers"):
        test, p = by_control[control]
        assert test.difference.mean > 0
        assert p < 0.05
    for control in ("labels in the teachers' place", "equal communications and local steps"):
        test, p = by_control[control]
        assert abs(test.difference.mean) < 1
        assert p > 0.05
    means = {
        (cell.place.method, cell.place.quantity): cell.ours[0]
        for cell in found(name).cells
        if cell.ours is not None
    }
    lead, short = "fedavg | dkd", "fedavg, equal communications and local steps"
    assert means[short, "final"] > means[lead, "final"]
    for cost in ("comm_to_target", "steps_to_target"):
        assert means[short, cost] < means[lead, cost] / 2


@pytest.mark.parametrize("name", ["demo", "dirichlet"])
def test_every_rule_is_ahead_of_averaging_and_none_of_a_constant_gamma(
    script: ModuleType, name: str
) -> None:
    found = script.rules(name, recorded(read(ROOT / "papers" / "controls")))
    plain, constant = found.pop(script.PLAIN), found.pop(script.CONSTANT)
    assert len(found) == 4
    for of in found.values():
        ahead = paired(script.scores(of, -1), script.scores(plain, -1))
        assert ahead is not None
        assert ahead.difference.n == 10
        assert ahead.difference.low is not None
        assert ahead.difference.low > 0
        behind = paired(script.scores(of, None), script.scores(constant, None))
        assert behind is not None
        assert behind.difference.mean < 0


def test_on_emnist_labels_lose_and_short_rounds_stay_behind() -> None:
    ours = {c.place.method: c.by_seed for c in found("emnist").cells if c.quantity.at != "last"}
    lead = ours["fedavg | local_bn | dkd"]
    labels = ours["fedavg | local_bn | dkd, labels in the teachers' place"]
    short = ours["fedavg | local_bn, equal communications and local steps"]
    assert all(labels[seed] < lead[seed] - 10 for seed in labels)
    assert all(short[seed] < lead[seed] for seed in short)
    assert min(len(labels), len(short)) >= 2
