"""A whole federation by seed: the real server and the real nodes on a virtual network with faults,
and what must be true of it afterwards, and after every event.

    no upload counts twice, and the result is that of `serial` with the same clients missing
    a client's two secrets of one exchange are never both known; masks cancel or nothing is opened
    no exchange lasts longer than its deadline, and every federation ends
    a server that is killed anywhere continues to the same numbers
    a node that lies harms only itself; with masks it may end one round, then it is put aside
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message
from safetensors.torch import load_file

from feddkd import Experiment, InputError
from feddkd.engines.interface import Order, Reply
from feddkd.engines.serial import Serial
from feddkd.errors import RunError
from feddkd.flower import node_experiment, roster, transport
from feddkd.flower.apps import NodeApp, engine_on
from feddkd.flower.node_data import Load
from feddkd.flower.transport import json_in
from feddkd.method import Exchange
from feddkd.models.functional import Model
from feddkd.runs.prepare import prepare
from feddkd.runs.record import find
from feddkd.runs.runner import execute
from feddkd.runs.session import job
from feddkd.simulation import Simulation, first_state
from flower_lies import lie, lie_of_secure
from virtual_network import Clock, Cut, Faults, Network

DEADLINE, JOIN, POLL = 10.0, 600.0, 0.2
LOCAL = "epochs=1, batch_size=8, lr=0.1"
METHODS = (
    f"fedavg({LOCAL})",
    f"fedavg({LOCAL}) | dkd(steps=2, batch_size=8, lr=0.3)",
    f"scaffold({LOCAL})",
    f"scaffold({LOCAL}) | dkd(steps=1, batch_size=8, lr=0.3)",
)
MOST_STARTS = 12  # of a server
Place = tuple[int, int, int]  # round, phase, step


class BrokenLawError(AssertionError):
    """A law does not hold in a federation."""


@dataclass(frozen=True)
class Plan:
    """A federation and what goes wrong in it."""

    seed: int
    experiment: Experiment
    faults: Faults
    secure: bool
    liar: int | None
    lies_at_joining: bool

    @property
    def nodes(self) -> int:
        return self.experiment.clients


def plan_of(seed: int, folder: Path) -> Plan:
    """Return the federation that a seed stands for."""
    draw = random.Random(f"plan {seed}")
    secure = draw.random() < 0.4
    clients = draw.choice((4, 5) if secure else (3, 4))
    experiment = Experiment(
        method=draw.choice(METHODS),
        data=f"npz(path='{data_file(folder)}')",
        partition="iid()",
        model="mlp(hidden='3')",
        clients=clients,
        cohort=clients if secure else draw.choice((clients, clients - 1)),
        rounds=draw.choice((2, 3)),
        validation=0.0,
        dtype="float64",
        seed=draw.choice((1, 2)),
    )
    kind = draw.choice(("network", "liar", "kills", "all"))
    lossy = kind in ("network", "all")
    faults = Faults(
        lost=draw.choice((0.0, 0.03, 0.1)) * lossy,
        slow=draw.choice((0.0, 0.05)) * lossy,
        twice=draw.choice((0.0, 0.1)) * lossy,
        damaged=draw.choice((0.0, 0.05)) * lossy,
        crash=draw.choice((0.0, 0.03)) * lossy,
        lies=draw.choice((0.2, 0.5, 1.0)) * (kind in ("liar", "all")),
        kills=draw.choice((1, 2, 3)) * (kind in ("kills", "all")),
    )
    liar, joining = draw.randrange(clients) if faults.lies else None, draw.random() < 0.2
    return Plan(seed, experiment, faults, secure, liar, joining)


def data_file(folder: Path) -> Path:
    """Return the file with the examples of all federations."""
    file = folder / "examples.npz"
    if not file.exists():
        draw = np.random.default_rng(0)
        x, y = draw.normal(size=(80, 1, 2, 2)).astype(np.float32), np.arange(80) % 3
        np.savez(file, x_train=x[:60], y_train=y[:60], x_test=x[60:], y_test=y[60:])
    return file


# --- a federation


@dataclass
class Federation:
    """The history of a federation."""

    plan: Plan
    folder: Path
    network: Network = field(init=False)
    ended: str = ""
    # the client's request that it answered last, in each exchange
    asked: dict[tuple[Place, int], dict[str, Any]] = field(default_factory=dict)
    revealed: dict[tuple[str, str, int], tuple[set[int], set[int]]] = field(default_factory=dict)
    threshold: int = 0

    def __post_init__(self) -> None:
        plan = self.plan
        self.network = Network(
            plan.seed,
            NodeApp(loader(plan.experiment), state=self.folder),
            plan.nodes,
            plan.faults,
            DEADLINE,
            lie_of_secure if plan.secure else lie,
            liar=plan.liar,
            secure=plan.secure,
        )
        self.network.watch = self.saw
        self.network.lies_at_joining = plan.lies_at_joining

    def saw(self, part: int, asked: Message, reply: Message) -> None:
        """Check a node's answer, and remember what it is an answer to."""
        request, kind = json_in(asked), asked.metadata.message_type
        if kind.startswith("train."):
            place = tuple(request["key"][1:])
            self.asked[place, request["client"]] = request
        if kind == "query.unmask":
            self._check_secrets(request)

    def _check_secrets(self, request: dict[str, Any]) -> None:
        """Check that the server could not learn both secrets of a member for an exchange."""
        session, exchange, teller = request["session"], request["exchange"], request["client"]
        for member in range(self.plan.nodes):
            place = (session, exchange, member)
            seeds, keys = self.revealed.setdefault(place, (set(), set()))
            (seeds if member in request["survivors"] else keys).add(teller)
            least = max(3, -(-2 * self.plan.nodes // 3))
            if len(seeds) >= least and len(keys) >= least:
                raise BrokenLawError(f"both secrets of client {member} in {place} are known")

    def run(self) -> None:
        """Run the server, and start it again whenever it is killed or gives up."""
        with virtual(self.network.clock):
            for start in range(MOST_STARTS):
                try:
                    self._serve(start)
                    return
                except Cut:
                    self._kill()
                except (InputError, RunError) as error:  # as with Restart=on-failure
                    self.network.note(f"the server gives up: {error}")
                    if not self.plan.faults.lost and not self.plan.faults.crash:
                        raise BrokenLawError(f"the server gave up: {error}") from error
                    self._kill()
        self.ended = "the server was started too often"

    def _kill(self) -> None:
        """Kill the server; it begins its round again."""
        self.network.kill_server()
        played = len(self.rows)
        self.asked = {where: one for where, one in self.asked.items() if where[0][0] <= played}

    def _serve(self, start: int) -> None:
        experiment, plan = self.plan.experiment, self.plan
        engine = engine_on(
            self.network,
            experiment,
            secure=plan.secure,
            deadline=DEADLINE,
            join=JOIN,
            poll=POLL,
            start_with=plan.nodes - 1 if plan.liar is not None and plan.lies_at_joining else None,
        )
        (summary,) = execute([experiment], out=self.folder, engine=engine)
        self.ended = str(summary.get("ended", ""))

    # --- afterwards

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for record in find(self.folder, begun=True) for row in record.history]

    def check(self) -> None:
        """Raise BrokenLawError if a law does not hold."""
        rows, limit = self.rows, self._time_limit()
        if self.network.clock.now > limit:
            raise BrokenLawError(f"it took {self.network.clock.now:.0f} s, more than {limit:.0f}")
        missing = {(t, *line) for t, row in enumerate(rows, 1) for line in row.get("missing", [])}
        if self._is_quiet():
            begun = self._round_of_the_last_to_join() if self.plan.lies_at_joining else 0
            harmed = {t for t, _, _, k, _ in missing if k != self.plan.liar}
            harmed |= {t for t, row in enumerate(rows, 1) if "ended" in row}
            harmed = {t for t in harmed if t > begun}
            if self.ended or len(harmed) > self.plan.secure:
                raise BrokenLawError(f"harmed: rounds {harmed}, ended: {self.ended!r} {rows}")
        if rows:
            self._compare(rows)

    def _round_of_the_last_to_join(self) -> float:
        """Return the round in which the last honest client trained for the first time."""
        first: dict[int, float] = {}
        for (t, _, _), client in sorted(self.asked):
            first.setdefault(client, t)
        honest = set(range(self.plan.nodes)) - {self.plan.liar}
        return max(first.get(client, float("inf")) for client in honest)

    def _is_quiet(self) -> bool:
        faults = self.plan.faults
        if self.plan.secure and faults.twice:
            # a client refuses a second order for one mask, and its refusal may come first; the
            # SuperLink hands out no message twice
            return False
        return not (faults.lost or faults.slow or faults.damaged or faults.crash or faults.kills)

    def _time_limit(self) -> float:
        exchanges = 12 * self.plan.experiment.rounds + 4
        starts = self.network.era + 1
        return starts * (exchanges * 1.2 * DEADLINE + JOIN * 1.2 + 3 * DEADLINE)

    def _compare(self, rows: Sequence[dict[str, Any]]) -> None:
        """Compare the rounds that were played with those of `serial`, the same clients missing."""
        tolerance = 1e-7 if self.plan.secure else 1e-10
        expected, weights = reference(self, rows)
        for row, like in zip(rows, expected, strict=True):
            for key in ("test_loss", "test_accuracy", "clients"):
                if row[key] != pytest.approx(like[key], abs=tolerance):
                    raise BrokenLawError(f"round {row['round']}: {key} {row[key]}, not {like[key]}")
        for file in self.folder.glob("*/final.safetensors"):
            for name, tensor in load_file(file).items():
                if not torch.allclose(tensor, weights[name], rtol=0, atol=tolerance):
                    raise BrokenLawError(
                        f"{name} differs by {(tensor - weights[name]).abs().max()}"
                    )


@contextmanager
def virtual(clock: Clock) -> Iterator[None]:
    """Let the server's waiting use a virtual clock, and let all nodes' experiments stay open."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "time", clock)
        patch.setattr(roster, "time", clock)
        patch.setattr(node_experiment, "_open", OPEN)
        patch.setattr(first_state, "prove", proved)
        yield


OPEN = lru_cache(maxsize=256)(node_experiment._open.__wrapped__)


def proved(model: Model, *_: Any) -> Model:
    """Return the model: other tests prove that it computes what its network computes."""
    return model


@lru_cache
def opened(experiment: Experiment) -> Any:
    """Return an experiment's data and network."""
    return prepare(experiment, None)


# --- what should have come out


@dataclass
class Told(Serial):
    """A serial engine to which the clients answer that answered in a federation."""

    missing: frozenset[tuple[Place, int]] = frozenset()
    short: dict[Place, tuple[int, int]] = field(default_factory=dict)
    trained: frozenset[tuple[Place, int]] = frozenset()
    anew: frozenset[tuple[Place, int]] = frozenset()  # clients that had lost what they kept

    def exchange(self, exchange: Exchange, orders: Sequence[Order]) -> list[Reply]:
        if orders[0].purpose != "train" or not exchange.phase.asks_clients:
            return super().exchange(exchange, orders)
        replies = []
        for order in orders:
            place = (int(order.key[1]), int(order.key[2]), int(order.key[3]))
            left = tuple(k for k in order.cohort if (place, k) not in self.missing)
            for client in left:
                if (place, client) in self.anew:
                    self.memos.pop((order.run, client), None)
            did = tuple(client for client in left if (place, client) in self.trained)
            reply = Reply((), {})
            if did:  # also where the sum was not opened: clients keep what they have computed
                (reply,) = super().exchange(exchange, [order._replace(cohort=did)])
            short = self.short.get(place)
            replies.append(Reply(left, {}, short) if short else reply)
        return replies


def reference(
    federation: Federation, rows: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Return the rows and the weights of the same run on a serial engine."""
    experiment = federation.plan.experiment
    phases = {
        (exchange.phase.name, exchange.step): (exchange.index, exchange.step)
        for exchange in experiment.parsed_method.plan(1)
    }
    missing = {
        ((t, *phases[phase, step]), client)
        for t, row in enumerate(rows, 1)
        for phase, step, client, _ in row.get("missing", [])
    }
    short = {
        (t, *phases[end["phase"], end["step"]]): (end["answered"], end["min_clients"])
        for t, row in enumerate(rows, 1)
        if (end := row.get("ended"))
    }
    anew = {
        where
        for where, request in federation.asked.items()
        if where not in missing and request["expects"] == ""
    }

    def engine(*parts: Any) -> Told:
        told = Told(*parts)
        told.missing, told.short, told.anew = frozenset(missing), short, frozenset(anew)
        told.trained = frozenset(federation.asked)
        return told

    ready = opened(experiment)
    planned = replace(job([experiment], [ready]), rounds=len(rows))
    with Simulation(planned, engine) as simulated:
        found = [by_run[0] for by_run in simulated.rounds()]
        state = simulated.runs[0].state
    return found, {**state["params"], **state["buffers"]}


@lru_cache
def loader(experiment: Experiment) -> Load:
    """Return the function by which nodes load their examples; the same for equal experiments, so
    that what nodes have opened is found again.
    """
    held = opened(experiment).federation

    def load(context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        own = held.train[int(context.node_config["partition-id"])]
        return held.x[own], held.y[own]

    return load


def federate(seed: int, shared: Path, folder: Path) -> Federation:
    """Run the federation of a seed and check its laws; raise BrokenLawError with its history."""
    federation = Federation(plan_of(seed, shared), folder)
    try:
        federation.run()
        federation.check()
    except Exception as error:
        told = "\n".join(line for line in federation.network.history if line)
        raise BrokenLawError(f"seed {seed}: {error}\n{federation.plan}\n{told}") from error
    return federation
