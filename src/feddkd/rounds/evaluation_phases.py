"""The clients' half of an evaluation: phases that add up the sums of metrics over a test set."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from feddkd.data.batches import Reads, Source
from feddkd.errors import InputError
from feddkd.method import Batch, Collect, Fold, Phase, own_model, own_tensors
from feddkd.models.functional import Model
from feddkd.rounds.metrics import DEFAULT, LOSS, Metric
from feddkd.tasks.labels import CLASSIFICATION
from feddkd.tasks.task import Task
from feddkd.tensors import Groups
from feddkd.trees import Tree, kind_in_words, map_tensors

Shapes = dict[str, tuple[int, ...]]  # sum -> its shape


@dataclass(frozen=True, eq=False)
class Sample:
    """One example's output and target, with a first axis of length 1, and the task.

    They show the shapes of what metrics sum up.
    """

    output: Tensor
    target: Tree
    task: Task = CLASSIFICATION

    def sums(self, metrics: Sequence[Metric]) -> dict[str, Tensor]:
        """Return the sums of metrics over padding alone."""
        share = self.output.new_zeros(len(self.output))
        target = map_tensors(Tensor.cpu, self.target)
        padding = Batch((), target, share, torch.tensor(0))
        return _sums(self.task, metrics, self.output, padding)

    def check(self, metrics: Sequence[Metric]) -> None:
        """Raise InputError if a metric cannot be computed of such outputs and targets."""
        for metric in metrics:
            try:
                sums = self.sums([metric]).items()
                if metric.whole is None:
                    metric.value({name.removeprefix(f"{metric.name}."): s for name, s in sums})
            except Exception as error:
                reason = " ".join(str(error).split())
                if isinstance(error, KeyError):
                    reason = f"its sums have no {reason}"
                if isinstance(error, AttributeError) and not isinstance(self.target, Tensor):
                    reason = f"the target of an example is {kind_in_words(self.target)}"
                raise InputError(
                    f"metric {metric.name!r} does not go with {self.task.title}: {reason}"
                ) from error


ONE_OF_TWO = Sample(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64))


@lru_cache(maxsize=64)  # the same phase each time: engines recognise phases by identity
def judging(
    source: Source,
    metrics: tuple[Metric, ...] = DEFAULT,
    sample: Sample = ONE_OF_TWO,
    shared: bool = False,
) -> Phase:
    """Return the phase that adds up the sums of metrics on the validation or test set.

    `shared`: of the model sent, whatever else a client holds.
    """
    folded = (*metrics, *({LOSS} - set(metrics)))

    def step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        new = _sums(model.task, folded, _logits(model, carry, batch), batch)
        tally = {name: carry["tally"][name] + tensor for name, tensor in new.items()}
        return {**carry, "tally": tally}

    shapes = {name: tuple(tensor.shape) for name, tensor in sample.sums(folded).items()}
    start = partial(_start, shapes=shapes, shared=shared)
    return _phase(source, "evaluate", Fold(start, step, _finish, sums=True))


@lru_cache(maxsize=64)
def counting(classes: int, shared: bool = False) -> Phase:
    """Return the phase that counts test examples by label and prediction."""

    def step(model: Model, sent: Groups, carry: Groups, batch: Batch) -> Groups:
        logits = _logits(model, carry, batch)
        true = one_hot(batch.y, classes).double()
        # a network may have more outputs than there are classes: those have no column
        taken = one_hot(logits.argmax(-1), logits.shape[-1])[:, :classes].double()
        present = (batch.share > 0).double()
        counts = carry["tally"]["counts"] + (true * present[:, None]).T @ taken
        return {**carry, "tally": {"counts": counts}}

    start = partial(_start, shapes={"counts": (classes, classes)}, shared=shared)
    return _phase("test", "count", Fold(start, step, _finish, sums=True))


def find_phase(name: str, metrics: tuple[Metric, ...], sample: Sample, classes: int) -> Phase:
    """Return the phase of an evaluation by its name, for clients in another process."""
    sources: tuple[Source, ...] = ("validation", "test")
    phases = [judging(source, metrics, sample) for source in sources]
    return next((phase for phase in phases if phase.name == name), counting(classes))


def _sums(task: Task, metrics: Sequence[Metric], output: Tensor, batch: Batch) -> dict[str, Tensor]:
    """Return what a batch adds to the sums of all metrics; the loss is that of the task."""
    return {
        f"{metric.name}.{name}": tensor
        for metric in metrics
        for name, tensor in (
            _loss_sums(task, output, batch) if metric is LOSS else metric.sums(output, batch)
        ).items()
    }


def _loss_sums(task: Task, output: Tensor, batch: Batch) -> dict[str, Tensor]:
    shares = task.shares(batch.y, batch.share)
    count = (shares > 0).double().sum()
    return {"sum": task.loss(output, batch.y, shares).double() * count, "count": count}


def _start(model: Model, sent: Groups, memo: Groups, shapes: Shapes, shared: bool) -> Groups:
    kept = {} if shared else {"private": own_tensors(memo)}
    params, buffers = own_model(model, sent, kept)
    device = next(iter(params.values())).device
    tally = {
        name: torch.zeros(shape, dtype=torch.float64, device=device)
        for name, shape in shapes.items()
    }
    return {"params": params, "buffers": buffers, "tally": tally}


def _logits(model: Model, carry: Groups, batch: Batch) -> Tensor:
    return model(carry["params"], carry["buffers"], batch.x, mode="eval", key=batch.key).logits


def _finish(model: Model, sent: Groups, carry: Groups, memo: Groups) -> tuple[Groups, Groups]:
    return {"tally": carry["tally"]}, memo


def _phase(source: Source, name: str, client: Fold) -> Phase:
    return Phase(
        name=f"{name} on {source}",
        client=client,
        server=lambda model, state, collected, rates: state,
        reads=Reads(batch_size=1000, source=source, random=False),
        collect={"tally": Collect.EVERY},
    )
