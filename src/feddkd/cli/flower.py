"""feddkd flower: experiments on a federation of Flower nodes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from feddkd.cli import flower_node, flower_status
from feddkd.cli.console import File, Settings, command_group
from feddkd.cli.flower_runs import (
    FederationOptions,
    run_on_nodes,
    stamped,
    using_flower,
    write_private_files,
)
from feddkd.cli.run_options import with_options
from feddkd.errors import InputError
from feddkd.experiment import Experiment, load
from feddkd.spec.python_file import names_file, read_file_function

flower_app = command_group("Experiments on a federation of Flower nodes (needs feddkd[flower]).")
Join = Annotated[
    float, typer.Option(min=1, metavar="SECONDS", help="All clients must join within this time.")
]


@flower_app.command("up")
@with_options(FederationOptions)
def up(
    file: File,
    options: FederationOptions,
    nodes: Annotated[
        int, typer.Option(min=1, help="How many nodes; each runs its share of the clients.")
    ] = 2,
    set_: Settings = None,
    join: Join = 120.0,
) -> None:
    """Start a federation on this machine and run the experiments of a file on it.

    Certificates, keys, a SuperLink with TLS that knows its nodes, the nodes; then the runs,
    recorded as those of `feddkd run`. In the end nothing is left but the records.
    """
    experiments = load(file, set_ or ())
    few = min(experiment.clients for experiment in experiments)
    if nodes > few:
        raise InputError(f"{nodes} nodes are more than the {few} clients")
    options.check(experiments)
    network = _file_for_nodes(experiments)
    with using_flower():
        from feddkd.flower.deployment.local_federation import deployed

        data = None if options.data is None else options.data.resolve()
        with deployed(nodes, data, options.secure, network=network) as deployment:
            run_on_nodes(deployment.link, experiments, options, join, deployment.wait)


def _file_for_nodes(experiments: Sequence[Experiment]) -> Path | None:
    """Return the Python file with the network or the task, which the nodes may run.

    Raise InputError if there are several files, or one with data.
    """
    if wrong := next((e.data for e in experiments if names_file(e.data)), None):
        raise InputError(
            f"data {wrong!r} are in a Python file, and `flower up` gives nodes none: use a data"
            " source, or `flower server` and nodes with --load"
        )
    named = [("network", e.model) for e in experiments] + [("task", e.task) for e in experiments]
    files = {read_file_function(*one).path.resolve() for one in named if names_file(one[1])}
    if len(files) > 1:
        raise InputError("a node runs one Python file: put network and task in the same one")
    return next(iter(files), None)


@flower_app.command("server")
@with_options(FederationOptions)
def server(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE.toml...", help="The experiments, run one after another."),
    ],
    options: FederationOptions,
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
    join: Join = 3600.0,
    start_with: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            show_default="all",
            help="A run starts when N clients have joined; the others may come later.",
        ),
    ] = None,
    metrics: Annotated[
        int | None,
        typer.Option(
            metavar="PORT", help="Serve /metrics (Prometheus) and /health on 127.0.0.1:PORT."
        ),
    ] = None,
    log_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write the log to a file, ten of 10 MB, not to standard error."
        ),
    ] = None,
) -> None:
    """Be the server of a federation: a SuperLink with TLS for known nodes, and the runs of files.

    It waits until all clients have joined, and says every ten seconds who is lacking. Keys may be
    put into the folder of keys, and removed, while it runs: a node whose key is removed is shut out
    at once. If it is stopped and started again, it continues from the last checkpoint.
    """
    experiments = [experiment for file in files for experiment in load(file, set_ or ())]
    if not list(keys.glob("*.pub")):
        raise InputError(f"there are no public keys (*.pub) in {keys}")
    options.check(experiments)
    with using_flower():
        from feddkd.flower.deployment.credentials import AUTHORITY, CERTIFICATE, PRIVATE
        from feddkd.flower.deployment.key_folder import KeyFolder
        from feddkd.flower.deployment.metrics_server import serving_metrics
        from feddkd.flower.deployment.processes import Processes
        from feddkd.flower.deployment.superlink import Superlink
        from feddkd.flower.status import FILE, Status

        for name in (AUTHORITY, CERTIFICATE, PRIVATE):
            if not (folder / name).is_file():
                raise InputError(
                    f"there is no {name} in {folder}; feddkd flower certificate {folder} HOST"
                    " makes it"
                )
        write_private_files()
        with Processes(folder) as processes:
            link = Superlink(folder.resolve(), processes, port, host, lasting=True)
            link.start()
            members = KeyFolder(keys, link)
            members.admit()
            status = Status(folder / FILE)
            own = {"start_with": start_with, "membership": members, "status": status}
            with members.watched(processes.limit_logs), serving_metrics(folder, metrics):
                run_on_nodes(link, experiments, options, join, own=own, lines=stamped(log_file))


for _command in (
    flower_node.certificate,
    flower_node.init,
    flower_node.client,
    flower_node.key,
    flower_node.revoke,
    flower_status.status,
):
    flower_app.command()(_command)
