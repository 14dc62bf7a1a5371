"""The data of a node: its part of the experiment's data, or its own examples."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from feddkd.data.batches import Indices
from feddkd.data.examples import Examples, examples
from feddkd.data.federation import Federation
from feddkd.data.transforms import transform
from feddkd.experiment import Experiment
from feddkd.flower.messages import FederationFacts
from feddkd.flower.sent_experiment import SentExperiment, read_sent
from feddkd.flower.wire import WireError
from feddkd.runs.prepare import prepare
from feddkd.trees import cat, first_tensor

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
    device: str = "cpu"  # where the clients compute
    network: Path | None = None  # the Python file with the network, if an experiment needs one
    initial: Path | None = None  # the weights that clients start from, for their private tensors
    results: Path | None = None  # where the models of finished runs are kept
    key: Path | None = None  # the node's private key, which signs its keys of a secure round
    peers: Path | None = None  # the folder with the public keys of the other hospitals
    least: int = 0  # the smallest threshold of a secure sum that the hospital accepts
    state: Path | None = None  # where the node keeps what it must not forget
    context: Any = field(default=None, compare=False)

    def clients(self, experiment: Experiment) -> range:
        """Return the node's clients."""
        return range(self.part, experiment.clients, self.parts)

    def read(self, keys: Mapping[str, Any]) -> SentExperiment:
        """Return the experiment that a server has sent."""
        brings_data = self.load is not None
        return read_sent(keys, brings_data=brings_data, folder=self.folder, network=self.network)

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
            raise WireError(
                f"a node with its own examples must have one client; this one has {len(clients)}"
            )
        x, y, *test = load(self.context)
        labels = "labels" in experiment.parsed_task.offers
        parts = [examples((x, y), labels), *([examples(tuple(test), labels)] if test else [])]
        for part in parts:
            _check_facts(part, facts, labels)
        cut, end, none = len(parts[0]), sum(map(len, parts)), np.arange(0)

        def only_here(indices: Indices) -> tuple[Indices, ...]:
            return tuple(indices if k in clients else none for k in range(experiment.clients))

        return Federation(
            x=cat([part.x for part in parts]),
            y=cat([part.y for part in parts]),
            classes=facts.classes,
            transform=transform(experiment.transform_text, facts.scale),
            train=only_here(np.arange(cut)),
            own_test=only_here(np.arange(cut, end)),
            validation=none,
            test=none,
        )


def _check_facts(part: Examples, facts: FederationFacts, labels: bool) -> None:
    shape = tuple(first_tensor(part.x).shape[1:])
    if shape != facts.shape:
        raise WireError(
            f"the examples of this node have shape {shape}; the federation's have {facts.shape}"
        )
    if labels and int(part.y.max()) >= facts.classes:
        raise WireError(
            f"the largest label of this node is {int(part.y.max())}; the federation has"
            f" {facts.classes} classes, so it may be {facts.classes - 1} at most"
        )
