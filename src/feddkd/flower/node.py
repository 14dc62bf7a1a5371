"""What a client does with a message, without Flower: (page, tensors, what it keeps) -> (page,
tensors, what it keeps).

A page names the experiment, the client, the exchange's key and the tag of what the client should
hold. The method is code that every node has; no code comes with a message.
"""

import functools
import json
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from feddkd.data.batches import Source
from feddkd.data.examples import Examples, examples
from feddkd.data.federation import Federation
from feddkd.data.transforms import transform
from feddkd.engines.client import answer, retained, seeded
from feddkd.errors import InputError
from feddkd.experiment import Experiment
from feddkd.flower import client_masking
from feddkd.flower.app_bases import Kept
from feddkd.flower.messages import Page
from feddkd.flower.shares import names_of
from feddkd.flower.wire import FIRST, NOTHING, WireError, pack, unpack
from feddkd.method import Phase
from feddkd.models.functional import Model
from feddkd.randomness import Key
from feddkd.rounds import diagnostics
from feddkd.rounds.evaluation import find_phase
from feddkd.rounds.metrics import find_metrics
from feddkd.runs.prepare import network, prepare
from feddkd.simulation import DTYPES, Job, Start, begin
from feddkd.tensors import Groups

# Flower's context -> (x, y) or (x, y, x_test, y_test): a client's own examples
Load = Callable[[Any], Any]


@dataclass(frozen=True)
class Own:
    """What a node is: part p of P, which stands for the clients p, p + P, ...; and where their
    examples come from.
    """

    part: int
    parts: int
    folder: Path | None = None  # with the experiment's data, of which the clients take their part
    load: Load | None = None  # or examples of the node's own
    secure: bool = False  # whether its clients upload nothing that is not masked
    context: Any = field(default=None, compare=False)

    def clients(self, experiment: Experiment) -> range:
        return range(self.part, experiment.clients, self.parts)

    def check(self, client: int, experiment: Experiment) -> None:
        if client not in self.clients(experiment):
            raise WireError(
                f"client {client} is not here; this node stands for"
                f" {list(self.clients(experiment))}"
            )

    def federation(self, experiment: Experiment, facts: Mapping[str, Any]) -> Federation:
        return (
            prepare(experiment, self.folder).federation
            if self.load is None
            else self._loaded(experiment, facts)
        )

    def _loaded(self, experiment: Experiment, facts: Mapping[str, Any]) -> Federation:
        """A federation in which nobody but this client holds anything."""
        assert self.load is not None
        clients = self.clients(experiment)
        if len(clients) != 1:
            raise InputError(
                f"a node with examples of its own is one client; this one stands for {len(clients)}"
            )
        x, y, *test = self.load(self.context)
        held = [examples((x, y)), *([examples(tuple(test))] if test else [])]
        for part in held:
            _check_facts(part, facts)
        cut, end, nobody = len(held[0]), sum(map(len, held)), np.arange(0)
        mine, tests = (
            [own if k in clients else nobody for k in range(experiment.clients)]
            for own in (np.arange(cut), np.arange(cut, end))
        )
        return Federation(
            x=torch.cat([part.x for part in held]),
            y=torch.cat([part.y for part in held]),
            classes=facts["classes"],
            transform=transform(experiment.transform_text, facts["scale"]),
            train=tuple(mine),
            own_test=tuple(tests),
            validation=nobody,
            test=nobody,
        )


def _check_facts(part: Examples, facts: Mapping[str, Any]) -> None:
    if list(part.x.shape[1:]) != list(facts["shape"]):
        raise InputError(
            f"the examples here are of shape {tuple(part.x.shape[1:])}, and the federation's"
            f" {tuple(facts['shape'])}"
        )
    if int(part.y.max()) >= facts["classes"]:
        raise InputError(
            f"labels here go up to {int(part.y.max())}, and the federation has {facts['classes']}"
            " classes"
        )


@dataclass(frozen=True)
class NodeExperiment:
    """Everything at hand for the clients of one node in one experiment."""

    experiment: Experiment
    model: Model
    federation: Federation
    first: Groups  # what every client begins with
    outputs: int  # the number of logits of an example

    def phase(self, key: Key, name: str) -> Phase:
        if key[0] == "evaluate":
            metrics = find_metrics(self.experiment.metrics)
            return find_phase(name, metrics, self.outputs, self.federation.classes)
        if key[0] == "diagnose":
            return diagnostics.PHASE
        _, round, index, step = (int(part) for part in key)
        plan = self.experiment.parsed_method.fitted(self.model).plan(round)
        found = [
            e.phase
            for e in plan
            if (e.index, e.step, e.phase.at) == (index, step, "clients") and e.phase.client
        ]
        if len(found) != 1:
            raise WireError(
                f"there is no exchange {index}, step {step}, in round {round} of"
                f" {self.experiment.method}"
            )
        return found[0]

    def masked(self, page: Page, upload: Groups, kept: Kept) -> tuple[bytes, Kept]:
        client, phase = int(page["client"]), self.phase(tuple(page["key"]), page["phase"])
        examples = self.counts(client)[phase.reads.source]
        return client_masking.masked(
            client, page, _short(self.experiment), phase.collect, examples, upload, kept
        )

    def counts(self, client: int) -> dict[str, int]:
        return {
            source: len(self.federation.indices(source, client))
            for source in typing.get_args(Source)
        }

    def answer(self, page: Page, sent: Groups, memo: Groups) -> tuple[Groups, Groups]:
        client, key = int(page["client"]), (*page["key"], int(page["client"]))
        phase = self.phase(tuple(page["key"]), page["phase"])
        if not len(self.federation.indices(phase.reads.source, client)):
            raise InputError(f"client {client} has no {phase.reads.source} examples")
        with seeded(key, self.federation.x.device):
            return answer(
                self.model,
                phase,
                sent,
                memo,
                self.federation,
                client,
                key,
                DTYPES[self.experiment.dtype],
            )


