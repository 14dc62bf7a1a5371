"""The node's part of a federation, without Flower: it reads a request and returns the reply.

A request names the experiment, the client, the exchange's key and the tag of the tensors that the
client should hold. Every node has the method's code; no code comes with a message.
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

from feddkd.data.batches import Indices, Source
from feddkd.data.examples import Examples, examples
from feddkd.data.federation import Federation
from feddkd.data.transforms import transform
from feddkd.engines.client import answer, retained, seeded
from feddkd.engines.interface import purpose_of
from feddkd.errors import InputError
from feddkd.experiment import Experiment
from feddkd.flower.messages import (
    ClientInfo,
    ExchangeReply,
    ExchangeRequest,
    FederationFacts,
    KeysRequest,
    MaskingOrder,
    NodeInfo,
    NodeRequest,
    SharesRequest,
    UnmaskRequest,
    WireMessage,
)
from feddkd.flower.wire import FIRST, NOTHING, NodeMemory, WireError, pack, unpack
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
class NodeConfig:
    """A node's number, its clients (part p of P has the clients p, p + P, ...) and its data."""

    part: int
    parts: int
    folder: Path | None = None  # with the experiment's data, of which the clients take their part
    load: Load | None = None  # or a function that loads the node's own examples
    secure: bool = False  # True: the clients refuse to upload without masks
    context: Any = field(default=None, compare=False)

    def clients(self, experiment: Experiment) -> range:
        """Return the node's clients."""
        return range(self.part, experiment.clients, self.parts)

    def check(self, client: int, experiment: Experiment) -> None:
        """Raise WireError if a client is not one of the node's."""
        clients = self.clients(experiment)
        if client not in clients:
            raise WireError(f"client {client} is not on this node, which has {list(clients)}")

    def federation(self, experiment: Experiment, facts: FederationFacts) -> Federation:
        """Return the part of the experiment's data that this node has."""
        if self.load is None:
            return prepare(experiment, self.folder).federation
        return self._loaded(self.load, experiment, facts)

    def _loaded(self, load: Load, experiment: Experiment, facts: FederationFacts) -> Federation:
        """Return a federation in which only this node's client has examples."""
        clients = self.clients(experiment)
        if len(clients) != 1:
            raise InputError(
                f"a node with its own examples must have one client; this one has {len(clients)}"
            )
        x, y, *test = load(self.context)
        parts = [examples((x, y)), *([examples(tuple(test))] if test else [])]
        for part in parts:
            _check_facts(part, facts)
        cut, end, none = len(parts[0]), sum(map(len, parts)), np.arange(0)

        def only_here(indices: Indices) -> tuple[Indices, ...]:
            return tuple(indices if k in clients else none for k in range(experiment.clients))

        return Federation(
            x=torch.cat([part.x for part in parts]),
            y=torch.cat([part.y for part in parts]),
            classes=facts.classes,
            transform=transform(experiment.transform_text, facts.scale),
            train=only_here(np.arange(cut)),
            own_test=only_here(np.arange(cut, end)),
            validation=none,
            test=none,
        )


def _check_facts(part: Examples, facts: FederationFacts) -> None:
    shape = tuple(part.x.shape[1:])
    if shape != facts.shape:
        raise InputError(
            f"the examples of this node have shape {shape}; the federation's have {facts.shape}"
        )
    if int(part.y.max()) >= facts.classes:
        raise InputError(
            f"the largest label of this node is {int(part.y.max())}; the federation has"
            f" {facts.classes} classes, so it may be {facts.classes - 1} at most"
        )


