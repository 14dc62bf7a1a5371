"""Flower's simulation: clients as tasks on a Ray cluster, which may be several machines and several GPUs."""

from collections.abc import Callable
from typing import TypeVar

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from feddkd.errors import InputError

Result = TypeVar("Result")


def on_ray(work: Callable[[Grid], Result], app: ClientApp, clients: int, cpus: float, gpus: float) -> Result:
    """Do some work with a Grid whose nodes, one a client, are Ray's; each task takes so many cores and GPUs."""
    server, results, failures = ServerApp(), list[Result](), list[BaseException]()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            results.append(work(grid))
        except BaseException as error:  # Flower would log it and go on
            failures.append(error)

    try:
        run_simulation(server, app, clients, backend_config={"client_resources": {"num_cpus": cpus, "num_gpus": gpus}})
    except ImportError as error:
        raise InputError(f"engine 'flower-sim' needs Ray: pip install 'feddkd[flower-sim]' ({error})") from None
    if failures:
        raise failures[0]
    return results[0]
