"""feddkd demo: compare FedAvg, FedProx, FedDKD and two controls on handwritten digits."""

from pathlib import Path
from typing import Annotated

import typer

from feddkd.cli.console import console
from feddkd.cli.report import together, write_page
from feddkd.cli.run_options import RunOptions
from feddkd.cli.start_runs import run_all
from feddkd.experiment import load

EXPERIMENT = Path(__file__).with_name("demo.toml")


def demo(
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Where run folders and the report are written.")
    ] = Path("runs/demo"),
    open_: Annotated[bool, typer.Option("--open", help="Show the report in a browser.")] = False,
) -> None:
    """Compare FedAvg, FedProx, FedDKD and two controls on handwritten digits, in a minute.

    Fifteen runs are written to DIR, and the report to DIR/report.html.
    """
    experiments = load(EXPERIMENT)
    run_all(experiments, [out] * len(experiments), RunOptions(threads=1))
    write_page(together([out]).records, out / "report.html", open_)
    console(stderr=True).print(f"the experiment is {EXPERIMENT}", soft_wrap=True)
