"""`feddkd methods` and docs/methods are complete and agree with the methods."""

import json
import re
import sys
from pathlib import Path

import pytest

from feddkd import METHODS, parse
from feddkd.cli.app import main
from feddkd.method import Method
from feddkd.method_docs.entries import Entry
from feddkd.method_docs.markdown import pages
from feddkd.method_docs.metadata import _paper, entries, entry, is_piece
from feddkd.methods.local import Local, Variant, local_training

DOCS = Path(__file__).parents[2] / "docs" / "methods"
OWN = [one for one in entries() if one.own]


@pytest.mark.parametrize("one", OWN, ids=lambda one: one.name)
def test_every_method_names_its_paper_and_says_in_a_line_what_it_does(one: Entry) -> None:
    assert one.paper is not None, (
        'its module must begin with: Name: authors, "title", venue, arXiv:1234.56789'
    )
    assert all((one.paper.name, one.paper.authors, one.paper.title))
    assert (METHODS[one.name].__doc__ or "").split() == one.summary.split() != []
    # local_bn only says what stays at home, quantise how uploads travel
    assert one.turns or one.private != "none" or METHODS[one.name]().codec is not None


@pytest.mark.parametrize("one", OWN, ids=lambda one: one.name)
def test_every_page_tells_all_options_and_phases(one: Entry) -> None:
    text = pages([one])[f"{one.name}.md"]
    assert all(
        f"| `{key}` | `{value!r}` |" in text for key, value in METHODS.options(one.name).items()
    )
    assert all(f"\n| {phase.name} |" in text for phase in METHODS[one.name]().phases)
    assert one.paper is not None
    assert one.paper.link in text


def test_a_paper_without_an_arxiv_number_has_a_doi() -> None:
    paper = _paper(
        'FedED: Sui, Chen, "FedED: federated\nlearning", EMNLP'
        " 2020,\ndoi:10.18653/v1/2020.emnlp-main.165.\n\nMore."
    )
    assert (
        str(paper)
        == 'Sui, Chen, "FedED: federated learning", EMNLP 2020, doi:10.18653/v1/2020.emnlp-main.165'
    )
    assert paper is not None
    assert paper.link == "https://doi.org/10.18653/v1/2020.emnlp-main.165"


def test_the_committed_pages_are_up_to_date() -> None:
    expected = pages(OWN)
    committed = {
        path.name: path.read_text(encoding="utf-8")
        for path in DOCS.glob("*.md")
        if path.name != "table.md"
    }
    assert set(committed) == set(expected), (
        "run `make methods-docs` and remove the pages of methods that are no more"
    )
    assert [name for name in expected if committed[name] != expected[name]] == [], (
        "run `make methods-docs`"
    )


def test_what_travels_is_read_off_the_phases() -> None:
    (local,), (distil,) = entry("fedavg").turns, entry("dkd").turns
    assert (local.who, local.times, local.sends) == (
        "clients",
        "1",
        ("params", "buffers", "rate lr"),
    )
    assert local.uploads == {"params": "mean by examples", "buffers": "mean by examples"}
    assert (distil.times, distil.uploads, distil.needs) == (
        "10",
        {"gradient": "mean by clients"},
        ("model",),
    )
    assert entry("fedavg").keeps == []
    assert entry("fedbn").keeps == ["batch-norm layers"]


def test_options_of_local_training_are_told_from_a_methods_own() -> None:
    assert {setting.name for setting in entry("fedprox").settings if not setting.shared} == {
        "mu",
        "form",
    }
    assert {setting.name for setting in entry("fedbn").settings if not setting.shared} == {
        "private"
    }
    takes = {
        setting.name: setting.takes
        for setting in (*entry("dkd").settings, *entry("fedavg").settings)
    }
    assert takes["steps"] == "whole number >= 1 or None"
    assert takes["divergence"] == "'kl', 'reverse_kl', 'squared'"


def test_a_method_whose_models_stay_private_sends_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METHODS, "_factories", dict(METHODS._factories))

    @METHODS.register
    def hermits(local: Local) -> Method:
        """Everybody for himself."""
        return local_training(local, Variant(private="model"))

    assert (entry("hermits").sends, entry("hermits").uploads, entry("hermits").keeps) == (
        ["rate lr"],
        [],
        ["its whole model"],
    )


@pytest.mark.parametrize(
    ("text", "piece"), [("dkd()", True), ("fedavg()", False), ("fedavg() | dkd()", False)]
)
def test_a_piece_is_what_cannot_stand_by_itself(text: str, piece: bool) -> None:
    assert is_piece(METHODS["dkd"]() if text == "dkd()" else parse(text)) == piece


def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["feddkd", "methods", *arguments])
    with pytest.raises(SystemExit) as caught:
        main()
    assert not caught.value.code
    return capsys.readouterr().out


def test_the_list_and_the_json_object_tell_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = " ".join(re.sub("[│┃]", " ", call(monkeypatch, capsys)).split())
    for method in json.loads(call(monkeypatch, capsys, "--json"))["methods"]:
        assert f"{method['name']} {method['summary']}" in text
        assert method["paper"]["title"] in text
        assert set(method) >= {"options", "sends", "uploads", "keeps", "phases", "text", "behind"}
    assert "options of local training: epochs=5" in text


def test_one_method_is_shown_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = call(monkeypatch, capsys, "dkd")
    assert max(map(len, text.splitlines())) <= 80
    for told in (
        "Applied Intelligence",
        "Departures from the paper",
        "reverse_kl",
        "phase 'distil'",
        "clients upload: gradient",
    ):
        assert told in text
    assert "fedprox" not in text


def test_pages_of_a_method_are_written_where_asked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert call(monkeypatch, capsys, "fedavg", "--markdown", str(tmp_path / "new")) == ""
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"README.md", "fedavg.md"}


def test_the_table_of_other_libraries_names_methods_that_there_are() -> None:
    text = (DOCS.parent / "methods-of-others.md").read_text(encoding="utf-8")
    here, missing = text.split("## Not here")
    named = re.findall(r"`(\w+)(?:\([^`]*\))?`", here + missing)
    assert {name for name in named if name not in METHODS} == set()
    assert len(set(named)) > 40


def test_the_readme_counts_the_methods() -> None:
    text = (DOCS.parents[1] / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"All (\d+) methods", text) == [str(len(OWN))]
