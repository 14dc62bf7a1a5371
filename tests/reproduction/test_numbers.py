"""Compare the numbers in README and docs with committed records.

A number without a record has a mark that says so.
"""

import importlib.util
import io
import json
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from feddkd.cli.app import main
from feddkd.experiment import load
from feddkd.papers.comparison import compare
from feddkd.papers.definitions import Paper, read
from feddkd.papers.drawing import digest, drawn_digest
from feddkd.papers.figures import figures
from feddkd.papers.report import drawable, pages, shown
from feddkd.papers.results import RecordedRun, Runs, recorded
from feddkd.reports.tables import table
from feddkd.rounds.loop import Row
from feddkd.runs.record import Record, find

ROOT = Path(__file__).parents[2]
SMALL = ROOT / "papers" / "small"
REPRODUCED = [
    ROOT / "docs" / "reproduction.md",
    *sorted((ROOT / "docs" / "reproduction").glob("*.md")),
]


# The page of the paper's tables


@pytest.fixture(scope="module")
def real() -> Paper:
    return read(ROOT / "papers" / "feddkd")


@pytest.fixture(scope="module")
def committed(real: Paper) -> Runs:
    return recorded(real)


def test_the_pages_of_the_reproduction_are_what_the_records_say(
    real: Paper, committed: Runs
) -> None:
    written = pages(real, committed, "pictures", "reproduction")
    kept = {path.stem: path.read_text(encoding="utf-8") for path in REPRODUCED}
    assert kept.pop("reproduction") == written.pop(""), "run `make reproduction`"
    assert kept == written, "run `make reproduction`"


def test_the_pictures_show_the_records(real: Paper, committed: Runs) -> None:
    for name, figure in figures(real).items():
        panels, path = shown(real, figure, committed), ROOT / "docs" / "pictures" / f"{name}.png"
        assert drawn_digest(path) == (digest(panels) if drawable(panels) else None), (
            "run `make reproduction`"
        )


def test_every_question_that_the_paper_leaves_open_is_on_the_page(real: Paper) -> None:
    text = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")
    rows = [
        line
        for line in text.partition("\n## What the methods' own")[0].splitlines()
        if line.startswith("| ")
    ]
    questions = [row.split(" | ")[0].removeprefix("| ") for row in rows[1:]]
    kept = (ROOT / "docs" / "reproduction" / "open.md").read_text(encoding="utf-8")
    assert len(questions) > 20
    assert [one for one in questions if one not in kept] == []


def reproduced(mean: str) -> bool:
    """Return whether a mean and its spread are on a page of the reproduction.

    A star behind a number there refers to a note.
    """
    text = "".join(path.read_text(encoding="utf-8") for path in REPRODUCED)
    return f"| {mean} |" in text.replace("* |", " |")


def test_means_in_the_papers_readme_are_those_of_the_page() -> None:
    means = re.findall(
        r"\d[\d.]* ± [\d.]*\d",
        (ROOT / "papers" / "feddkd" / "README.md").read_text(encoding="utf-8"),
    )
    assert len(means) > 40
    assert [mean for mean in means if not reproduced(mean)] == []


# Short runs, made again


def as_record(run: RecordedRun) -> Record:
    return Record(Path(), dict(run.manifest), run.rounds, [run.seconds])


