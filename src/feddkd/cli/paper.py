"""feddkd paper: the paper's tables beside our records; run what is missing."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from feddkd.cli.console import AsJson, command_group
from feddkd.cli.paper_folders import Papers, paper_new, paper_verify
from feddkd.cli.run_options import RunOptions, with_options
from feddkd.cli.start_runs import run_all
from feddkd.errors import InputError, choices, unknown
from feddkd.experiment import Experiment
from feddkd.papers.comparison import compare
from feddkd.papers.definitions import Definition, Paper, read
from feddkd.papers.drawing import draw_all, draw_figure, paper_curves
from feddkd.papers.figures import Figure, figures, find, missing, place
from feddkd.papers.report import pages
from feddkd.papers.results import collect, foreign_runs, recorded
from feddkd.papers.status import Progress, progress
from feddkd.papers.tables import FORMATS, as_json

paper_app = command_group("The paper's tables beside our records; run what is missing.")

RunsDir = Annotated[
    Path,
    typer.Option(
        "--runs", metavar="DIR", help="Run folders that count in addition to the committed results."
    ),
]
Name = Annotated[
    str, typer.Argument(metavar="NAME", help="A table; `feddkd paper list` shows them.")
]
TableOrFigure = Annotated[
    str, typer.Argument(metavar="NAME", help="A table or a figure; `feddkd paper list` shows them.")
]
PAPERS, RUNS = Path("papers/feddkd"), Path("runs/paper")
paper_app.command("verify")(paper_verify)
paper_app.command("new")(paper_new)


@paper_app.command("list")
def paper_list(papers: Papers = PAPERS) -> None:
    """List the paper's tables with their files of experiments, and its figures with the tables
    whose runs they show.
    """
    paper = read(papers)
    for name, table in paper.tables.items():
        files = dict.fromkeys(setting.file for setting in table.settings.values())
        print(f"{name}: {table.title} ({', '.join(files)})")
    for name, figure in figures(paper).items():
        print(f"{name}: {figure.title} ({figure.table})")


@paper_app.command("status")
def paper_status(papers: Papers = PAPERS, runs: RunsDir = RUNS, as_json: AsJson = False) -> None:
    """Show how much of each table has been run, and about how many seconds the rest would take on
    the machine of the records.
    """
    paper = read(papers)
    *tables, everything = progress(paper, recorded(paper, runs))
    if as_json:
        print(
            json.dumps({"tables": [asdict(table) for table in tables], "all": asdict(everything)})
        )
        return
    for table in (*tables, everything):
        print(_line(table))


def _line(table: Progress) -> str:
    """Return the line of a table."""
    runs = f"{table.runs_done}/{table.runs_wanted} runs"
    done = f"{table.name}: {runs}, {table.rounds_done}/{table.rounds_wanted} rounds"
    if table.runs_done == table.runs_wanted:
        return f"{done}; all there"
    left = [] if table.seconds_left is None else [f"about {table.seconds_left:,.0f} s"]
    if table.runs_of_unknown_cost:
        left.append(f"{table.runs_of_unknown_cost} runs of unknown cost")
    return f"{done}; left: {' and '.join(left)}"


@paper_app.command("table")
def paper_table(
    name: Name,
    format_: Annotated[
        str, typer.Option("--format", help="text, markdown, latex or json.")
    ] = "text",
    papers: Papers = PAPERS,
    runs: RunsDir = RUNS,
) -> None:
    """Show a table: the printed cell, ours, the difference, our runs and rounds, a verdict; then
    the order of the methods, and tests.

    A mean lies "within the printed spread" if its distance from the printed mean is at most the
    printed standard deviation. A cell with fewer runs or rounds than the paper's is called partial.
    p is the probability that two means of one experiment differ by chance at least as much (Welch's
    t-test); it is there if the printed number of runs is known.
    """
    if format_ not in (*FORMATS, "json"):
        raise unknown(f"unknown format {format_!r}", format_, (*FORMATS, "json"))
    paper = read(papers)
    found = compare(paper, name, recorded(paper, runs))
    print(json.dumps(as_json(found)) if format_ == "json" else FORMATS[format_](found).rstrip())


@paper_app.command("figure")
def paper_figure(
    name: TableOrFigure,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to draw: .png, .svg, .pdf.")],
    papers: Papers = PAPERS,
    runs: RunsDir = RUNS,
) -> None:
    """Draw a figure of the paper from the runs that exist; its legends say which are missing.

    For a table, draw the curves of its runs: test accuracy against rounds, communications and local
    steps, for each setting.
    """
    paper = read(papers)
    found = find(paper, name)
    if isinstance(found, Figure):
        draw_figure(paper, found, recorded(paper, runs), out)
    else:
        paper_curves(paper, name, recorded(paper, runs), out)


@paper_app.command("report")
def paper_report(
    out: Annotated[Path, typer.Option(metavar="FILE", help="The summary to write.")] = Path(
        "docs/reproduction.md"
    ),
    pictures: Annotated[
        str, typer.Option(metavar="NAME", help="Folder for the pictures, next to the summary.")
    ] = "pictures",
    papers: Papers = PAPERS,
) -> None:
    """Write a summary, and in a folder beside it a page for each table, from the committed results:
    verdicts, missing runs, and differences from the paper.
    """
    paper = read(papers)
    runs = recorded(paper)
    (out.parent / pictures).mkdir(parents=True, exist_ok=True)
    drawn = draw_all(paper, runs, out.parent / pictures)
    folder = out.with_suffix("")
    written = pages(paper, runs, pictures, folder.name)
    folder.mkdir(exist_ok=True)
    for name, text in written.items():
        path = folder / f"{name}.md" if name else out
        path.write_text(text, encoding="utf-8")
    print(f"written to {out} and {folder}: {len(written)} pages, {len(drawn)} pictures")


@paper_app.command("run")
@with_options(RunOptions)
def paper_run(
    name: TableOrFigure,
    options: RunOptions,
    setting: Annotated[
        list[str] | None, typer.Option(help="Only this column, as in c=0.5,E=5; repeatable.")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(help="Only this method, by its name in the table; repeatable."),
    ] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Only this seed; repeatable.")] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Only the first N rounds for now; continue later."),
    ] = None,
    papers: Papers = PAPERS,
    runs: RunsDir = RUNS,
) -> None:
    """Run the missing runs of a table or figure, in lock-step over seeds; continue unfinished runs
    in the folder of runs.

    Complete runs among the committed results are not run again, nor runs that could not go on. The
    results keep only the rows of an incomplete run: without its folder it starts from the
    beginning. If only methods like FedDKD@60 are wanted, runs stop at the last round that counts.
    Runs without the losses that a figure draws are repeated, under diagnostics/ in the folder.
    """
    if options.precision == "fp64":
        raise InputError(
            "precision 'fp64' changes the paper's experiments; there are: bf16, fp32, tf32"
        )
    paper = read(papers)
    known = recorded(paper, runs)
    found = find(paper, name)
    wanted = _of_seeds(seed, _wanted(paper, found, setting, method))
    until = rounds if rounds or isinstance(found, Figure) else found.most(method)
    todo = missing(found, wanted, known, until)
    if not todo:
        print(json.dumps({"runs": []}) if options.as_json else f"{name}: nothing is missing")
        return
    run_all(todo, [place(found, one, known, runs) for one in todo], options, until=until)


def _wanted(
    paper: Paper, found: Figure | Definition, settings: list[str] | None, methods: list[str] | None
) -> list[Experiment]:
    """Return the experiments of a table or figure, or of some of its settings and methods."""
    if isinstance(found, Figure):
        shown = list(dict.fromkeys(panel.setting for panel in found.panels.values()))
        return paper.wanted(paper.table(found.table), settings or shown, methods)
    return paper.wanted(found, settings, methods)


def _of_seeds(seeds: list[int] | None, experiments: list[Experiment]) -> list[Experiment]:
    there = {experiment.seed for experiment in experiments}
    for seed in seeds or ():
        if seed not in there:
            raise InputError(
                f"there are no runs of seed {seed}; there are: {choices(map(str, there))}"
            )
    return [experiment for experiment in experiments if experiment.seed in (seeds or there)]


@paper_app.command("collect")
def paper_collect(papers: Papers = PAPERS, runs: RunsDir = RUNS) -> None:
    """Add run folders to the paper's results, in compact form; of two runs of one experiment keep
    the longer one.
    """
    if not runs.is_dir():
        raise InputError(f"there is no folder {runs}")
    paper = read(papers)
    for file, (count, news) in collect(paper, runs).items():
        if count:
            print(f"{file}: {count} runs, {news} new or longer")
    if others := foreign_runs(paper, runs):
        print(f"{others} runs belong to none of the paper's files and were left out")
