"""An experiment with its data loaded and divided and its network built."""

import functools
from dataclasses import dataclass
from pathlib import Path

from feddkd.data.examples import Data
from feddkd.data.federation import Federation, divide
from feddkd.data.partitions.registry import Split
from feddkd.data.sources.packed import check_held, unpack
from feddkd.data.sources.registry import Source
from feddkd.data.transforms import transform
from feddkd.errors import InputError
from feddkd.experiment import Experiment
from feddkd.models.functional import Model, built
from feddkd.models.weight_files import with_initial


@dataclass(frozen=True)
class Prepared:
    """An experiment with its data loaded and divided and its network built."""

    data: Data
    split: Split
    federation: Federation
    model: Model


@functools.lru_cache(maxsize=1)
def _load(source: Source, folder: Path | None) -> Data:
    """The runs of a sweep mostly share their data: read and check it once."""
    return unpack(source, folder) or source.load(folder)


def prepare(experiment: Experiment, folder: Path | None) -> Prepared:
    try:
        return _prepare(experiment, folder)
    except (RuntimeError, MemoryError) as error:  # torch's way to say that something is too large
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"{experiment.data} and {experiment.model} cannot be made ready: {reason or 'out of memory'}"
        ) from error


def _prepare(experiment: Experiment, folder: Path | None) -> Prepared:
    data = _load(experiment.parsed_data, folder)
    federation, split = divide(
        data,
        experiment.parsed_partition,
        transform(experiment.transform_text, data.scale),
        clients=experiment.clients,
        training=experiment.training,
        validation=experiment.validation,
        key=(experiment.seed if experiment.split_seed is None else experiment.split_seed,),
        public=experiment.public,
    )
    check_held(data, federation.parts)
    return Prepared(data, split, federation, network(experiment, federation.shape, data.classes))


def network(experiment: Experiment, shape: tuple[int, ...], classes: int) -> Model:
    """Return the experiment's network, built under its seed, with the weights it starts from."""
    model = built(lambda: experiment.architecture.build(shape, classes), ("init", experiment.seed))
    return (
        model
        if experiment.initial is None
        else with_initial(model, experiment.initial, experiment.initial_sha256)
    )