@functools.lru_cache(maxsize=1)
def _open(own: Own, spelled: str, told: str) -> NodeExperiment:
    experiment, facts = Experiment(**json.loads(spelled)), json.loads(told)
    if experiment.runs_a_file:  # a server must not choose which of the node's files is run
        raise InputError("an experiment that names a Python file does not run on Flower nodes")
    federation = own.federation(experiment, facts)
    model = network(experiment, federation.shape, facts["classes"])
    start = Start(experiment.seed, federation, *model.start())
    job = Job(model, experiment.parsed_method, [start], dtype=DTYPES[experiment.dtype])
    begun = begin(job, federation.x.device)
    return NodeExperiment(experiment, begun.model, federation, begun.memos[0], begun.outputs)


def open_desk(own: Own, page: Page) -> NodeExperiment:
    """The desk for an experiment, kept until another comes: in a process that stays, data are read
    once.
    """
    return _open(
        own,
        json.dumps(page["experiment"], sort_keys=True),
        json.dumps(page["facts"], sort_keys=True),
    )


def introduce(own: Own, page: Page, kept: Kept) -> Page:
    """Which clients are here, how many examples they have, and which tags they hold."""
    desk = open_desk(own, page)
    clients = own.clients(desk.experiment)
    return {
        "clients": {
            k: {"counts": desk.counts(k), "held": [NOTHING, *_of(kept, k)]} for k in clients
        }
    }


def ask(own: Own, what: str, page: Page, kept: Kept) -> tuple[Page, Kept]:
    """A question besides an exchange: who is here; and what secure aggregation needs."""
    if what == "info":
        return introduce(own, page, kept), kept
    experiment, client, session = (
        Experiment(**page["experiment"]),
        int(page["client"]),
        str(page["session"]),
    )
    own.check(client, experiment)
    # its plan is the method's own: where that depends on the network, nothing is summed
    if what == "keys":
        round, plan = int(page["round"]), experiment.parsed_method.plan(int(page["round"]))
        return client_masking.begin(
            client, session, _short(experiment), round, names_of(plan), kept
        )
    if what == "shares":
        return client_masking.deal(client, session, int(page["threshold"]), page["public"], kept)
    if what == "unmask":
        return client_masking.reveal(
            client, session, str(page["exchange"]), page["survivors"], kept
        )
    raise WireError(f"nobody here knows what query.{what} means")


def respond(own: Own, page: Page, sent: bytes, kept: Kept) -> tuple[Page, bytes, Kept]:
    """One client's part in one exchange.

    What it kept before stays until the server has named what came after: an answer that is lost or
    late leaves no trace. What it held when the round began stays as long as the round: a server may
    have to play it again.
    """
    client, expected = int(page["client"]), str(page["expects"])
    desk, held = open_desk(own, page), _of(kept, client)
    own.check(client, desk.experiment)
    if own.secure and page["key"][0] != "evaluate" and "secure" not in page:
        raise WireError(
            "this node uploads nothing that is not masked, and the server has not asked for masks"
            " (--secure)"
        )
    if expected not in (FIRST, NOTHING, *held):
        return {"client": client, "lost": True}, b"", kept
    memo = (
        desk.first if expected == FIRST else {} if expected == NOTHING else unpack(held[expected])
    )
    upload, after = desk.answer(page, unpack(sent), memo)
    content, kept = desk.masked(page, upload, kept) if "secure" in page else (pack(upload), kept)
    if page["retain"] is None:
        return {"client": client, "held": expected}, content, kept
    after = retained(after, frozenset(page["retain"]))
    tag = _tag(desk, page, memo, after)
    now = {name: held[name] for name in (expected, page["before"]) if name in held}
    if tag not in (NOTHING, expected):
        now[tag] = pack(after)
    others = {name: content for name, content in kept.items() if not name.startswith(f"{client}:")}
    return (
        {"client": client, "held": tag},
        content,
        {**others, **{f"{client}:{name}": content for name, content in now.items()}},
    )


def _tag(desk: NodeExperiment, page: Page, before: Groups, after: Groups) -> str:
    """A name for what a client holds now; a new one only if the exchange has changed it."""
    if not after:
        return NOTHING
    if page["expects"] != FIRST and _identity(before) == _identity(after):
        return str(page["expects"])
    return "-".join([_short(desk.experiment), *map(str, page["key"])])


def _short(experiment: Experiment) -> str:
    """An experiment in tags."""
    return experiment.digest[:12]


def _identity(groups: Groups) -> dict[str, dict[str, int]]:
    return {
        group: {name: id(tensor) for name, tensor in own.items()} for group, own in groups.items()
    }


def _of(kept: Kept, client: int) -> Kept:
    """What one of the node's clients keeps, by tag."""
    mine = f"{client}:"
    return {
        name.removeprefix(mine): content for name, content in kept.items() if name.startswith(mine)
    }
