"""Write the HTML page about some records."""

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from feddkd.errors import InputError
from feddkd.reports.html.chart_data import figures
from feddkd.reports.html.provenance import facts
from feddkd.reports.html.verdicts import ranked, verdicts
from feddkd.reports.tables import caption, grid
from feddkd.runs.record import Record
from feddkd.version import __version__


def write(records: Sequence[Record], path: Path) -> None:
    try:
        path.write_text(html(records), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write the page to {path}: {error.strerror}") from None


def html(records: Sequence[Record]) -> str:
    """The page. Whatever comes out of a record is escaped: by Jinja in the text, by `_embedded` in
    the numbers.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    files = resources.files(__package__)
    style, *scripts = (
        files.joinpath(name).read_text("utf-8")
        for name in ("page.css", "plotly-cartesian.min.js", "page.js")
    )
    records = ranked(records)
    environment = Environment(
        loader=PackageLoader(__package__, "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(
        style=style,
        scripts=scripts,
        hashes=[_hash(script) for script in scripts],
        data=_embedded(shown := figures(records)),
        shown=shown,
        verdicts=verdicts(records),
        grid_=grid(records),
        caption=caption(records),
        facts=facts(records),
        version=__version__,
    )


def _hash(script: str) -> str:
    """What the page's own policy lets run, and nothing else."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _embedded(content: object) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
