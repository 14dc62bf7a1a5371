"""Initial weights, from a state dict, a module or a safetensors file; final weights, to a file."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from feddkd.errors import InputError
from feddkd.models.functional import Model
from feddkd.tensors import Tensors, only

Initial = Mapping[str, Any] | nn.Module | Model | str | Path


def with_initial(model: Model, initial: Initial, sha256: str | None = None) -> Model:
    """Return the model with initial weights; a file must have the checksum, if one is given."""
    if isinstance(initial, str | Path):
        return model.loaded(_read(Path(initial), sha256))
    if isinstance(initial, Model):
        return model.loaded(initial.net.state_dict())
    if isinstance(initial, nn.Module):
        return model.loaded(initial.state_dict())
    if not isinstance(initial, Mapping):
        raise InputError(
            "initial must be a state dict, a module or the path of a safetensors file, not"
            f" {type(initial).__name__}"
        )
    return model.loaded(initial)


def weights_in_bytes(model: Model, tensors: Tensors) -> bytes:
    """Return a model as safetensors: its state dict, or these tensors if they are only a part."""
    if tensors.keys() >= model.param_names | model.buffer_names:
        state = model.state_dict(
            only(tensors, model.param_names), only(tensors, model.buffer_names)
        )
        tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    return save({name: tensor.contiguous().cpu() for name, tensor in tensors.items()})


def file_digest(path: str | None) -> str:
    """Return the sha256 of a file with initial weights."""
    if path is None:
        raise InputError(
            "initial_sha256 is given without a file; add one, as in initial = 'weights.safetensors'"
        )
    return hashlib.sha256(_bytes(Path(path))).hexdigest()


def _read(path: Path, sha256: str | None) -> dict[str, Any]:
    content = _bytes(path)
    if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
        raise InputError(
            f"the file {path} does not hold the initial weights of this experiment: its sha256 is"
            f" not {sha256[:12]}..."
        )
    try:
        return load(content)
    except SafetensorError as error:
        raise InputError(
            f"{path} is not a safetensors file ({error}); write one with"
            " safetensors.torch.save_file"
        ) from None


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read the initial weights {path}: {error.strerror}") from None
