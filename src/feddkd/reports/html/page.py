"""Write the HTML page about some records."""

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from feddkd.errors import InputError
from feddkd.reports.families import headline_of
from feddkd.reports.html.chart_data import figures
from feddkd.reports.html.provenance import facts
from feddkd.reports.html.verdicts import ranked, verdicts
from feddkd.reports.tables import caption, grid
from feddkd.runs.record import Record
from feddkd.version import __version__


def write(records: Sequence[Record], path: Path) -> None:
    """Write the page into a file."""
    try:
        path.write_text(html(records), encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write the page to {path}: {error.strerror}") from None


def html(records: Sequence[Record]) -> str:
    """Return the page. All texts of a record are escaped: by Jinja in the text, by `_embedded` in
    the numbers.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    files = resources.files(__package__)
    names = ("page.css", "plotly-cartesian.min.js", "page.js")
    style, *scripts = (files.joinpath(name).read_text("utf-8") for name in names)
    records = ranked(records)
    environment = Environment(
        loader=PackageLoader(__package__, "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    shown, (headings, lines) = figures(records), grid(records)
    return environment.get_template("page.html").render(
        style=style,
        scripts=scripts,
        hashes=[_hash(script) for script in scripts],
        data=_embedded(shown),
        shown=shown,
        headline=headline_of(records),
        verdicts=verdicts(records),
        headings=headings,
        lines=lines,
        caption=caption(records),
        facts=facts(records),
        version=__version__,
    )


def _hash(script: str) -> str:
    """Return the hash by which the page's security policy allows a script; it allows no other."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _embedded(content: object) -> str:
    """Return JSON that cannot end the script element around it."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
