"""The commands of `feddkd flower` for one machine of a federation: credentials, an app, a node."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from feddkd.cli.console import DataDir
from feddkd.cli.flower_runs import using_flower, write_private_files
from feddkd.cli.run_options import Threads
from feddkd.engines.select import find_device
from feddkd.engines.threads import set_threads
from feddkd.errors import InputError


def certificate(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder for ca.crt, server.pem and server.key.")
    ],
    hosts: Annotated[
        list[str] | None,
        typer.Argument(metavar="HOST...", help="Names and addresses of the server."),
    ] = None,
    renew: Annotated[
        bool,
        typer.Option("--renew", help="Replace the certificate under the same authority."),
    ] = False,
) -> None:
    """Make or renew the certificate of a server. Copy DIR/ca.crt to the nodes, and nothing else.

    It is valid for a year; then --renew makes its successor, and the server is started again. Nodes
    need nothing new for ten years.
    """
    if bool(hosts) == renew:
        raise InputError("give the HOST names of a new certificate, or --renew without names")
    with using_flower():
        from feddkd.flower.deployment.credentials import make_server, renew_server

        if hosts:
            make_server(folder, hosts)
        else:
            renew_server(folder)


def revoke(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The node whose key is NAME.pub.")],
    keys: Annotated[Path, typer.Option(metavar="DIR", help="The server's folder of keys.")],
) -> None:
    """Shut a node out: rename its key, DIR/NAME.pub, to NAME.revoked. A running server sees it."""
    file = keys / f"{name}.pub"
    if not file.is_file():
        known = ", ".join(sorted(path.stem for path in keys.glob("*.pub"))) or "none"
        raise InputError(f"there is no key {file}; the keys in {keys}: {known}")
    file.rename(keys / f"{name}.revoked")
    print(f"the node {name} is shut out; renaming {name}.revoked to {name}.pub lets it in again")


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for the app.")],
) -> None:
    """Write a Flower app for your own data: one function to fill in, then `flwr run DIR`."""
    from feddkd.flower.deployment.template import FILES

    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    print(f"written to {folder}: {', '.join(FILES)}; begin with {folder / 'client_app.py'}")


def client(
    superlink: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The server's SuperLink.")],
    part: Annotated[
        int,
        typer.Option(
            min=0, help="The number of this node: it runs the clients PART, PART + PARTS, ..."
        ),
    ],
    parts: Annotated[int, typer.Option(min=1, help="How many nodes there are.")],
    key: Annotated[
        Path,
        typer.Option(
            metavar="FILE", help="The private key of this node; `feddkd flower key` makes one."
        ),
    ],
    authority: Annotated[
        Path,
        typer.Option(metavar="FILE", help="The certificate of the server: its ca.crt."),
    ],
    port: Annotated[int, typer.Option(help="A port on 127.0.0.1 that this node uses.")] = 9094,
    load: Annotated[
        str | None,
        typer.Option(
            metavar="FILE.py:NAME", help="Your function that returns this client's (x, y)."
        ),
    ] = None,
    secure: Annotated[
        bool,
        typer.Option(
            "--secure", help="Upload only masked values, even if a server asks for others."
        ),
    ] = False,
    peers: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="With --secure: the public keys of all hospitals, which you got from them.",
        ),
    ] = None,
    least: Annotated[
        int,
        typer.Option(
            min=3, metavar="N", help="With --secure: the fewest clients that a sum may need."
        ),
    ] = 3,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            show_default="the folder of the key",
            help="With --secure: where the node keeps what it must not forget.",
        ),
    ] = None,
    data: DataDir = None,
    device: Annotated[
        str, typer.Option(help="Where this node computes: cpu, cuda, cuda:1, ...")
    ] = "cpu",
    network: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.py", help="The one Python file with a network that this node may run."
        ),
    ] = None,
    initial: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The weights that runs start from, for layers that stay here."
        ),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where the model of every finished run is written."),
    ] = None,
    threads: Threads = None,
) -> None:
    """Be a node of a federation until it ends: a SuperNode that keeps its clients in memory."""
    if part >= parts:
        raise InputError(f"part {part} of {parts}: parts are counted from 0 to {parts - 1}")
    for file in (key, authority, network, initial):
        if file is not None and not file.is_file():
            raise InputError(f"there is no file {file}")
    if not secure and (peers or state or least > 3):
        raise InputError("--peers, --least and --state go with --secure")
    state = key.parent if state is None else state
    for folder in (state, peers):
        if secure and folder is not None and not folder.is_dir():
            raise InputError(f"there is no folder {folder}")
    if secure and not os.access(state, os.W_OK):
        raise InputError(f"cannot write in {state}; choose another folder with --state")
    find_device(device)
    if threads is not None:
        set_threads(threads)
    with using_flower():
        from feddkd.flower.apps import NodeApp
        from feddkd.flower.deployment.supernode import NodeSettings, run_node

        write_private_files()
        app = NodeApp(
            None if load is None else _function(load),
            device=device,
            network=network,
            initial=initial,
            results=results,
            key=key,
            peers=peers,
            least=least,
            state=state if secure else None,
        )
        run_node(app, NodeSettings(superlink, port, key, authority, part, parts, data, secure))


def key(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="File for the private key; the public key is written next to it."
        ),
    ],
) -> None:
    """Make the key pair of a node: FILE stays on the node, FILE.pub goes to the server."""
    with using_flower():
        from feddkd.flower.deployment.credentials import make_node

        make_node(file)


def _function(text: str) -> Callable[[Any], Any]:
    """Run a file and return the function that FILE.py:NAME names."""
    path, _, name = text.rpartition(":")
    file = Path(path)
    if not file.is_file():
        raise InputError(f"--load takes FILE.py:NAME, and there is no file {path!r}")
    names: dict[str, Any] = {"__name__": file.stem, "__file__": str(file)}
    exec(compile(file.read_text(encoding="utf-8"), file, "exec"), names)
    if not callable(names.get(name)):
        raise InputError(f"{path} has no function {name!r}")
    return names[name]  # type: ignore[no-any-return]