@dataclass(frozen=True)
class NodeExperiment:
    """The data and the model that a node's clients need in one experiment."""

    experiment: Experiment
    model: Model
    federation: Federation
    first: Groups  # the tensors that every client starts with
    outputs: int  # the number of logits of an example

    def phase(self, key: Key, name: str) -> Phase:
        """Return the phase of the exchange with this key."""
        if purpose_of(key) == "evaluate":
            metrics = find_metrics(self.experiment.metrics)
            return find_phase(name, metrics, self.outputs, self.federation.classes)
        if purpose_of(key) == "diagnose":
            return diagnostics.PHASE
        _, round, index, step = (int(part) for part in key)
        for exchange in self.experiment.parsed_method.fitted(self.model).plan(round):
            phase = exchange.phase
            same = (exchange.index, exchange.step) == (index, step)
            if same and phase.at == "clients" and phase.client:
                return phase
        raise WireError(
            f"{self.experiment.method} has no exchange {index}, step {step}, in round {round}"
        )

    def counts(self, client: int) -> dict[str, int]:
        """Return the sizes of a client's data sets."""
        return {
            source: len(self.federation.indices(source, client))
            for source in typing.get_args(Source)
        }

    def answer(self, request: ExchangeRequest, sent: Groups, memo: Groups) -> tuple[Groups, Groups]:
        """Compute a client's upload, and the tensors that it holds afterwards."""
        client, key = request.client, (*request.key, request.client)
        phase = self.phase(request.key, request.phase)
        if not len(self.federation.indices(phase.reads.source, client)):
            raise InputError(f"client {client} has no {phase.reads.source} examples")
        dtype = DTYPES[self.experiment.dtype]
        with seeded(key, self.federation.x.device):
            return answer(self.model, phase, sent, memo, self.federation, client, key, dtype)

    def masked(
        self, request: ExchangeRequest, order: MaskingOrder, upload: Groups, memory: NodeMemory
    ) -> tuple[bytes, NodeMemory]:
        """Return the masked upload, packed."""
        from feddkd.flower import client_masking  # needs flwr; a node without masks does not

        phase = self.phase(request.key, request.phase)
        examples = self.counts(request.client)[phase.reads.source]
        return client_masking.masked(
            request, order, _short_digest(self.experiment), phase.collect, examples, upload, memory
        )


@functools.lru_cache(maxsize=1)
def _open(config: NodeConfig, experiment_text: str, facts_text: str) -> NodeExperiment:
    experiment = Experiment(**json.loads(experiment_text))
    if experiment.runs_a_file:  # a server must not choose which of the node's files is run
        raise InputError("an experiment that names a Python file does not run on Flower nodes")
    facts = FederationFacts.read(json.loads(facts_text))
    federation = config.federation(experiment, facts)
    model = network(experiment, federation.shape, facts.classes)
    start = Start(experiment.seed, federation, *model.start())
    job = Job(model, experiment.parsed_method, [start], dtype=DTYPES[experiment.dtype])
    begun = begin(job, federation.x.device)
    return NodeExperiment(experiment, begun.model, federation, begun.memos[0], begun.outputs)


def open_experiment(config: NodeConfig, request: NodeRequest) -> NodeExperiment:
    """Return the request's experiment, ready to compute.

    The last one is kept, so a process that stays reads the data once.
    """
    return _open(
        config,
        json.dumps(request.experiment, sort_keys=True),
        json.dumps(request.facts.as_json(), sort_keys=True),
    )


def describe(config: NodeConfig, request: NodeRequest, memory: NodeMemory) -> NodeInfo:
    """Return the node's clients with the sizes of their data sets and the tags that they hold."""
    opened = open_experiment(config, request)
    return NodeInfo(
        {
            client: ClientInfo(opened.counts(client), (NOTHING, *_held(memory, client)))
            for client in config.clients(opened.experiment)
        }
    )


def ask(
    config: NodeConfig, query: str, content: object, memory: NodeMemory
) -> tuple[WireMessage, NodeMemory]:
    """Answer a query, a request that is no part of an exchange: return (reply, memory)."""
    if query == "info":
        return describe(config, NodeRequest.read(content), memory), memory
    if query in ("keys", "shares", "unmask"):
        return _ask_for_secrets(config, query, content, memory)
    raise WireError(f"unknown query {query!r}; there are: info, keys, shares, unmask")


