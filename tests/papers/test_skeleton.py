"""The skeleton of a paper's folder works without a change."""

import json
from pathlib import Path

import pytest

from commandline import Feddkd


def test_a_new_paper_can_be_run_and_compared_at_once(feddkd: Feddkd) -> None:
    done = feddkd("paper", "new", "mine")
    assert done.status == 0
    place = ("--papers", "papers/mine")
    assert "first.toml" in feddkd("paper", "list", *place).out
    only = ("--method", "FedDKD", "--seed", "1", "--rounds", "1")
    run = ("paper", "run", "first", *place, "--runs", "runs/mine", *only, "--engine", "serial")
    assert feddkd(*run).status == 0
    assert feddkd("paper", "collect", *place, "--runs", "runs/mine").status == 0
    shown = json.loads(feddkd("paper", "table", "first", "--format", "json", *place).out)
    (cell,) = [c for c in shown["cells"] if c["ours"] and c["quantity"] == "accuracy"]
    assert (cell["method"], cell["runs"], cell["rounds"], cell["printed"]) == ("FedDKD", 1, 1, None)
    published = Path("papers/mine/published.csv")
    published.write_text(published.read_text() + "first,FedDKD,digits,accuracy,1.00,0.50,3,\n")
    told = feddkd("paper", "report", *place, "--out", "papers/mine/report.md")
    assert told.status == 0
    assert "partial" in Path("papers/mine/report/first.md").read_text()


@pytest.mark.parametrize("name", ["mine", "../mine", "a b", ""])
def test_a_folder_that_is_there_or_a_strange_name_is_refused(feddkd: Feddkd, name: str) -> None:
    Path("papers/mine").mkdir(parents=True)
    done = feddkd("paper", "new", name)
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert list(Path("papers").iterdir()) == [Path("papers/mine")]
