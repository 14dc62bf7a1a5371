"""A whole run in one call: `simulate` on data at hand, and the pieces that `feddkd run` puts together in the same way."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from feddkd.availability import Availability, OnDivergence, Tolerance, tolerance
from feddkd.checkpoint import Snapshot
from feddkd.data.examples import Examples, examples
from feddkd.data.federation import Federation, assemble, together
from feddkd.data.transforms import transform
from feddkd.engines import Engine
from feddkd.engines.opening import FLOWER, find_device, open_engine
from feddkd.engines.serial import Serial
from feddkd.errors import InputError, RunError, choices, line_of
from feddkd.evaluate import Protocol, find_protocol
from feddkd.method import Method, World
from feddkd.methods import parse
from feddkd.models import Model, built, functional
from feddkd.models.initial import Initial, with_initial
from feddkd.models.proof import FEW, prove
from feddkd.params import Groups, Tensors, only, to
from feddkd.privacy import ledger
from feddkd.rounds import PATIENT, Row, Run, play
from feddkd.values import Chance, Count, Share, Whole, checked

T = TypeVar("T")
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Result:
    """What a run leaves: the final global tensors that were trained or averaged, and one row a round."""

    params: dict[str, Tensor]
    history: list[Row]
    model: Model = field(repr=False, compare=False)
    private: dict[int, Tensors] = field(default_factory=dict, repr=False, compare=False)  # client -> the tensors it keeps

    def state_dict(self, client: int | None = None) -> dict[str, Any]:
        """Return what the network's `load_state_dict` takes: the global model, or the model of a client that keeps tensors."""
        own = {} if client is None else self._private_of(client)
        found = {**self.params, **own}
        if missing := sorted((self.model.param_names | self.model.buffer_names) - found.keys()):
            raise InputError(f"{missing[0]!r} is each client's own: say whose model is wanted, as in state_dict(client=0)")
        return self.model.state_dict(only(found, self.model.param_names), only(found, self.model.buffer_names))

    def _private_of(self, client: int) -> Tensors:
        if self.private and client not in self.private:
            raise InputError(f"client {client} keeps no tensors; those that do: {choices(map(str, self.private))}")
        return self.private.get(client, {})

    def save(self, path: str | Path) -> None:
        """Write the final model as safetensors: what `state_dict()` returns, or the shared tensors where clients keep some."""
        whole = self.params.keys() >= self.model.param_names | self.model.buffer_names
        tensors = {key: value for key, value in self.state_dict().items() if isinstance(value, Tensor)} if whole else self.params
        save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, path)


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
    diagnostics: bool = False,
    delta: float | None = None,
    availability: str | Availability = "always()",
    min_clients: int = 1,
    on_divergence: OnDivergence = "drop",
) -> Result:
    """Run a method on clients' data: pairs (x, y) of tensors or arrays, or torch datasets; x as the network takes it.

    A module given as `model` starts from the weights it has; a function or class that builds one without arguments is called
    under the seed, so that seeds differ in their first weights. `initial` takes the place of both: a state dict, a module, or
    the path of a safetensors file. `cohort` is a fraction of the clients (0.5) or a number of them (10). `dtype` is that of the
    weights unless said. `evaluation` says whose model is judged on what: "global", "client_mean" or "client_pooled"; "auto" asks
    every client where clients keep tensors of their own. `public` is what the server holds for everybody to see, for the methods
    that need such data.
    `diagnostics` adds the theory's quantities (L1', L2', update norms, ...) to every row. `delta` is that of the epsilon which
    methods with noise report, 1 / (10 K) unless said. `availability` says which clients do not answer:
    "random(drop=0.1, late=0.05)", "trace(file='faults.csv')", or `feddkd.availability.listed(rows)`; with fewer than
    `min_clients` left a round ends. A client whose numbers are not finite is left out (`on_divergence="drop"`), ends the run
    ("stop"), or is not looked for ("continue").
    """
    if not isinstance(clients, Sequence):
        raise InputError(f"clients must be a list with the examples of each client, not {type(clients).__name__}")
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
    start, history, private = network.start(), list[Row](), dict[int, Tensors]()

    def keep(engine: Engine, runs: Sequence[Run]) -> None:
        for run in runs:
            private.update({k: memo["private"] for k, memo in engine.memos_of(run.index).items() if "private" in memo})

    run = simulate_runs(
        network, chosen, [federation], [start], [seed],
        rounds=checked(rounds, Count, "rounds"), cohort=cohort, protocol=find_protocol(evaluation, chosen, own_tests=False),
        engine=engine, device=device, dtype=_dtype(dtype, start[0]), on_round=lambda rows, _: history.append(rows[0]),
        diagnostics=diagnostics, delta=checked(delta, Chance | None, "delta"),
        tolerance=tolerance(availability, min_clients, on_divergence), on_end=keep,
    )[0][0]  # fmt: skip
    if run.error is not None:
        raise run.error
    return Result({**run.state["params"], **run.state["buffers"]}, history, network, private)


