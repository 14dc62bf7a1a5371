"""The value that `simulate` returns."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from feddkd.api import tables
from feddkd.errors import InputError, choices
from feddkd.models.functional import Model
from feddkd.models.weight_files import weights_in_bytes
from feddkd.rounds.loop import Row
from feddkd.rounds.metrics import headline
from feddkd.runs.files import put
from feddkd.runs.summary import summarise
from feddkd.tensors import Tensors, only


@dataclass(frozen=True, repr=False)
class Result:
    """The outcome of a run: the final global tensors that were trained or averaged, and one row of
    numbers for each round.
    """

    params: dict[str, Tensor]
    history: list[Row]
    model: Model = field(compare=False)
    # client -> the tensors it keeps
    private: dict[int, Tensors] = field(default_factory=dict, compare=False)
    method: str = ""
    target: float | str | None = None  # whose cost is reported

    @property
    def summary(self) -> dict[str, Any]:
        """The numbers that people quote: accuracy at the best round and at the end, and costs.

        `to_target` has the round and the costs at which the target was reached, or None.
        """
        return summarise(self.history, self.target)

    def __repr__(self) -> str:
        return tables.as_text(*self._table())

    def _repr_html_(self) -> str:
        return tables.as_html(*self._table())

    def _table(self) -> tuple[list[str], list[list[str]], str]:
        metric = tables.metric_of(self.history)
        line = tables.cells(self.method, self.history, self.target)
        return tables.headings(self.target, metric), [line], tables.caption(self.history)

    def plot(self, axes: Any = None) -> Any:
        """Draw test accuracy against rounds with matplotlib, and return the axes.

        Methods that refine an average, as DKD does, also get the curve of the average.
        """
        return plot_accuracy(self.history, axes)

    def state_dict(self, client: int | None = None) -> dict[str, Any]:
        """Return a state dict for the network's `load_state_dict`: of the global model, or of the
        model of a client that keeps tensors.
        """
        kept = {} if client is None else self._private_of(client)
        tensors = {**self.params, **kept}
        if missing := sorted((self.model.param_names | self.model.buffer_names) - tensors.keys()):
            raise InputError(
                f"each client keeps its own {missing[0]!r}: name a client, as in"
                " state_dict(client=0)"
            )
        return self.model.state_dict(
            only(tensors, self.model.param_names), only(tensors, self.model.buffer_names)
        )

    def _private_of(self, client: int) -> Tensors:
        if self.private and client not in self.private:
            raise InputError(
                f"client {client} keeps no tensors; clients that do:"
                f" {choices(map(str, self.private))}"
            )
        return self.private.get(client, {})

    def save(self, path: str | Path) -> None:
        """Write the final model as safetensors: all that `state_dict()` returns, or the shared
        tensors if clients keep some.
        """
        put(Path(path), weights_in_bytes(self.model, self.params))


def plot_accuracy(history: Sequence[Mapping[str, Any]], axes: Any = None) -> Any:
    """Draw the headline metric of a run on the test set against its rounds; return the axes."""
    from matplotlib import pyplot

    metric = headline(history or [{}])

    if axes is None:
        _, axes = pyplot.subplots()
    curves = {metric.test_key: "test", metric.average_key: "test, before DKD (plain average)"}
    for key, label in curves.items():
        points = [(row["round"], metric.scale * row[key]) for row in history if key in row]
        if points:
            axes.plot(*zip(*points, strict=True), label=label)
    axes.set_xlabel("round")
    axes.set_ylabel(f"{metric.title} in %" if metric.percent else metric.title)
    axes.grid(alpha=0.3)
    axes.legend()
    return axes
