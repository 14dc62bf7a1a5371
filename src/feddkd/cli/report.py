"""feddkd report: a table of runs, a page about them, figures and tables for a paper."""

import json
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from feddkd.cli.console import AsJson, console, skipped
from feddkd.reports.tables import as_json as in_json
from feddkd.reports.tables import table
from feddkd.runs.record import Record, Survey, survey


def report(
    folders: Annotated[
        list[Path] | None,
        typer.Argument(metavar="DIR...", help="Folders of runs; runs/ by default."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.html", help="Write a page: one file that needs no network."),
    ] = None,
    open_: Annotated[
        bool,
        typer.Option(
            "--open", help="Show the page in a browser; without --out it is DIR/report.html."
        ),
    ] = False,
    figures: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write figures (PDF, SVG, PNG) and tables (LaTeX, Markdown) for a paper.",
        ),
    ] = None,
    figure: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Also draw the accuracy curves: .png, .svg, .pdf."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show a table of all runs under some folders: mean and standard deviation over seeds, and the
    cost of a target accuracy.

    With --out also write a page: which method is best and whether the difference is significant,
    curves against rounds, communications, local steps, bytes and time, the gain of DKD, clients,
    partition, confusion matrix, and provenance.
    """
    folders = folders or [Path("runs")]
    records, errors = together(folders)
    console(stderr=as_json).print(table(records))
    if figure is not None:
        from feddkd.reports.curve_plot import curves

        curves(records, figure)
    if figures is not None:
        from feddkd.reports.figures import write_figures

        write_figures(records, figures)
    page = out or (folders[0] / "report.html" if open_ else None)
    if page is not None:
        write_page(records, page, open_)
    if as_json:
        print(json.dumps(in_json(records)))
    skipped(errors)


def write_page(records: list[Record], page: Path, open_: bool) -> None:
    """Write the page about some runs, and show it in a browser if asked to."""
    from feddkd.reports.html.page import write

    write(records, page)
    console(stderr=True).print(f"page written to {page}", soft_wrap=True)
    if open_:
        webbrowser.open(page.resolve().as_uri())


def together(folders: list[Path]) -> Survey:
    """Return the runs under some folders, each once, and the errors of those that are damaged."""
    found = [survey(folder, weights=True) for folder in folders]
    records = {record.folder.resolve(): record for one in found for record in one.records}
    errors = {str(error): error for one in found for error in one.errors}
    if errors and not records:
        raise next(iter(errors.values()))
    return Survey(list(records.values()), list(errors.values()))
