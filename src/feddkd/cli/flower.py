"""feddkd flower: experiments on a federation of Flower nodes.

Flower is an optional package: it is imported when a command needs it.
"""

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from feddkd.cli.console import AsJson, DataDir, File, Settings
from feddkd.cli.run_options import EveryRounds, RunOptions, Threads
from feddkd.cli.show_runs import show
from feddkd.errors import InputError
from feddkd.experiment import Experiment, load
from feddkd.runs.prepare import prepare
from feddkd.runs.runner import How, play
from feddkd.runs.session import Event, Every

if TYPE_CHECKING:
    from feddkd.flower.deployment.superlink import Superlink

flower_app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Experiments on a federation of Flower nodes (needs feddkd[flower]).",
)

Out = Annotated[Path, typer.Option(metavar="DIR", help="Where run folders are written.")]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Run again what is finished or was cut short.")
]
Deadline = Annotated[
    float,
    typer.Option(min=1, metavar="SECONDS", help="Later answers are ignored."),
]
Join = Annotated[
    float, typer.Option(min=1, metavar="SECONDS", help="All clients must join within this time.")
]
Secure = Annotated[
    bool,
    typer.Option(
        "--secure", help="Secure aggregation: uploads are masked, the server learns only sums."
    ),
]
Threshold = Annotated[
    float,
    typer.Option(
        metavar="SHARE",
        show_default="2/3",
        help="With --secure: the share of a cohort that must answer to open a sum; over 1/2.",
    ),
]


@flower_app.command("up")
def up(
    file: File,
    nodes: Annotated[
        int, typer.Option(min=1, help="How many nodes; each runs its share of the clients.")
    ] = 2,
    set_: Settings = None,
    data: DataDir = None,
    out: Out = Path("runs"),
    deadline: Deadline = 600.0,
    join: Join = 120.0,
    secure: Secure = False,
    threshold: Threshold = 2 / 3,
    every_rounds: EveryRounds = 1,
    fresh: Fresh = False,
    as_json: AsJson = False,
) -> None:
    """Start a federation on this machine and run the experiments of a file on it.

    Certificates, keys, a SuperLink with TLS that knows its nodes, the nodes; then the runs,
    recorded as those of `feddkd run`. In the end nothing is left but the records.
    """
    experiments = load(file, set_ or ())
    options = _options(experiments, deadline, join, secure, threshold)
    few = min(experiment.clients for experiment in experiments)
    if nodes > few:
        raise InputError(f"{nodes} nodes are more than the {few} clients")
    _try_out(experiments, data)
    with _flower():
        from feddkd.flower.deployment.local_federation import deployed

        with deployed(nodes, None if data is None else data.resolve(), secure) as deployment:
            how = How(data=data, every=Every(every_rounds), fresh=fresh)
            _run(deployment.link, experiments, out, options, how, as_json, deployment.wait)


def _try_out(experiments: list[Experiment], data: Path | None) -> None:
    """Raise an InputError if data or a network is missing, before anything is started."""
    for experiment in experiments:
        if experiment.runs_a_file:
            raise InputError("an experiment that names a Python file does not run on Flower nodes")
        prepare(experiment, data)


def _run(
    link: "Superlink",
    experiments: list[Experiment],
    out: Path,
    options: dict[str, float],
    how: How,
    as_json: bool,
    wait: Callable[[Any, float], None] = lambda grid, seconds: None,
) -> None:
    """Run one experiment after another, each as a Flower run, and show them."""

    def events() -> Generator[Event]:
        for at, experiment in enumerate(experiments):
            with link.run() as grid:
                wait(grid, options["join"])
                for event in _play(experiment, grid, out, options, how):
                    yield event._replace(at=at)

    show(events(), experiments, [out] * len(experiments), as_json=as_json)


def _play(
    experiment: Experiment, grid: Any, out: Path, options: dict[str, float], how: How
) -> Generator[Event]:
    """Run an experiment on the nodes behind a Grid; with a threshold the engine is secure."""
    from feddkd.flower.apps import engine_on

    engine = engine_on(grid, experiment, secure="threshold" in options, **options)
    return play([experiment], out, replace(how, engine=engine))


def _options(
    experiments: list[Experiment], deadline: float, join: float, secure: bool, threshold: float
) -> dict[str, float]:
    """Return the options of the engine; with a threshold it is secure."""
    if not secure:
        return {"deadline": deadline, "join": join}
    with _flower():
        from feddkd.flower.secure import check_summable

        for experiment in experiments:  # an error comes before anything is started
            check_summable(experiment.as_dict(), threshold)
    return {"deadline": deadline, "join": join, "threshold": threshold}


