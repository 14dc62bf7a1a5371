"""The report of runs on their way."""

import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from feddkd import InputError
from feddkd.cli.watch import HERE, server
from made_up import make


class Served(NamedTuple):
    folder: Path
    address: str


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """A folder with nothing in it yet, on a port that was free."""
    with server(tmp_path, 0, every=7) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield Served(tmp_path, f"http://{HERE}:{serving.server_address[1]}/")
        serving.shutdown()
        thread.join()


def get(address: str, host: str | None = None) -> tuple[str, str | None]:
    request = urllib.request.Request(address, headers={} if host is None else {"Host": host})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read().decode(), answer.headers["Refresh"]


def test_the_page_is_there_from_the_first_round_on_and_grows_with_the_rounds(
    served: Served,
) -> None:
    assert "No round has ended yet" in get(served.address)[0]
    make(served.folder, methods=1, seeds=1, rounds=3)
    page, refresh = get(served.address)
    assert refresh == "7"
    assert "3 of 3" in page
    (file,) = served.folder.rglob("rounds.jsonl")
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:2]))
    assert "2 of 3" in get(served.address)[0]


@pytest.mark.parametrize(
    ("path", "host"),
    [("rounds.jsonl", None), ("../", None), ("", "evil.example"), ("", "evil.example:80")],
)
def test_nothing_else_is_served_and_nobody_elses_name_leads_here(
    served: Served, path: str, host: str | None
) -> None:
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(served.address + path, host)


def test_it_listens_on_this_machine_alone(served: Served, tmp_path: Path) -> None:
    port = int(served.address.rpartition(":")[2].strip("/"))
    with pytest.raises(InputError, match="--port 0"):
        server(tmp_path, port, every=1)
    with server(tmp_path, 0, every=1) as other:
        assert other.server_address[0] == "127.0.0.1"
