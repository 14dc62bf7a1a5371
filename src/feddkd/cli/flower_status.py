"""feddkd flower status: what the server on this machine is doing."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from feddkd.cli.console import clock, console
from feddkd.cli.flower_runs import using_flower


def status(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The --folder of `feddkd flower server`.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show the run and the round of a server, its clients, their last answers and their bytes."""
    with using_flower():
        from feddkd.flower.status import read_status

        found = read_status(folder)
    if as_json:
        print(json.dumps(found))
        return
    console().print(
        f"{found['run']}: round {found['round']} of {found['rounds']}, {_exchange(found)};"
        f" {len(found['clients'])} of {found['clients_in_all']} clients have joined; feddkd"
        f" {found['version']}, {_ago(found['written'])}"
    )
    console().print(_clients(found["clients"]))


def _exchange(found: dict[str, Any]) -> str:
    return f"{found['phase']} {found['step']}" if found["phase"] else "not begun"


def _clients(clients: dict[str, dict[str, Any]]) -> Table:
    table = Table("client", "node", "examples", "answers", "failures", "MB up", "MB down", "last")
    table.add_column("last failure", overflow="fold")
    for client, one in sorted(clients.items(), key=lambda pair: int(pair[0])):
        counts = [str(one[name]) for name in ("examples", "answers", "failures")]
        sizes = [f"{one[name] / 1e6:.1f}" for name in ("bytes_up", "bytes_down")]
        last = "never" if one["last_answer"] is None else _ago(one["last_answer"])
        table.add_row(client, one["node"], *counts, *sizes, last, one["last_failure"])
    return table


def _ago(when: float) -> str:
    return f"{clock(max(time.time() - when, 0.0))} ago"
