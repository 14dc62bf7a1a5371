"""An experiment that is open on a node: its data and its model, and one client's computation."""

import functools
import json
import typing
from collections.abc import Mapping
from dataclasses import dataclass

from feddkd.data.batches import Source
from feddkd.data.federation import Federation
from feddkd.engines.client import answer
from feddkd.engines.interface import purpose_of
from feddkd.engines.select import find_device
from feddkd.experiment import Experiment
from feddkd.flower.messages import ExchangeRequest, FederationFacts, MaskingOrder, NodeRequest
from feddkd.flower.node_data import NodeConfig
from feddkd.flower.sent_experiment import SentExperiment
from feddkd.flower.wire import NodeMemory, WireError
from feddkd.method import Phase
from feddkd.models.functional import Model
from feddkd.models.own_generator import OwnGenerator
from feddkd.models.weight_files import with_initial
from feddkd.randomness import Key
from feddkd.rounds import diagnostics
from feddkd.rounds.evaluation import Evaluation
from feddkd.rounds.evaluation_phases import Sample, find_phase
from feddkd.rounds.selection.cohorts import asking
from feddkd.runs.prepare import network, outputs_of
from feddkd.simulation import DTYPES, Job, Start, begin
from feddkd.tensors import Groups


@dataclass(frozen=True)
class NodeExperiment:
    """The data and the model that a node's clients need in one experiment."""

    name: str  # in tags
    experiment: Experiment
    model: Model
    federation: Federation
    first: Groups  # the tensors that every client starts with
    sample: Sample  # what one example's output and target look like
    malicious: Mapping[int, Groups]  # the first tensors of malicious clients, if they differ

    def phase(self, key: Key, name: str) -> Phase:
        """Return the phase of the exchange with this key."""
        if purpose_of(key) == "evaluate":
            preparing = self.experiment.parsed_method.judging
            if preparing is not None and name == preparing.name:
                return preparing
            return find_phase(name, self.experiment.measured, self.sample, self.federation.classes)
        if purpose_of(key) == "diagnose":
            return diagnostics.PHASE
        if purpose_of(key) == "select":
            return asking("utility" if name == asking("utility").name else "mean loss")
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

    def weights(self, client: int) -> dict[str, int] | None:
        """Return the weights of a client's data sets in means; None: the numbers of examples."""
        if self.federation.units is None:
            return None
        return {
            source: self.federation.weight(source, client) for source in typing.get_args(Source)
        }

    def answer(self, request: ExchangeRequest, sent: Groups, memo: Groups) -> tuple[Groups, Groups]:
        """Compute a client's upload, and the tensors that it holds afterwards."""
        client, key = request.client, (*request.key, request.client)
        phase = self.phase(request.key, request.phase)
        if not len(self.federation.indices(phase.reads.source, client)):
            raise WireError(f"client {client} has no {phase.reads.source} examples")
        dtype = DTYPES[self.experiment.dtype]
        with OwnGenerator(key, self.federation.device):
            return answer(self.model, phase, sent, memo, self.federation, client, key, dtype)

    def here(self, groups: Groups) -> Groups:
        """Return groups on the device of the node."""
        device = self.federation.device
        return {
            group: {name: tensor.to(device) for name, tensor in tensors.items()}
            for group, tensors in groups.items()
        }

    def masked(
        self,
        request: ExchangeRequest,
        order: MaskingOrder,
        upload: Groups,
        sent: Groups,
        memory: NodeMemory,
    ) -> tuple[bytes, NodeMemory]:
        """Return the masked upload, packed."""
        from feddkd.flower import client_masking  # needs flwr; a node without masks does not

        phase = self.phase(request.key, request.phase)
        examples = self.federation.weight(phase.reads.source, request.client)
        return client_masking.masked(
            request, order, self.name, phase.collect, examples, upload, sent, memory
        )


@functools.lru_cache(maxsize=1)
def _open(config: NodeConfig, experiment_text: str, facts_text: str) -> NodeExperiment:
    sent = config.read(json.loads(experiment_text))
    experiment = sent.experiment
    facts = FederationFacts.read(json.loads(facts_text))
    federation = config.federation(experiment, facts)
    model = _network(config, sent, federation)
    start = Start(experiment.seed, federation, *model.start())
    job = Job(
        model,
        experiment.parsed_method,
        [start],
        dtype=DTYPES[experiment.dtype],
        evaluation=Evaluation(metrics=experiment.measured),
        attack=experiment.parsed_attack,
    )
    begun = begin(job, find_device(config.device))
    return NodeExperiment(
        sent.name,
        experiment,
        begun.model,
        begun.federations[0],
        begun.memos[0],
        begun.sample,
        begun.malicious[0],
    )


def _network(config: NodeConfig, sent: SentExperiment, federation: Federation) -> Model:
    """Return the network; the weights that it starts from count only where clients keep some."""
    outputs = outputs_of(sent.experiment.parsed_task, federation)
    model = network(sent.experiment, federation.shape, outputs)
    if sent.initial_sha256 is None or not sent.experiment.parsed_method.personal:
        return model
    if config.initial is None:
        raise WireError(
            "clients of this method start from the run's first weights; start the node with"
            " --initial FILE"
        )
    return with_initial(model, config.initial, sent.initial_sha256)


def open_experiment(config: NodeConfig, request: NodeRequest) -> NodeExperiment:
    """Return the request's experiment, ready to compute.

    The last one is kept, so a process that stays reads the data once.
    """
    return _open(
        config,
        json.dumps(request.experiment, sort_keys=True),
        json.dumps(request.facts.as_json(), sort_keys=True),
    )
