"""The report of the demo as people see it, into docs/pictures: `make screenshots`."""

import io
import sys
from pathlib import Path

from PIL import Image

from browser import MISSING, Page, chromium, found
from feddkd.experiment import load
from feddkd.reports.html.page import write
from feddkd.runs.record import find
from feddkd.runs.runner import execute, lock_step

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
RUNS = ROOT / "runs" / "screenshots"
LARGEST = 200_000  # bytes of a picture


def run() -> None:
    """The demo with the theory's quantities logged; what is there already is not run again."""
    experiments = load(ROOT / "src" / "feddkd" / "cli" / "demo.toml", ["diagnostics=true"])
    for group in lock_step(experiments, [RUNS] * len(experiments)):
        execute([experiments[at] for at in group], out=RUNS)


def keep(name: str, picture: bytes) -> None:
    path = PICTURES / f"report-{name}.png"
    Image.open(io.BytesIO(picture)).convert("RGB").save(path, optimize=True)
    assert path.stat().st_size < LARGEST, f"{path} has become too large"


def shoot(page: Page, report: Path) -> None:
    page.look(width=1100, height=1160).open(report)
    keep("light", page.picture())
    page.look(width=1100, height=980, dark=True).settle()
    page.run("document.querySelector('#partition').parentElement.scrollIntoView()")
    keep("dark", page.picture())
    page.look(width=390, height=844).settle()
    page.run("document.querySelector('.controls').scrollIntoView()")
    keep("narrow", page.picture())


if __name__ == "__main__":
    if not found():
        sys.exit(MISSING)
    run()
    write(find(RUNS), RUNS / "report.html")
    with chromium() as browser:
        shoot(browser, RUNS / "report.html")