def _ask_for_secrets(
    config: NodeConfig, query: str, content: object, memory: NodeMemory
) -> tuple[WireMessage, NodeMemory]:
    """Answer a query of secure aggregation."""
    from feddkd.flower import client_masking, shares  # they need flwr

    if query == "shares":
        dealt = SharesRequest.read(content)
        config.check(dealt.client, Experiment(**dealt.experiment))
        return client_masking.deal(
            dealt.client, dealt.session, dealt.threshold, dealt.public, memory
        )
    if query == "unmask":
        asked = UnmaskRequest.read(content)
        config.check(asked.client, Experiment(**asked.experiment))
        return client_masking.reveal(
            asked.client, asked.session, asked.exchange, asked.survivors, memory
        )
    request = KeysRequest.read(content)
    experiment = Experiment(**request.experiment)
    config.check(request.client, experiment)
    # The plan need not fit the network: methods whose plan depends on it are not summed.
    plan = experiment.parsed_method.plan(request.round)
    return client_masking.begin(
        request.client,
        request.session,
        _short_digest(experiment),
        request.round,
        shares.names_of(plan),
        memory,
    )


def respond(
    config: NodeConfig, request: ExchangeRequest, sent: bytes, memory: NodeMemory
) -> tuple[ExchangeReply, bytes, NodeMemory]:
    """Do one client's part in one exchange: return (reply, packed upload, memory).

    The tensors that the client held before are kept until the server names their successors, so a
    reply that is lost or late changes nothing. Those that it held when the round began are kept as
    long as the round, because the server may have to play the round again.
    """
    client, expected = request.client, request.expects
    opened, held = open_experiment(config, request), _held(memory, client)
    config.check(client, opened.experiment)
    evaluating = purpose_of(request.key) == "evaluate"
    if config.secure and not evaluating and request.secure is None:
        raise WireError(
            "this node uploads nothing that is not masked, and the server did not ask for masks;"
            " start the server with --secure"
        )
    if expected not in (FIRST, NOTHING, *held):
        return ExchangeReply(client, lost=True), b"", memory
    memo = _memo(opened, expected, held)
    upload, after = opened.answer(request, unpack(sent), memo)
    if request.secure is None:
        content = pack(upload)
    else:
        content, memory = opened.masked(request, request.secure, upload, memory)
    if request.retain is None:
        return ExchangeReply(client, expected), content, memory
    after = retained(after, frozenset(request.retain))
    tag = _tag(opened, request, memo, after)
    kept = {name: held[name] for name in (expected, request.before) if name in held}
    if tag not in (NOTHING, expected):
        kept[tag] = pack(after)
    return ExchangeReply(client, tag), content, _with_held(memory, client, kept)


def _memo(opened: NodeExperiment, tag: str, held: Mapping[str, bytes]) -> Groups:
    """Return the tensors with this tag."""
    if tag == FIRST:
        return opened.first
    return {} if tag == NOTHING else unpack(held[tag])


def _tag(opened: NodeExperiment, request: ExchangeRequest, before: Groups, after: Groups) -> str:
    """Return a tag for a client's tensors after an exchange; a new one if they have changed."""
    if not after:
        return NOTHING
    if request.expects != FIRST and _identity(before) == _identity(after):
        return request.expects
    return "-".join([_short_digest(opened.experiment), *map(str, request.key)])


def _short_digest(experiment: Experiment) -> str:
    """Return the name of an experiment in tags."""
    return experiment.digest[:12]


def _identity(groups: Groups) -> dict[str, dict[str, int]]:
    return {
        group: {name: id(tensor) for name, tensor in tensors.items()}
        for group, tensors in groups.items()
    }


def _held(memory: NodeMemory, client: int) -> dict[str, bytes]:
    """Return the tensors that one of the node's clients holds, by tag."""
    prefix = f"{client}:"
    return {
        name.removeprefix(prefix): content
        for name, content in memory.items()
        if name.startswith(prefix)
    }


def _with_held(memory: NodeMemory, client: int, held: Mapping[str, bytes]) -> NodeMemory:
    """Return the node's memory after one of its clients holds these tensors and no others."""
    prefix = f"{client}:"
    others = {name: content for name, content in memory.items() if not name.startswith(prefix)}
    return {**others, **{f"{prefix}{tag}": content for tag, content in held.items()}}
