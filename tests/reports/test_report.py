"""Tests of feddkd report, ls and compare: tables in every format, figures, the command line."""

import json
import re
import shutil
import sys
import webbrowser
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from feddkd.cli.app import main
from feddkd.errors import InputError
from feddkd.reports.figures import write_figures
from feddkd.reports.formats import aligned, piped, tabular
from feddkd.reports.tables import as_json, grid
from feddkd.runs.record import find
from made_up import make

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods on three seeds, made up."""
    out = tmp_path_factory.mktemp("runs")
    make(out, methods=2, seeds=3, rounds=60)
    return out


@pytest.fixture
def feddkd(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Command:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["feddkd", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        return int(caught.value.code or 0), *capfd.readouterr()

    return call


# --- grids


def test_a_grid_says_the_same_in_every_form_whatever_signs_a_name_holds() -> None:
    headings, lines = ["method", "best"], [["a | b_c & 100 % {x} \\", "1 ± 2"]]
    assert aligned(headings, lines).splitlines()[2] == "a | b_c & 100 % {x} \\  1 ± 2"
    assert piped(headings, lines).splitlines()[2] == r"| a \| b_c & 100 % {x} \ | 1 ± 2 |"
    assert r"a \textbar{} b\_c \& 100 \% \{x\} \textbackslash{} & 1 $\pm$ 2 \\" in tabular(
        headings, lines
    )


# --- report


def test_json_tells_the_numbers_of_the_table(runs: Path) -> None:
    records = find(runs)
    told, (_, lines) = as_json(records), grid(records)
    assert told["target"] == 0.8
    for method, line in zip(told["methods"], lines, strict=True):
        best = method["test_accuracy"]["best"]
        assert line[:2] == [method["method"], f"{100 * best['mean']:.2f}±{100 * best['std']:.2f}"]
        assert (best["n"], method["seeds"]) == (3, [0, 1, 2])


def test_several_folders_make_one_report_and_a_run_counts_once(feddkd: Command, runs: Path) -> None:
    folders = sorted(path for path in runs.iterdir() if path.is_dir())
    whole, parts = feddkd("report", runs, "--json"), feddkd("report", *folders, runs, "--json")
    assert json.loads(whole[1]) == json.loads(parts[1])


def test_out_writes_the_page_and_says_where(feddkd: Command, runs: Path) -> None:
    status, out, err = feddkd("report", runs, "--out", "page.html")
    assert (status, err) == (0, "page written to page.html\n")
    assert "±" in out
    assert Path("page.html").read_text().startswith("<!doctype html>")


def test_open_shows_the_page_in_a_browser(
    feddkd: Command, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    assert feddkd("report", runs, "--open", "--out", "page.html")[0] == 0
    assert opened == [Path("page.html").resolve().as_uri()]


# --- figures for papers


def test_figures_for_a_paper_are_as_wide_as_a_column_with_their_fonts_inside(
    runs: Path, tmp_path: Path
) -> None:
    written = write_figures(
        [record for record in find(runs) if "dkd" in record.label], tmp_path / "figures"
    )
    names = {path.name for path in written}
    for name in ("accuracy-round", "accuracy-seconds", "gain", "l2", "partition", "confusion-0"):
        assert {f"{name}.{ending}" for ending in ("pdf", "svg", "png")} <= names
    assert names == {path.name for path in (tmp_path / "figures").iterdir()}
    for path in written:
        if path.suffix == ".pdf":
            content = path.read_bytes()
            assert b"/FontFile2" in content, path  # TrueType, embedded
            assert b"/Type3" not in content, path
        if path.suffix == ".png":
            with Image.open(path) as picture:
                assert picture.width == round(3.3 * 300), path
        if path.suffix == ".svg":
            # drawn as outlines: no font can be missing
            assert "<text" not in path.read_text(), path
    table = (tmp_path / "figures" / "table.tex").read_text()
    assert table.count(r"\\") == 2
    assert "\\begin{tabular}" in table


def test_figures_that_cannot_be_written_are_an_error_of_one_line(
    runs: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write figures"):
        write_figures(find(runs), tmp_path / "file")


# --- ls


def test_ls_shows_filters_and_sorts_runs(feddkd: Command, runs: Path) -> None:
    status, out, err = feddkd("ls", runs, "--where", "method=dkd", "--where", "seed=1", "--json")
    (entry,) = json.loads(out)["runs"]
    assert status == 0
    assert (entry["seed"], entry["rounds"], entry["of"], entry["state"]) == (1, 60, 60, "finished")
    assert "1 of 6 runs" in err
    sorted_ = json.loads(feddkd("ls", runs, "--sort", "best", "--json")[1])["runs"]
    assert [e["best"] for e in sorted_] == sorted((e["best"] for e in sorted_), reverse=True)
    assert "fedavg | dkd" in feddkd("ls", runs)[1]


def test_ls_knows_runs_that_are_cut_short_or_have_not_a_round_yet(
    feddkd: Command, tmp_path: Path
) -> None:
    make(tmp_path / "runs", methods=1, seeds=2, rounds=3)
    first, second = sorted((tmp_path / "runs").iterdir())
    (first / "rounds.jsonl").write_text("")
    lines = (second / "rounds.jsonl").read_text().splitlines(keepends=True)
    (second / "rounds.jsonl").write_text("".join(lines[:2]))
    (second / "lock").write_text("process 1 on there\n")
    entries = json.loads(feddkd("ls", "--json")[1])["runs"]
    assert [(e["rounds"], e["state"], e["best"] is None) for e in entries] == [
        (0, "halted", True),
        (2, "running", False),
    ]
    assert [
        e["rounds"] for e in json.loads(feddkd("ls", "--sort", "best", "--json")[1])["runs"]
    ] == [2, 0]
    assert len(json.loads(feddkd("ls", "--where", "state=running", "--json")[1])["runs"]) == 1


# --- compare


@pytest.fixture
def sides(runs: Path, tmp_path: Path) -> tuple[Path, Path]:
    for record in find(runs):
        shutil.copytree(
            record.folder, tmp_path / ("b" if "dkd" in record.label else "a") / record.folder.name
        )
    return tmp_path / "a", tmp_path / "b"


def test_compare_tells_what_differs_and_by_how_much_the_second_is_ahead(
    feddkd: Command, sides: tuple[Path, Path]
) -> None:
    status, out, _ = feddkd("compare", *sides, "--json")
    told = json.loads(out)
    assert status == 0
    assert told["differs"] == {"method": ["fedavg(lr=0.3)", "fedavg(lr=0.3) | dkd()"]}
    means = [side["best"]["mean"] for side in told["results"]]
    assert told["difference"]["best"]["difference"]["mean"] == pytest.approx(
        100 * (means[1] - means[0])
    )
    assert told["difference"]["average"] is None
    assert re.search(r"best +\S+ +\S+ +[+-]\d", feddkd("compare", *sides)[1])


def test_experiments_differ_in_what_they_mean_not_in_how_they_are_spelled(
    feddkd: Command, tmp_path: Path
) -> None:
    texts = (
        "fedavg(lr=0.1, epochs=5) | dkd(steps=10)",
        "fedavg(epochs=5, lr=0.1) | dkd()",
        "fedprox(lr=0.2) | dkd(steps=3)",
    )
    for name, text in zip("abc", texts, strict=True):
        (tmp_path / f"{name}.toml").write_text(
            f'method = "{text}"\nrounds = {7 if name == "c" else 5}\n'
        )
    assert feddkd("compare", "a.toml", "b.toml")[1] == "the same experiment, but for the seed\n"
    differs = json.loads(feddkd("compare", "a.toml", "c.toml", "--json")[1])["differs"]
    assert differs["rounds"] == [5, 7]
    assert differs["method 1, lr"] == [0.1, 0.2]
    assert differs["method 1, mu"] == [None, 0.01]
    assert differs["method 2, steps"] == [10, 3]
    assert "method 1, epochs" not in differs


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (
            "compare {runs} {runs}",
            "holds several experiments, and one is compared with one: fedavg | dkd; fedavg",
        ),
        ("compare nowhere {runs}", "there is no folder nowhere"),
        ("ls {runs} --sort size", "cannot be sorted by 'size'; there are: best"),
        (
            "ls {runs} --where mthod=dkd",
            "no key 'mthod' (did you mean 'method'?); there are: a",
        ),
        ("report {runs} --out nowhere/page.html", "cannot write the page to nowhere/page.html"),
    ],
)
def test_a_users_mistake_is_one_line(
    feddkd: Command, runs: Path, line: str, complaint: str
) -> None:
    status, _, err = feddkd(*line.format(runs=runs).split())
    assert status == 2
    assert complaint in err
    assert re.fullmatch(r"feddkd: .+\n", err)
