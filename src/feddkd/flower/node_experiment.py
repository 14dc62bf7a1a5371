"""An experiment that is open on a node: its data and its model, and one client's computation."""

import functools
import json
import typing
from dataclasses import dataclass

from feddkd.data.batches import Source
from feddkd.data.federation import Federation
from feddkd.engines.client import answer, seeded
from feddkd.engines.interface import purpose_of
from feddkd.errors import InputError
from feddkd.experiment import Experiment
from feddkd.flower.messages import ExchangeRequest, FederationFacts, MaskingOrder, NodeRequest
from feddkd.flower.node_data import NodeConfig
from feddkd.flower.wire import NodeMemory, WireError
from feddkd.method import Phase
from feddkd.models.functional import Model
from feddkd.randomness import Key
from feddkd.rounds import diagnostics
from feddkd.rounds.evaluation import find_phase
from feddkd.rounds.metrics import find_metrics
from feddkd.runs.prepare import network
from feddkd.simulation import DTYPES, Job, Start, begin
from feddkd.tensors import Groups


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
        with seeded(key, self.federation.device):
            return answer(self.model, phase, sent, memo, self.federation, client, key, dtype)

    def masked(
        self, request: ExchangeRequest, order: MaskingOrder, upload: Groups, memory: NodeMemory
    ) -> tuple[bytes, NodeMemory]:
        """Return the masked upload, packed."""
        from feddkd.flower import client_masking  # needs flwr; a node without masks does not

        phase = self.phase(request.key, request.phase)
        examples = self.counts(request.client)[phase.reads.source]
        return client_masking.masked(
            request, order, short_digest(self.experiment), phase.collect, examples, upload, memory
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
    begun = begin(job, federation.device)
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


def short_digest(experiment: Experiment) -> str:
    """Return the name of an experiment in tags."""
    return experiment.digest[:12]
