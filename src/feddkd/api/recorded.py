"""A simulation with a record: `simulate(out=...)`."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from feddkd.engines.select import find_device
from feddkd.errors import InputError
from feddkd.method import own_tensors
from feddkd.rounds.loop import Row
from feddkd.runs.continuation import abreast, finished
from feddkd.runs.description import RunDescription
from feddkd.runs.files import parsed
from feddkd.runs.record import read_record
from feddkd.runs.recorder import PRIVATE
from feddkd.runs.session import RoundPlayed, RunEnded, Session
from feddkd.runs.signals import Halted
from feddkd.simulation import Job, Simulation
from feddkd.tensors import Tensors


@dataclass(frozen=True)
class Outcome:
    """The tensors and rows that a simulation leaves."""

    params: dict[str, torch.Tensor]
    history: list[Row]
    private: dict[int, Tensors]


def outcome_of(simulation: Simulation, history: list[Row]) -> Outcome:
    """Return what the only run of a simulation leaves; raise its error if it could not go on."""
    (run,) = simulation.runs
    if run.error is not None:
        raise run.error
    memos = simulation.engine.memos_of(0)
    private: dict[int, Tensors] = {}
    for client, memo in memos.items():
        if tensors := own_tensors(memo):
            private[client] = tensors
    return Outcome({**run.state["params"], **run.state["buffers"]}, history, private)


def simulate_recorded(
    job: Job,
    description: RunDescription,
    folder: Path,
    engine: str,
    device: str,
    after_round: Callable[[Row], bool],
) -> Outcome:
    """Run a job with a record, or continue it, or return the outcome of the finished record.

    The run ends early, and its record is finished, when `after_round` returns True.
    """
    check_same(folder, description)
    place = find_device(device)
    if finished(folder, description.digest) is not None:
        return _stored(job, folder, place)
    (group,) = abreast([folder], [description.digest], place, fresh=False)
    session = Session(job, [description], [folder], group.snapshots, keep_private=True)
    outcome: Outcome | None = None
    with closing(session.play(engine, device)) as events:
        try:
            for event in events:
                if isinstance(event, RoundPlayed) and after_round(event.row):
                    session.stopped = f"on_round ended it after round {event.row['round']}"
                elif isinstance(event, RunEnded):
                    outcome = outcome_of(session.simulation, session.histories[0])
        except Halted as halted:
            raise KeyboardInterrupt(str(halted)) from None
    assert outcome is not None
    return outcome


def check_same(folder: Path, description: RunDescription) -> None:
    """Raise an InputError if a folder holds the record of another run."""
    path = folder / "manifest.json"
    if not path.exists():
        return
    try:
        before = _identity(parsed(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} cannot be read: {error!r}") from None
    now = _identity(description.manifest)
    for key in {**now, **before}:
        if before.get(key) != now.get(key):
            was, is_now = _difference(str(before.get(key)), str(now.get(key)))
            raise InputError(
                f"{folder} holds another run: its {key} was {was}, now it is {is_now};"
                " give another folder as out="
            )


def _difference(before: str, now: str) -> tuple[str, str]:
    """Return two different texts, long ones from shortly before their first difference."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(before, now, strict=False))
    start = max(len(list(same)) - 20, 0)
    dots = "..." if start else ""
    return f"{dots}{before[start : start + 60]}", f"{dots}{now[start : start + 60]}"


def _identity(manifest: Any) -> dict[str, Any]:
    """Return what must be the same for a record to be continued."""
    more = {key: manifest.get(key) for key in ("weights", "constants", "groups")}
    return {**manifest["canonical"], **more}


def _stored(job: Job, folder: Path, device: torch.device) -> Outcome:
    """Return the outcome that a finished record holds."""
    model, params = job.model, {}
    for key, tensor in load_file(folder / "final.safetensors").items():
        name = model.tensors.saved.get(key, key)
        if name in model.param_names | model.buffer_names:
            params[name] = tensor.to(device)
    private: dict[int, dict[str, torch.Tensor]] = {}
    if (folder / PRIVATE).exists():
        for key, tensor in load_file(folder / PRIVATE).items():
            client, _, name = key.partition("/")
            private.setdefault(int(client), {})[name] = tensor.to(device)
    return Outcome(params, read_record(folder).history, dict(private))