def simulate_runs(
    model: Model,
    method: Method,
    federations: Sequence[Federation],
    starts: Sequence[tuple[Mapping[str, Tensor], Mapping[str, Tensor]]],
    seeds: Sequence[int],
    *,
    rounds: int,
    cohort: int | float,
    protocol: Protocol,
    engine: str,
    device: str,
    dtype: torch.dtype,
    on_round: Callable[[dict[int, Row], Callable[[], dict[int, Snapshot]]], None],
    on_start: Callable[[], None] = lambda: None,
    options: Mapping[str, Any] | None = None,
    diagnostics: bool = False,
    delta: float | None = None,
    resume: Sequence[Snapshot] = (),
    tolerance: Tolerance = PATIENT,
    on_end: Callable[[Engine, Sequence[Run]], None] = lambda engine, runs: None,
) -> tuple[list[Run], dict[str, Any]]:
    """Runs of one method in lock-step: one federation, start and seed for each; or they `resume`, all after the same round.

    `on_start` is called once everything has been checked. `on_round` gets the rows as they come, and a function that takes
    snapshots, both by the number of the run: one that could not go on, which its `error` tells, has none. `on_end` may ask the
    clients of the others once more, as they stand after the last round; by the serial engine, since for one exchange a quick way
    is not worth looking for. Returns the runs and what the engine has to say of itself.
    """
    if engine not in FLOWER and not all(size for federation in federations for size in federation.sizes):
        raise InputError("there are clients without examples; those that bring their own do so on Flower: feddkd flower server")
    tolerance.availability.check(method.fitted(model), len(federations[0].train))
    size = cohort_size(cohort, len(federations[0].train), tolerance.min_clients)
    model, federations, runs, memos = begin(model, method, federations, starts, seeds, find_device(device), dtype)
    host = open_engine(engine, model, federations, memos, dtype, options or {})
    for run, held in zip(runs, resume, strict=False):
        run.state, run.costs = held.state, held.costs
        host.restore(run.index, held.memos)
        host.adopt(held.engine)

    def snapshots() -> dict[int, Snapshot]:
        t, engine = rows[0]["round"], host.facts()
        return {run.index: Snapshot(t, run.state, run.costs, host.memos_of(run.index), engine) for run in going}

    first = resume[0].round + 1 if resume else 1
    try:
        spent = ledger(method.fitted(model), len(federations[0].train), size, delta, first)
        on_start()
        with suppress(RunError):  # no run could go on; each knows why
            for rows in play(method, model, host, runs, cohort=size, last=rounds, protocol=protocol, diagnostics=diagnostics,
                first=first, tolerance=tolerance,
            ):  # fmt: skip
                going, now = [run for run in runs if run.error is None], next(spent)
                on_round({run.index: {**row, **now} for run, row in zip(going, rows, strict=True)}, snapshots)
        ended = [run for run in runs if run.error is None]
        plain = Serial(model, federations, memos, dtype)
        for run in ended:
            plain.restore(run.index, host.memos_of(run.index))
        on_end(host if engine in FLOWER else plain, ended)  # what Flower's clients keep is not here
        return runs, {"name": type(host).__name__.lower(), **host.facts()}
    finally:
        host.close()


class Begun(NamedTuple):
    """Runs before their first round, on a device."""

    model: Model  # proven to compute what the network computes
    federations: list[Federation]
    runs: list[Run]
    memos: list[Groups]  # what each run's clients begin with


