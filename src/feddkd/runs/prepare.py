"""Experiments made ready to run: data loaded and divided, network built."""

import functools
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from feddkd.data.division import divide
from feddkd.data.examples import Data
from feddkd.data.federation import Federation
from feddkd.data.partitions.registry import Split
from feddkd.data.sources.packed import check_held, unpack
from feddkd.data.sources.registry import Source
from feddkd.data.transforms import transform
from feddkd.errors import InputError
from feddkd.experiment import Experiment
from feddkd.models.functional import Model, built
from feddkd.models.weight_files import with_initial
from feddkd.rounds.metrics import check_target
from feddkd.tasks.task import Task
from feddkd.trees import kind_in_words


@dataclass(frozen=True)
class Prepared:
    """An experiment with its data loaded and divided and its network built."""

    data: Data
    split: Split
    federation: Federation
    model: Model


@functools.lru_cache(maxsize=1)
def _load(source: Source, folder: Path | None) -> Data:
    """Load the data of a source. The last data are kept: runs of a sweep mostly share theirs."""
    return unpack(source, folder) or source.load(folder)


def prepare(experiment: Experiment, folder: Path | None) -> Prepared:
    """Return an experiment made ready to run; `folder` has the official data files."""
    try:
        return _prepare(experiment, folder)
    except (RuntimeError, MemoryError) as error:  # something is too large for torch
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"cannot load {experiment.data} or build {experiment.model}:"
            f" {reason or 'out of memory'}"
        ) from error


def _prepare(experiment: Experiment, folder: Path | None) -> Prepared:
    data = _load(experiment.parsed_data, folder)
    federation, split = divide(
        data,
        experiment.parsed_partition,
        transform(_steps(experiment, data), data.scale),
        clients=experiment.clients,
        training=experiment.training,
        validation=experiment.validation,
        key=experiment.split_key,
        public=experiment.public,
        own_tests=experiment.client_tests == "own",
    )
    check_held(data, federation.parts)
    check_targets(experiment.parsed_task, data)
    check_target(experiment.target, experiment.measured)
    outputs = outputs_of(experiment.parsed_task, federation)
    federation = replace(federation, classes=federation.classes or outputs)
    return Prepared(data, split, federation, network(experiment, federation.shape, outputs))


def _steps(experiment: Experiment, data: Data) -> str:
    """Return the text of the transform; that of a source is for examples of one tensor."""
    several = not isinstance(data.train.x, Tensor)
    return "" if several and experiment.transform is None else experiment.transform_text


def check_targets(task: Task, data: Data) -> None:
    """Raise InputError if a task needs class labels and the data have none."""
    if "labels" in task.offers and not data.has_labels:
        raise InputError(
            f"{task.title} needs one class label for each example, and data {data.name!r} have"
            f" targets {kind_in_words(data.train.y)}: name another task, as in task = 'regression'"
        )


def outputs_of(task: Task, federation: Federation) -> int:
    """Return the number of outputs of a network that is built by its name."""
    return task.outputs(task.prepare(federation.y), federation.classes)


def network(experiment: Experiment, shape: tuple[int, ...], outputs: int) -> Model:
    """Return the experiment's network, built under its seed, with the weights it starts from."""
    model = built(lambda: experiment.architecture.build(shape, outputs), ("init", experiment.seed))
    model = replace(model, task=experiment.parsed_task)
    if experiment.initial is None:
        return model
    return with_initial(model, experiment.initial, experiment.initial_sha256)
