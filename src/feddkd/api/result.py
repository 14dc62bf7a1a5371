"""What `simulate` returns."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from feddkd.errors import InputError, choices
from feddkd.models.functional import Model
from feddkd.models.weight_files import write_weights
from feddkd.rounds.loop import Row
from feddkd.tensors import Tensors, only


@dataclass(frozen=True)
class Result:
    """What a run leaves: the final global tensors that were trained or averaged, and one row a
    round.
    """

    params: dict[str, Tensor]
    history: list[Row]
    model: Model = field(repr=False, compare=False)
    # client -> the tensors it keeps
    private: dict[int, Tensors] = field(default_factory=dict, repr=False, compare=False)

    def state_dict(self, client: int | None = None) -> dict[str, Any]:
        """Return what the network's `load_state_dict` takes: the global model, or the model of a
        client that keeps tensors.
        """
        own = {} if client is None else self._private_of(client)
        found = {**self.params, **own}
        if missing := sorted((self.model.param_names | self.model.buffer_names) - found.keys()):
            raise InputError(
                f"{missing[0]!r} is each client's own: say whose model is wanted, as in"
                " state_dict(client=0)"
            )
        return self.model.state_dict(
            only(found, self.model.param_names), only(found, self.model.buffer_names)
        )

    def _private_of(self, client: int) -> Tensors:
        if self.private and client not in self.private:
            raise InputError(
                f"client {client} keeps no tensors; those that do:"
                f" {choices(map(str, self.private))}"
            )
        return self.private.get(client, {})

    def save(self, path: str | Path) -> None:
        """Write the final model as safetensors: what `state_dict()` returns, or the shared tensors
        where clients keep some.
        """
        write_weights(self.model, self.params, Path(path))
