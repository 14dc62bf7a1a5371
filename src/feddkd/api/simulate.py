"""`simulate`: a whole run in one call, on data in memory."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from feddkd.api.result import Result
from feddkd.data.examples import Examples, examples
from feddkd.data.federation import assemble
from feddkd.data.transforms import transform
from feddkd.errors import InputError, choices, line_of
from feddkd.method import Method
from feddkd.methods import parse
from feddkd.models.functional import Model, built, functional
from feddkd.models.weight_files import Initial, with_initial
from feddkd.rounds.availability import Availability, OnDivergence, tolerance
from feddkd.rounds.evaluation import find_protocol
from feddkd.rounds.metrics import Metric, find_metrics
from feddkd.simulation import DTYPES, Job, Simulation, Start
from feddkd.spec.types import Chance, Count, Whole, checked
from feddkd.tensors import Tensors

T = TypeVar("T")


def simulate(
    *,
    model: nn.Module | Model | Callable[[], nn.Module | Model],
    clients: Sequence[Any],
    test: Any,
    method: str | Method,
    validation: Any = None,
    public: Any = None,
    rounds: int = 1,
    cohort: int | float = 1.0,
    seed: int = 0,
    engine: str = "serial",
    device: str = "cpu",
    initial: Initial | None = None,
    dtype: torch.dtype | str | None = None,
    evaluation: str = "auto",
    metrics: Sequence[str | Metric] | None = None,
    diagnostics: bool = False,
    delta: float | None = None,
    availability: str | Availability = "always()",
    min_clients: int = 1,
    on_divergence: OnDivergence = "drop",
) -> Result:
    """Run a method on clients' data: pairs (x, y) of tensors or arrays, or torch datasets; x as the
    network takes it.

    A module given as `model` starts from the weights it has; a function or class that builds one
    without arguments is called under the seed, so that seeds differ in their first weights.
    `initial` takes the place of both: a state dict, a module, or the path of a safetensors file.
    `cohort` is a fraction of the clients (0.5) or a number of them (10). `dtype` is that of the
    weights unless said. `evaluation` says whose model is judged on what: "global", "client_mean" or
    "client_pooled"; "auto" asks every client where clients keep tensors of their own. `metrics` are
    the names of what is measured, the headline first: "accuracy" and "loss" unless given; also
    "macro_f1", "auc". `public` is
    what the server holds for everybody to see, for the methods that need such data. `diagnostics`
    adds the theory's quantities (L1', L2', update norms, ...) to every row. `delta` is that of the
    epsilon which methods with noise report, 1 / (10 K) unless said. `availability` says which
    clients do not answer: "random(drop=0.1, late=0.05)", "trace(file='faults.csv')", or
    `feddkd.rounds.availability.listed(rows)`; with fewer than `min_clients` left a round ends. A
    client whose numbers are not finite is left out (`on_divergence="drop"`), ends the run ("stop"),
    or is not looked for ("continue").
    """
    if not isinstance(clients, Sequence):
        raise InputError(
            f"clients must be a list with the examples of each client, not {type(clients).__name__}"
        )
    federation = assemble(
        [_examples(client, f"client {k}") for k, client in enumerate(clients)],
        _examples(test, "test"),
        None if validation is None else _examples(validation, "validation"),
        transform(""),
        None if public is None else _examples(public, "public"),
    )
    chosen, seed = _method(method), checked(seed, Whole, "seed")
    network = _network(model, seed)
    network = network if initial is None else with_initial(network, initial)
    start = Start(seed, federation, *network.start())
    job = Job(
        network,
        chosen,
        [start],
        dtype=_dtype(dtype, start.params),
        rounds=checked(rounds, Count, "rounds"),
        cohort=cohort,
        protocol=find_protocol(evaluation, chosen, own_tests=False),
        metrics=find_metrics(metrics),
        tolerance=tolerance(availability, min_clients, on_divergence),
        diagnostics=diagnostics,
        delta=checked(delta, Chance | None, "delta"),
    )
    with Simulation(job, engine, device) as simulation:
        history = [rows[0] for rows in simulation.rounds()]
        (run,) = simulation.runs
        if run.error is not None:
            raise run.error
        memos = simulation.engine.memos_of(0)
    private = {client: memo["private"] for client, memo in memos.items() if "private" in memo}
    return Result({**run.state["params"], **run.state["buffers"]}, history, network, private)


def _examples(given: Any, whose: str) -> Examples:
    try:
        return examples(given)
    except InputError as error:
        raise InputError(f"{whose}: {error}") from error


def _network(given: Any, seed: int) -> Model:
    if not isinstance(given, Model | nn.Module) and not callable(given):
        raise InputError(
            "model must be a torch.nn.Module, functional(...) of one, or what builds one, a"
            f" function or class; not {type(given).__name__}"
        )
    network = (
        functional(given)
        if isinstance(given, Model | nn.Module)
        else built(lambda: _called(given), ("init", seed))
    )
    if not network.param_names:
        frozen = (
            "all of them are frozen (requires_grad=False)"
            if any(True for _ in network.net.parameters())
            else "it has none"
        )
        raise InputError(
            f"model must have parameters to train; of this {type(network.net).__name__} {frozen}"
        )
    return network


def _called(build: Callable[[], T]) -> T:
    try:
        return build()
    except InputError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}{line_of(error)}"
        raise InputError(f"the function that builds the network failed: {reason}") from error


def _method(given: Any) -> Method:
    if not isinstance(given, Method | str):
        raise InputError(
            "method must be a method or its text, such as 'fedavg() | dkd()', not"
            f" {type(given).__name__}"
        )
    return given if isinstance(given, Method) else parse(given)


def _dtype(given: torch.dtype | str | None, params: Tensors) -> torch.dtype:
    """The one asked for, or that of the weights."""
    wanted = (
        next((tensor.dtype for tensor in params.values()), torch.float32)
        if given is None
        else given
    )
    name = str(wanted).removeprefix("torch.")
    if name not in DTYPES:
        raise InputError(f"unknown dtype {name!r}; there are: {choices(DTYPES)}")
    return DTYPES[name]
