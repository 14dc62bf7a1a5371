"""Descriptions of runs: what a record says about a run before its first round."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from feddkd.data.examples import Data
from feddkd.data.federation import Federation
from feddkd.data.transforms import Transform
from feddkd.errors import InputError
from feddkd.experiment import USUAL, Experiment
from feddkd.models.functional import Model
from feddkd.models.state_dicts import tensors_digest
from feddkd.rounds.metrics import Metric, find_metrics, own_facts
from feddkd.runs.prepare import Prepared
from feddkd.simulation import Job
from feddkd.trees import named_tensors_of

AVERAGE = "the same, before DKD (plain average)"


@dataclass(frozen=True)
class RunDescription:
    """The facts about a run that its record has before the first round."""

    digest: str
    method: str
    seed: int
    labels: Sequence[str]  # names of the classes
    target: float | str | None  # of a metric on the test set, whose cost is reported
    manifest: Mapping[str, Any]  # the part of manifest.json that says what is run


def describe_experiment(experiment: Experiment, ready: Prepared) -> RunDescription:
    """Return the description of an experiment's run."""
    facts = {
        **manifest_of(experiment),
        "data": _data_facts(ready.data),
        "partition": {"digest": ready.split.digest, "sizes": ready.federation.sizes},
        **_network_facts(ready.model),
        **_own_metrics(experiment.measured),
    }
    labels, target = ready.data.class_names, experiment.target
    return RunDescription(
        experiment.digest, experiment.method, experiment.seed, labels, target, facts
    )


def _data_facts(data: Data) -> dict[str, Any]:
    """Return what identifies data; with the names of values, such as a vocabulary, if there are
    any that are not class labels.
    """
    facts = {"name": data.name, "digest": data.digest, "note": data.note}
    values = () if data.has_labels else data.labels
    return {**facts, **({"values": values} if values else {})}


def _own_metrics(metrics: Sequence[Metric]) -> dict[str, Any]:
    """Return how to show metrics that are not the package's, if there are any."""
    facts = own_facts(metrics)
    return {"own_metrics": facts} if facts else {}


def manifest_of(experiment: Experiment) -> dict[str, Any]:
    """Return the part of a manifest that follows from the experiment alone."""
    return {
        "experiment": experiment.as_dict(),
        "canonical": experiment.canonical,
        "digest": experiment.digest,
        "family": experiment.family,
        "protocol": _protocol(experiment.protocol.value),
    }


def describe_job(job: Job, built: bool, target: float | str | None) -> RunDescription:
    """Return the description of a run on data in memory.

    Data and first weights are identified by their digests, the method by its text, the network by
    the name of its class and its structure as torch prints it. The code of the network is not part
    of the digest. `built` says that a function built the network under the seed: then seeds of one
    family may differ in their first weights.
    """
    (start,) = job.starts
    method = _text_of(job)
    weights = tensors_digest({**start.params, **start.buffers})
    federation = start.federation
    data = tensors_digest(named_tensors_of("x", federation.x) | named_tensors_of("y", federation.y))
    partition = _partition_digest(federation)
    canonical = {
        "method": job.method.canonical,
        "data": f"memory(sha256={data!r})",
        "partition": f"memory(sha256={partition!r})",
        "model": _network_text(job.model, None if built else weights),
        "clients": job.clients,
        "cohort": job.cohort_size,
        "rounds": job.rounds,
        "seed": start.seed,
        "split_seed": start.seed,
        "evaluation": job.evaluation.protocol.name.lower(),
        "dtype": str(job.dtype).removeprefix("torch."),
        **_faults(job),
        **_task(job),
        **_transform(federation.transform),
        **_judging(job),
    }
    network = type(job.model.net).__name__
    given = {"method": method, "data": "memory", "partition": "memory", "model": network}
    spelled = {**canonical, **given, **({} if target is None else {"target": target})}
    if tuple(job.evaluation.metrics) != find_metrics(job.model.task.metrics):
        spelled["metrics"] = [metric.name for metric in job.evaluation.metrics]
    family = {key: value for key, value in canonical.items() if "seed" not in key}
    manifest = {
        "made_by": "simulate",
        "experiment": spelled,
        "canonical": canonical,
        "digest": _digest(canonical),
        "family": _digest(family),
        "protocol": _protocol(job.evaluation.protocol.value),
        "data": {"name": "memory", "digest": data, "note": ""},
        "partition": {"digest": partition, "sizes": federation.sizes},
        "weights": weights,
        **_groups(federation),
        **_network_facts(job.model),
        **_own_metrics(job.evaluation.metrics),
    }
    classes = federation.classes if "labels" in job.model.task.offers else 0
    labels = [str(label) for label in range(classes)]
    return RunDescription(_digest(canonical), method, start.seed, labels, target, manifest)


