"""A small HTTP server on this machine alone: /metrics for Prometheus, and /health."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from feddkd.errors import InputError
from feddkd.flower.status import metrics, read_status

HERE = "127.0.0.1"
TEXT = "text/plain; version=0.0.4; charset=utf-8"


@contextmanager
def serving_metrics(folder: Path, port: int | None) -> Iterator[None]:
    """Serve the status in a server's folder on a port of 127.0.0.1 until the block ends.

    Without a port do nothing.
    """
    if port is None:
        yield
        return
    server = _open(folder, port)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _metrics(folder: Path) -> str:
    try:
        return metrics(read_status(folder))
    except InputError:  # no run has begun yet
        return ""


def _open(folder: Path, port: int) -> ThreadingHTTPServer:
    class MetricsHandler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            pages: dict[str, Callable[[], str]] = {
                "/health": lambda: "ok\n",
                "/metrics": lambda: _metrics(folder),
            }
            page = pages.get(self.path)
            content = (page() if page else "/metrics or /health\n").encode()
            self.send_response(200 if page else 404)
            self.send_header("Content-Type", TEXT)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *words: object) -> None:
            pass

    try:
        return ThreadingHTTPServer((HERE, port), MetricsHandler)
    except (OSError, OverflowError) as error:
        raise InputError(f"cannot listen on {HERE}:{port}: {error}; see --metrics") from None
