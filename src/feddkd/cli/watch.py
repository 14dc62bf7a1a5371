"""feddkd watch: the report of running jobs in a browser, renewed after each round."""

import webbrowser
from contextlib import suppress
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated

import typer

from feddkd.cli.console import console, print_skipped
from feddkd.errors import InputError
from feddkd.reports.html.page import html
from feddkd.runs.record import survey

HERE = "127.0.0.1"  # other machines cannot connect
WAITING = "<!doctype html><title>feddkd</title><p>No round has ended yet under {}.</p>"


def watch(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder of runs; it may be empty at first.")
    ] = Path("runs"),
    port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, help="A port of the loopback interface; 0 takes a free one."
        ),
    ] = 8000,
    every: Annotated[
        int,
        typer.Option(
            min=1, metavar="SECONDS", help="Seconds after which the browser reloads the page."
        ),
    ] = 5,
    open_: Annotated[bool, typer.Option("--open", help="Show it in a browser.")] = False,
) -> None:
    """Serve the report of a running job to a browser on this machine, and renew it after each
    round. Ctrl-C ends it.
    """
    with server(folder, port, every) as serving:
        address = f"http://{HERE}:{serving.server_address[1]}/"
        console().print(f"{folder} is shown at {address}", soft_wrap=True)
        if open_:
            webbrowser.open(address)
        with suppress(KeyboardInterrupt):
            serving.serve_forever()


def server(folder: Path, port: int, every: int) -> ThreadingHTTPServer:
    """Return a server of the report on a folder; the browser reloads it after `every` seconds."""
    # the last page, by the sizes of the files it was made from
    pages: dict[tuple[tuple[Path, int], ...], bytes] = {}
    named: set[str] = set()

    def renewed() -> bytes:
        sizes = tuple((path, path.stat().st_size) for path in sorted(folder.rglob("rounds.jsonl")))
        page = pages.get(sizes) or _page(folder, named).encode()
        pages.clear()
        pages[sizes] = page
        return page

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            # refuse other names that resolve to this address
            host = (self.headers.get("Host") or "").rpartition(":")[0]
            if host not in (HERE, "localhost") or self.path != "/":
                self.send_error(404)
                return
            page = renewed()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page)))
            self.send_header("Refresh", str(every))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *args: object) -> None:
            """Print no line for a reload."""

    try:
        return ThreadingHTTPServer((HERE, port), Handler)
    except OSError as error:
        raise InputError(
            f"cannot serve at port {port}: {error.strerror}; --port 0 takes a free one"
        ) from None


def _page(folder: Path, named: set[str]) -> str:
    """Return the report; print the errors of damaged runs that are not yet in `named`."""
    try:
        found = survey(folder)
        print_skipped([error for error in found.errors if str(error) not in named])
        named.update(map(str, found.errors))
        return html(found.records)
    except InputError:  # no run yet
        return WAITING.format(escape(str(folder)))