def _groups(federation: Federation) -> dict[str, str]:
    """Return the digest of the examples' groups, if they have any."""
    if federation.groups is None:
        return {}
    return {"groups": _digest({"groups": federation.groups.tolist()})}


def _text_of(job: Job) -> str:
    """Return the method's text; raise an InputError if a record could not tell what is run."""
    if not job.method.calls:
        raise InputError(
            "out= needs a method that has a text: register yours with"
            " feddkd.extend.METHODS.register, or leave out= away"
        )
    if not job.tolerance.availability.canonical:
        raise InputError("out= needs an availability that has a text, such as 'random(drop=0.1)'")
    return str(job.method)


def _protocol(test_accuracy: str) -> dict[str, str]:
    return {"test_accuracy": test_accuracy, "average_test_accuracy": AVERAGE}


def _task(job: Job) -> dict[str, str]:
    """Return the task if it is not the usual one; raise InputError if it has no text."""
    task = job.model.task
    if not task.calls:
        raise InputError(
            "out= needs a task that has a text: register yours with feddkd.extend.TASKS.register,"
            " or leave out= away"
        )
    return {} if task.canonical == USUAL["task"] else {"task": task.canonical}


def _transform(transform: Transform) -> dict[str, str]:
    """Return the transform, if it changes stored examples."""
    if not transform.steps and transform.scale == 1:
        return {}
    return {"transform": f"divide(by={transform.scale!r}) | {transform.canonical}"}


def _judging(job: Job) -> dict[str, Any]:
    """Return which rounds and clients are evaluated, if not all of them."""
    rule = job.evaluation
    chosen = {"evaluate_every": rule.every, "evaluate_clients": rule.clients}
    return {key: value for key, value in chosen.items() if value != USUAL[key]}


def _faults(job: Job) -> dict[str, Any]:
    """Return the keys about faults that differ from their defaults."""
    chosen = {
        "availability": job.tolerance.availability.canonical,
        "selection": job.selection.canonical,
        "attack": job.attack.canonical,
        "min_clients": job.tolerance.min_clients,
        "on_divergence": job.tolerance.on_divergence,
    }
    return {key: value for key, value in chosen.items() if value != USUAL[key]}


def _partition_digest(federation: Federation) -> str:
    """Return a digest of who holds which examples."""
    own = {"own_test": federation.own_test, "own_validation": federation.own_validation}
    lists: dict[str, Any] = {
        name: [indices.tolist() for indices in parts] for name, parts in own.items() if parts
    }
    lists |= {
        "train": [indices.tolist() for indices in federation.train],
        "test": federation.test.tolist(),
        "validation": federation.validation.tolist(),
        "public": federation.public.tolist(),
    }
    return _digest(lists)


def _network_text(model: Model, weights: str | None) -> str:
    printed = re.sub(r" at 0x[0-9a-f]+", "", repr(model.net))
    facts = {
        "name": type(model.net).__name__,
        "structure": hashlib.sha256(printed.encode()).hexdigest(),
        **({} if weights is None else {"weights": weights}),
    }
    return f"memory({', '.join(f'{key}={value!r}' for key, value in facts.items())})"


def _network_facts(model: Model) -> dict[str, Any]:
    """Return how many parameters a network trains, and a digest of its constants if it has any."""
    trained = [p for _, p in model.net.named_parameters() if p.requires_grad]
    facts: dict[str, Any] = {"parameters": sum(tensor.numel() for tensor in trained)}
    return {**facts, "constants": model.constants_digest} if model.constants else facts


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