def ray_events(
    experiments: list[Experiment], places: list[Path], options: RunOptions, fresh: bool
) -> Generator[Event]:
    """Run one experiment after another in Flower's simulation, a core for each active client."""
    with _flower():
        from feddkd.flower.apps import NodeApp
        from feddkd.flower.deployment.ray import on_ray

        folder = None if options.data is None else options.data.resolve()
        if folder is not None:
            os.environ["FEDDKD_DATA"] = str(folder)  # Ray's workers inherit it
        how = How(data=folder, every=options.every, fresh=fresh)
        for at, experiment in enumerate(experiments):
            work = partial(_play, experiment, out=places[at], options={}, how=how)
            for event in on_ray(work, NodeApp(), experiment.clients, 1.0, 0.0):
                yield event._replace(at=at)


@flower_app.command("server")
def server(
    file: File,
    folder: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="Certificate and key, made by `feddkd flower certificate`."
        ),
    ],
    keys: Annotated[
        Path,
        typer.Option(metavar="DIR", help="The public keys (*.pub) of the nodes that may join."),
    ],
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "0.0.0.0",
    port: Annotated[int, typer.Option(help="The port to listen on.")] = 9092,
    set_: Settings = None,
    data: DataDir = None,
    out: Out = Path("runs"),
    deadline: Deadline = 600.0,
    join: Join = 3600.0,
    secure: Secure = False,
    threshold: Threshold = 2 / 3,
    every_rounds: EveryRounds = 1,
    fresh: Fresh = False,
    as_json: AsJson = False,
) -> None:
    """Be the server of a federation: a SuperLink with TLS for known nodes, and the runs of a file.

    It waits until all clients have joined. If it is stopped and started again, it continues from
    the last checkpoint.
    """
    experiments, public_keys = load(file, set_ or ()), sorted(keys.glob("*.pub"))
    options = _options(experiments, deadline, join, secure, threshold)
    if not public_keys:
        raise InputError(f"there are no public keys (*.pub) in {keys}")
    _try_out(experiments, data)
    with _flower():
        from feddkd.flower.deployment.credentials import AUTHORITY, CERTIFICATE, PRIVATE
        from feddkd.flower.deployment.processes import Processes
        from feddkd.flower.deployment.superlink import Superlink

        for name in (AUTHORITY, CERTIFICATE, PRIVATE):
            if not (folder / name).is_file():
                raise InputError(
                    f"there is no {name} in {folder}; feddkd flower certificate {folder} HOST"
                    " makes it"
                )
        with Processes(folder) as processes:
            link = Superlink(folder.resolve(), processes, port, host, lasting=True)
            link.start()
            for public_key in public_keys:
                link.register(public_key)
            how = How(data=data, every=Every(every_rounds), fresh=fresh)
            _run(link, experiments, out, options, how, as_json)


@flower_app.command("certificate")
def certificate(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder for ca.crt, server.pem and server.key.")
    ],
    hosts: Annotated[
        list[str],
        typer.Argument(metavar="HOST...", help="Names and addresses of the server."),
    ],
) -> None:
    """Make the certificate of a server. Copy DIR/ca.crt to the nodes, and nothing else."""
    with _flower():
        from feddkd.flower.deployment.credentials import make_server

        make_server(folder, hosts)


@flower_app.command("init")
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


@flower_app.command("client")
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
    data: DataDir = None,
    threads: Threads = None,
) -> None:
    """Be a node of a federation until it ends: a SuperNode that keeps its clients in memory."""
    if part >= parts:
        raise InputError(f"part {part} of {parts}: parts are counted from 0 to {parts - 1}")
    for file in (key, authority):
        if not file.is_file():
            raise InputError(f"there is no file {file}")
    if threads is not None:
        torch.set_num_threads(threads)
    with _flower():
        from feddkd.flower.apps import NodeApp
        from feddkd.flower.deployment.supernode import run_node

        app = NodeApp(None if load is None else _function(load))
        run_node(app, superlink, port, key, authority, part, parts, data, secure)


@flower_app.command("key")
def key_(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="File for the private key; the public key is written next to it."
        ),
    ],
) -> None:
    """Make the key pair of a node: FILE stays on the node, FILE.pub goes to the server."""
    with _flower():
        from feddkd.flower.deployment.credentials import make_node

        make_node(file)


@contextmanager
def _flower() -> Iterator[None]:
    """A context for the use of Flower, which then talks to the SuperLink alone."""
    os.environ |= {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "flwr":
            raise
        raise InputError("this needs Flower: pip install 'feddkd[flower]'") from None


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