def begin(
    model: Model, method: Method, federations: Sequence[Federation],
    starts: Sequence[tuple[Mapping[str, Tensor], Mapping[str, Tensor]]], seeds: Sequence[int],
    place: torch.device, dtype: torch.dtype,
) -> Begun:  # fmt: skip
    """Return runs before their first round. What does not fit together is refused here."""
    method.check_order()
    runs, memos = list[Run](), list[Groups]()
    there = together([federation.to(place) for federation in federations])
    model = model.on(place, dtype)
    for index, (federation, start, seed) in enumerate(zip(there, starts, seeds, strict=True)):
        params, buffers = (to(group, place, dtype) for group in start)
        if index == 0:
            model = prove(model, params, buffers, federation.transform(_few(federation.x), dtype))
        outputs = _check_fit(model, params, buffers, federation, dtype)
        _check_public(method, federation)
        world = World(("method", seed), len(federation.train), federation.classes, len(federation.public), outputs)
        state, memo = method.start(model, params, buffers, world)
        runs.append(Run(index, seed, state, has_validation=len(federation.validation) > 0))
        memos.append(memo)
    return Begun(model, there, runs, memos)


def cohort_size(cohort: int | float, clients: int, least: int = 1) -> int:
    """m = max(int(C K), 1) for a fraction C, or the number itself. `least` of them must answer."""
    cohort = checked(cohort, Count | Share, "cohort")
    size = cohort if isinstance(cohort, int) else max(int(cohort * clients + 1e-9), 1)
    if size > clients:
        raise InputError(f"cohort asks for {size} clients, and there are {clients}")
    if size < least:
        raise InputError(f"min_clients is {least}, and a cohort has {size} clients")
    return size


def _few(x: Tensor) -> Tensor:
    """Return the examples to try a network on; of tokens those with the least and the largest, which it may not know."""
    if x.dtype != torch.int64:
        return x[:FEW]
    return x[[int(x.amin(1).argmin()), int(x.amax(1).argmax()), *range(min(FEW - 2, len(x)))]]


def _check_fit(model: Model, params: Tensors, buffers: Tensors, federation: Federation, dtype: torch.dtype) -> int:
    """Return how many outputs the network has for an example, one for every label at least; only a call can tell."""
    x = federation.transform(federation.x[:FEW], dtype)
    with torch.no_grad():
        logits = model(params, buffers, x, mode="eval", key=torch.tensor(0, device=x.device)).logits
    if logits.shape[1] < federation.classes:
        raise InputError(
            f"labels go up to {federation.classes - 1}, so an example needs {federation.classes} logits or more; the network "
            f"returns {logits.shape[1]}"
        )
    return int(logits.shape[1])


def _check_public(method: Method, federation: Federation) -> None:
    reading = [phase for phase in method.phases if "public" in phase.reads.source]
    if reading and not len(federation.public):
        raise InputError(
            f"{method} reads public data, and there is none: set a part aside by public = 0.05, say, or give public=..."
        )


def _examples(given: Any, whose: str) -> Examples:
    try:
        return examples(given)
    except InputError as error:
        raise InputError(f"{whose}: {error}") from error


def _network(given: Any, seed: int) -> Model:
    if not isinstance(given, Model | nn.Module) and not callable(given):
        raise InputError(
            f"model must be a torch.nn.Module, functional(...) of one, or what builds one, a function or class; not "
            f"{type(given).__name__}"
        )
    network = functional(given) if isinstance(given, Model | nn.Module) else built(lambda: _called(given), ("init", seed))
    if not network.param_names:
        frozen = "all of them are frozen (requires_grad=False)" if any(True for _ in network.net.parameters()) else "it has none"
        raise InputError(f"model must have parameters to train; of this {type(network.net).__name__} {frozen}")
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
        raise InputError(f"method must be a method or its text, such as 'fedavg() | dkd()', not {type(given).__name__}")
    return given if isinstance(given, Method) else parse(given)


def _dtype(given: torch.dtype | str | None, params: Tensors) -> torch.dtype:
    """The one asked for, or that of the weights."""
    wanted = next((tensor.dtype for tensor in params.values()), torch.float32) if given is None else given
    name = str(wanted).removeprefix("torch.")
    if name not in DTYPES:
        raise InputError(f"unknown dtype {name!r}; there are: {choices(DTYPES)}")
    return DTYPES[name]
