"""Predictions of a finished run's model on new examples."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from feddkd.data.transforms import Transform, transform
from feddkd.engines.select import find_device
from feddkd.errors import InputError
from feddkd.experiment import Experiment
from feddkd.models.functional import Model
from feddkd.runs.damage import check, raise_if_damaged
from feddkd.runs.files import parsed
from feddkd.runs.prepare import network
from feddkd.simulation import DTYPES
from feddkd.tasks.task import check_offers
from feddkd.tensors import to

AT_ONCE = 256  # examples in one forward pass


@dataclass(frozen=True)
class Predictions:
    """The names of the classes and, for each example, the probability of each class."""

    classes: list[str]
    probabilities: Tensor  # (N, classes)

    @property
    def labels(self) -> list[str]:
        """The most probable class of each example."""
        return [self.classes[number] for number in self.probabilities.argmax(1).tolist()]


def predict(
    folder: str | Path, x: Tensor, *, scale: float | None = None, device: str = "cpu"
) -> Predictions:
    """Return what the model in a run's folder predicts for examples.

    The folder is that of a finished run, or one that a node keeps for a result. `x` has the form
    that the run's examples had before the run's transform; `scale` is the largest value of a pixel
    (by default 255 for bytes and 1 for other numbers).
    """
    experiment, classes = _described(Path(folder))
    check_offers(experiment.parsed_task, frozenset({"classes"}), "predict")
    scale = (255.0 if x.dtype == torch.uint8 else 1.0) if scale is None else scale
    prepared, place = transform(experiment.transform_text, scale), find_device(device)
    dtype = DTYPES[experiment.dtype]
    with torch.no_grad():
        shape = tuple(prepared(x[:1], dtype).shape[1:])
        model = network(experiment, shape, len(classes))
        model = model.loaded(_weights(Path(folder) / "final.safetensors")).on(place, dtype)
        parts = [_probabilities(model, prepared, part.to(place), dtype) for part in _parts(x)]
    return Predictions(classes, torch.cat(parts)[:, : len(classes)])


def _parts(x: Tensor) -> list[Tensor]:
    if not len(x):
        raise InputError("there are no examples to predict")
    return [x[start : start + AT_ONCE] for start in range(0, len(x), AT_ONCE)]


def _probabilities(model: Model, prepared: Transform, x: Tensor, dtype: torch.dtype) -> Tensor:
    params, buffers = (to(group, x.device, dtype) for group in model.start())
    key = torch.tensor(0, device=x.device)
    return model(params, buffers, prepared(x, dtype), mode="eval", key=key).logits.softmax(1).cpu()


def _described(folder: Path) -> tuple[Experiment, list[str]]:
    """Return the experiment and the names of the classes; raise InputError if there are none, or
    if files are damaged.
    """
    raise_if_damaged(folder, check(folder))
    manifest, partition = (_page(folder / name) for name in ("manifest.json", "partition.json"))
    keys = {**manifest.get("experiment", {}), "initial": None, "initial_sha256": None}
    if manifest.get("made_by") == "simulate":
        raise InputError(f"the run in {folder} was made by simulate(): load its weights in Python")
    keys |= {"partition": "elsewhere()", "availability": "always()"}  # may name files
    experiment = Experiment(**keys)
    if experiment.canonical["model"] != manifest.get("canonical", {}).get("model"):
        raise InputError(f"the file with the network of {folder} has changed since the run")
    return experiment, [str(name) for name in partition.get("classes", [])]


def _page(path: Path) -> dict[str, Any]:
    try:
        return dict(parsed(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{path} cannot be read, so its model cannot be used: {error}") from None


def _weights(path: Path) -> dict[str, Tensor]:
    if not path.exists():
        raise InputError(f"there is no {path}: the run is not finished")
    try:
        return dict(load_file(path))
    except SafetensorError as error:
        raise InputError(f"{path} is damaged: {error}") from None
