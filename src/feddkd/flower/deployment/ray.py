"""Flower's simulation: clients are tasks on a Ray cluster of one or several machines and GPUs."""

from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from feddkd.errors import InputError

Item = TypeVar("Item")


class _End:
    """The last item of the queue."""


def on_ray(
    work: Callable[[Grid], Iterator[Item]], app: ClientApp, clients: int, cpus: float, gpus: float
) -> Iterator[Item]:
    """Yield what `work` yields on a Grid whose nodes, one for each client, are Ray tasks.

    A task takes `cpus` cores and `gpus` GPUs. Flower calls the work and returns when it is over, so
    it runs in another thread.
    """
    items: SimpleQueue[Item | BaseException | type[_End]] = SimpleQueue()
    server = ServerApp()
    resources: dict[str, Any] = {"num_cpus": cpus, "num_gpus": gpus}

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        try:
            for item in work(grid):
                items.put(item)
        except BaseException as error:  # Flower would log it and continue
            items.put(error)

    def simulate() -> None:
        try:
            run_simulation(server, app, clients, backend_config={"client_resources": resources})
        except ImportError as error:
            items.put(
                InputError(
                    f"engine 'flower-sim' needs Ray: pip install 'feddkd[flower-sim]' ({error})"
                )
            )
        except BaseException as error:
            items.put(error)
        finally:
            items.put(_End)

    thread = Thread(target=simulate, daemon=True)
    thread.start()
    while (item := items.get()) is not _End:
        if isinstance(item, BaseException):
            raise item
        yield item  # type: ignore[misc]
    thread.join()