@pytest.mark.parametrize(("engine", "tolerance"), [("serial", 1e-12), ("batched", 1e-9)])
def test_short_results_come_out_again_from_their_recorded_command(
    engine: str, tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accuracies, costs and cohorts are the recorded ones. So are losses, to 1e-12 on the recorded
    engine (another processor may round differently) and to 1e-9 on another engine.
    """
    kept = [run for run in recorded(read(SMALL)).values() if run.experiment.rounds == 4]
    (spoken,) = {" ".join(run.manifest["command"]) for run in kept}
    assert "--engine serial" in spoken
    assert len(kept) == 2
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(
        sys, "argv", spoken.replace("DIR", str(tmp_path)).replace("serial", engine).split()
    )
    with pytest.raises(SystemExit) as left:
        main()
    assert not left.value.code
    found = {record.manifest["digest"]: record.history for record in find(tmp_path)}
    for run in kept:
        assert [without_losses(row) for row in found[run.manifest["digest"]]] == [
            without_losses(row) for row in run.rounds
        ]
        assert losses(found[run.manifest["digest"]]) == pytest.approx(
            losses(run.rounds), rel=tolerance
        )


def without_losses(row: Row) -> Row:
    return {key: value for key, value in row.items() if not key.endswith("_loss")}


def losses(rows: Sequence[Row]) -> list[float]:
    return [row[key] for row in rows for key in sorted(row) if key.endswith("_loss")]


def test_readme_shows_the_demos_record() -> None:
    runs = recorded(read(SMALL))
    experiments = load(ROOT / "src" / "feddkd" / "cli" / "demo.toml")
    records = [as_record(runs[one.digest]) for one in experiments]
    drawn = io.StringIO()
    Console(width=80, file=drawn).print(table(records))
    lines = [line.rstrip() for line in drawn.getvalue().splitlines()]
    rows = [line for line in lines if re.match(r"(method|fed\w+,?) ", line)]
    assert len(rows) == 6
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [row for row in rows if row not in readme] == []


def test_the_table_of_methods_is_what_its_record_says() -> None:
    spec = importlib.util.spec_from_file_location(
        "methods_page", ROOT / "tools" / "measure" / "methods.py"
    )
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    kept = json.loads((ROOT / "docs" / "methods" / "table.json").read_text(encoding="utf-8"))
    assert (ROOT / "docs" / "methods" / "table.md").read_text(encoding="utf-8") == script.page(kept)


# Times, and everything else with a unit

# written from records; other tests compare them
WRITTEN = (
    "table.md",
    "flower-table.md",
    "federation.md",
    "tasks-table.md",
    "when-dkd-helps.md",
    "one-round.md",
    "adapters-table.md",
)
PAGES = [
    ROOT / "README.md",
    ROOT / "bench" / "README.md",
    *(
        path
        for path in sorted((ROOT / "docs").rglob("*.md"))
        if path.name not in WRITTEN and path not in REPRODUCED
    ),
]
MEASURED = re.compile(
    r"(\d+(?:\.\d+)?) (ms|us|TFLOP/s)(?![\w/])|(\d+\.\d+) (s|x|%|points)(?!\w)|(\d+)"
    r" (s|min)(?!\w)|(\d+\.\d+ ?± ?\d[\d.]*)"
)
GIVEN = {"30 s", "600 s"}  # settings, not measured: time of benchmarks, deadline on Flower
MARK, NOT_KEPT = "(*)", "not kept"


def agrees(text: str, value: float) -> bool:
    """Return whether the value, rounded, reads as this text."""
    return f"{value:.{len(text.partition('.')[2])}f}" == text


@cache
def pools() -> dict[str, dict[str, list[float]]]:
    """Return the values in the records of benchmarks: job -> unit -> values.

    Job "" has the values of all jobs, of the demo, and of exchanges on Flower.
    """
    paper = read(SMALL)
    demo = compare(paper, "demo", recorded(paper))
    means = [cell.ours[0] for cell in demo.cells if cell.ours]
    leads = [test.difference.mean for _, test in demo.tests]
    flower = json.loads((ROOT / "docs" / "flower-table.json").read_text(encoding="utf-8"))
    exchanges = [flower["plain"], *(one["exchanges"] for one in flower["federations"])]
    found: dict[str, dict[str, list[float]]] = {
        "": {"%": means, "points": leads, "s": [*map(statistics.median, exchanges)]}
    }
    for file in sorted((ROOT / "bench" / "results").glob("*.json")):
        for job in json.loads(file.read_text(encoding="utf-8"))["jobs"]:
            for name in ("", job["job"]):
                pool = found.setdefault(name, {})
                for unit, values in units(job).items():
                    pool.setdefault(unit, []).extend(values)
    return found


def units(job: dict[str, Any]) -> dict[str, list[float]]:
    times = [job[key] for key in ("seconds", "loop_seconds")]
    rounds = [value * job["steps"] for value in times]
    return {
        "ms": [1000 * value for value in times],
        "s": [*times, *rounds, job["first_seconds"]],
        "TFLOP/s": [job["tflops"]],
        "x": [job["ratio"], job["figure"]],
    }


def passages(text: str) -> Iterator[tuple[str, str]]:
    """Yield (job, passage) for paragraphs and cells of tables; the job of a cell is the first word
    of its row.

    Code, the aims in a table, and sections whose first paragraph says that records were not kept
    are left out.
    """
    for section in re.split(r"\n(?=#)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        paragraphs = section.split("\n\n")
        if NOT_KEPT in " ".join(paragraphs[1:2]):
            continue
        for paragraph in paragraphs:
            rows = [line for line in paragraph.splitlines() if line.startswith("|")]
            if rows:
                yield from cells_of(rows)
            else:
                yield "", paragraph


def cells_of(rows: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (job, cell) for the cells of a table, except its aims."""
    headings = [cell.strip() for cell in rows[0].split("|")]
    for row in rows:
        cells = row.split("|")
        job = re.split(r"\W*[, ]", cells[1].strip())[0]
        for heading, cell in zip_longest(headings, cells):
            if cell is not None and heading not in ("aimed at", "figure"):
                yield job, cell


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_measured_number_is_in_a_record_or_marked(path: Path) -> None:
    known = pools()
    for job, passage in passages(path.read_text(encoding="utf-8")):
        pool = known.get(job, known[""])
        for found in MEASURED.finditer(re.sub(r"`[^`]*`", "", passage)):
            number, unit = ([part for part in found.groups() if part] + [""])[:2]
            measured = any(agrees(number, value) for value in pool.get(unit, []))
            assert measured or reproduced(number) or MARK in passage or found[0] in GIVEN, (
                f"{found[0]!r} is in no record; mark it {MARK}: {passage}"
            )


def test_ratios_of_the_benchmarks_are_those_of_the_records() -> None:
    """Ratios have no unit. If our time is marked, the ratio is that of the two times beside it."""
    known = pools()
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    lines = text.partition("\n## Precision")[0].splitlines()
    rows = [line.split("|")[1:-1] for line in lines if re.match(r"\| [\w-]+, .*\d", line)]
    assert len(rows) == 9
    for row in rows:
        job, ratio = row[0].split(",")[0].strip(), row[-2].strip()
        if MARK in row[1]:
            ours, loop = (float(cell.split()[0]) for cell in (row[1], row[3]))
            assert float(ratio) == pytest.approx(loop / ours, rel=0.05)
        else:
            assert any(agrees(ratio, value) for value in known[job]["x"]), row
