"""A whole run in one call: `simulate` on data at hand, and the pieces that `feddkd run` puts together in the same way."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from feddkd.data.federation import Federation, assemble
from feddkd.data.sources import examples
from feddkd.data.transforms import transform
from feddkd.engines import Engine
from feddkd.engines.serial import Serial
from feddkd.errors import InputError, choices
from feddkd.evaluate import Protocol, fitting_protocol
from feddkd.method import Method
from feddkd.methods import parse
from feddkd.models import Model, functional
from feddkd.params import to
from feddkd.rounds import Row, Run, play
from feddkd.spelling import Count, Share, checked

ENGINES: Mapping[str, Callable[..., Engine]] = {"serial": Serial}
DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Result:
    """What a run leaves: the final global tensors, parameters and buffers alike, and one row a round."""

    params: dict[str, Tensor]
    history: list[Row]

    def save(self, path: str | Path) -> None:
        """Write the final tensors as safetensors."""
        save_file({name: tensor.contiguous().cpu() for name, tensor in self.params.items()}, path)


def simulate(
    *,
    model: nn.Module | Model,
    clients: Sequence[Any],
    test: Any,
    method: str | Method,
    validation: Any = None,
    rounds: int = 1,
    cohort: int | float = 1.0,
    seed: int = 0,
    engine: str = "serial",
    device: str = "cpu",
    initial: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | str | None = None,
) -> Result:
    """Run a method on clients' data: pairs (x, y) of tensors or arrays, or torch datasets of such pairs.

    `cohort` is a fraction of the clients (0.5) or a number of them (10). `initial` is a state dict to start from; without it the
    seed draws fresh weights by the layers' own `reset_parameters`, whatever the module's weights are now.
    """
    federation = assemble(
        [examples(client) for client in clients],
        examples(test),
        None if validation is None else examples(validation),
        transform(""),
    )
    network = model if isinstance(model, Model) else functional(model)
    chosen = parse(method) if isinstance(method, str) else method
    start = network.initial(("init", seed)) if initial is None else network.split(initial)
    history: list[Row] = []
    run = simulate_runs(
        network, chosen, [federation], [start], [seed],
        rounds=checked(rounds, Count, "rounds"), cohort=cohort, protocol=fitting_protocol(chosen, own_tests=False),
        engine=engine, device=device, dtype=_dtype(dtype), on_round=lambda rows: history.append(rows[0]),
    )[0]  # fmt: skip
    return Result({**run.state["params"], **run.state["buffers"]}, history)


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
    on_round: Callable[[list[Row]], None],
) -> list[Run]:
    """Runs of one method in lock-step: one federation, start and seed for each. `on_round` gets their rows as they come."""
    method.check_order()
    place = find_device(device)
    runs, memos = [], []
    for index, (federation, (params, buffers), seed) in enumerate(zip(federations, starts, seeds, strict=True)):
        state, memo = method.start(model, to(params, place, dtype), to(buffers, place, dtype))
        runs.append(Run(index, seed, state, has_validation=len(federation.validation) > 0))
        memos.append(memo)
    host = find_engine(engine)(model, [federation.to(place) for federation in federations], memos, dtype)
    size = cohort_size(cohort, len(federations[0].train))
    try:
        for rows in play(method, host, runs, cohort=size, last=rounds, protocol=protocol):
            on_round(rows)
    finally:
        host.close()
    return runs


def cohort_size(cohort: int | float, clients: int) -> int:
    """m = max(int(C K), 1) for a fraction C, or the number itself."""
    cohort = checked(cohort, Count | Share, "cohort")
    size = cohort if isinstance(cohort, int) else max(int(cohort * clients + 1e-9), 1)
    if size > clients:
        raise InputError(f"cohort asks for {size} clients, and there are {clients}")
    return size


def find_engine(name: str) -> Callable[..., Engine]:
    if name not in ENGINES:
        raise InputError(f"unknown engine {name!r}; there are: {choices(ENGINES)}")
    return ENGINES[name]


def find_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise InputError(f"device {name!r} is not to be had here; 'cpu' always is, 'cuda' where torch sees a GPU") from None
    return device


def _dtype(given: torch.dtype | str | None) -> torch.dtype:
    if isinstance(given, torch.dtype) and given in DTYPES.values():
        return given
    name = "float32" if given is None else str(given)
    if name not in DTYPES:
        raise InputError(f"unknown dtype {name!r}; there are: {choices(DTYPES)}")
    return DTYPES[name]
