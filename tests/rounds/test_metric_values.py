"""Every metric against scikit-learn on random predictions, with absent classes, single classes,
padding, ignored positions and batches that hold nothing to judge.
"""

import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as exact
from torch import Tensor
from torch.func import vmap

from feddkd import InputError
from feddkd.engines.compile.simplify import trimmed
from feddkd.method import Batch
from feddkd.rounds.metrics import METRICS

IGNORED = -100
Arrays = tuple[Any, Any]  # (outputs, targets) of the positions that count, as numpy arrays


class Predictions(NamedTuple):
    """Outputs and targets of a batch; the last `padding` examples are padding."""

    output: Tensor
    y: Tensor
    padding: int = 0

    @property
    def batch(self) -> Batch:
        share = torch.full((len(self.y),), 1.0)
        share[len(self.y) - self.padding :] = 0
        share = share / share.sum().clamp(min=1)
        return Batch(self.output, self.y, share, torch.tensor(0))

    @property
    def kept(self) -> "Predictions":
        """The same without padding."""
        end = len(self.y) - self.padding
        return Predictions(self.output[:end], self.y[:end])


def value(name: str, given: Predictions) -> float:
    metric = METRICS[name]
    return float(metric.value(metric.sums(given.output, given.batch)))


# --- random predictions of each kind


def labels(draw: torch.Generator, shape: tuple[int, ...], classes: int, used: int) -> Tensor:
    """Return labels that are one of the first `used` classes of a random order."""
    order = torch.randperm(classes, generator=draw)
    return order[torch.randint(0, used, shape, generator=draw)]


def single(draw: torch.Generator, n: int, classes: int, used: int) -> Predictions:
    logits = 3 * torch.randn(n, classes, generator=draw, dtype=torch.float64)
    return Predictions(logits, labels(draw, (n,), classes, used))


def binary(draw: torch.Generator, n: int, classes: int, used: int) -> Predictions:
    z = 2 * torch.randn(n, 1, generator=draw, dtype=torch.float64)
    return Predictions(z, labels(draw, (n,), 2, min(used, 2)))


def several(draw: torch.Generator, n: int, classes: int, used: int) -> Predictions:
    logits = torch.randn(n, classes, generator=draw, dtype=torch.float64)
    y = (torch.rand(n, classes, generator=draw) < 0.4) * (torch.arange(classes) < used)
    return Predictions(logits, y.long())


def pictures(draw: torch.Generator, n: int, classes: int, used: int) -> Predictions:
    logits = torch.randn(n, classes, 3, 4, generator=draw, dtype=torch.float64)
    return Predictions(logits, ignoring(draw, labels(draw, (n, 3, 4), classes, used)))


def texts(draw: torch.Generator, n: int, classes: int, used: int) -> Predictions:
    logits = torch.randn(n, 6, classes, generator=draw, dtype=torch.float64)
    return Predictions(logits, ignoring(draw, labels(draw, (n, 6), classes, used)))


def ignoring(draw: torch.Generator, y: Tensor) -> Tensor:
    return y.where(torch.rand(y.shape, generator=draw) < 0.7, IGNORED)


def numbers(draw: torch.Generator, n: int, classes: int, used: int) -> Predictions:
    """The targets of one number in two do not vary if `used` is 1."""
    y = torch.randn(n, classes, generator=draw, dtype=torch.float64) + 5
    if used == 1:
        y[:, ::2] = 0.1
    return Predictions(y + torch.randn(n, classes, generator=draw, dtype=torch.float64), y)


# --- exact values


def of_labels(given: Predictions) -> Arrays:
    """Return logits (positions, classes) and labels of the positions that count."""
    output, y = given.kept.output, given.kept.y
    if output.ndim == 4:
        output = output.movedim(1, -1)
    if output.shape[-1] == 1:
        output = torch.cat([torch.zeros_like(output), output], -1)
    counted = y != IGNORED
    return output[counted].numpy(), y[counted].numpy()


def chances(logits: Any) -> Any:
    return torch.from_numpy(logits).softmax(-1).numpy()


def log_loss(logits: Any, y: Any) -> float:
    return float(exact.log_loss(y, chances(logits), labels=range(logits.shape[1])))


def one_of_five(logits: Any, y: Any) -> float:
    best = np.argsort(-logits, 1)[:, :5]
    return float((best == y[:, None]).any(1).mean())


def rest_auc(scores: Any, true: Any) -> float:
    """Return the mean over columns of AUC, for the columns with both kinds."""
    mixed = [c for c in range(true.shape[1]) if 0 < true[:, c].sum() < len(true)]
    each = [exact.roc_auc_score(true[:, c], scores[:, c]) for c in mixed]
    return float(np.mean(each)) if each else math.nan


def calibration(logits: Any, y: Any) -> float:
    p = chances(logits)
    sure, right = p.max(1), p.argmax(1) == y
    total = 0.0
    for low in range(15):
        inside = (sure >= low / 15) & ((sure < (low + 1) / 15) | (low == 14))
        if inside.any():
            total += inside.sum() * abs(sure[inside].mean() - right[inside].mean())
    return total / len(y)


def binary_f1(logits: Any, y: Any) -> float:
    return float(exact.f1_score(y, logits.argmax(1), zero_division=np.nan))


def of_argmax(score: Callable[..., Any], **options: Any) -> Callable[[Any, Any], float]:
    return lambda logits, y: float(score(y, logits.argmax(1), **options))


LABELS: dict[str, Callable[[Any, Any], float]] = {
    "accuracy": of_argmax(exact.accuracy_score),
    "top5": one_of_five,
    "macro_f1": of_argmax(exact.f1_score, average="macro"),
    "weighted_f1": of_argmax(exact.f1_score, average="weighted"),
    "micro_f1": of_argmax(exact.f1_score, average="micro"),
    "balanced_accuracy": of_argmax(exact.balanced_accuracy_score),
    "auc": lambda logits, y: rest_auc(logit(chances(logits)), np.eye(logits.shape[1])[y]),
    "log_loss": log_loss,
    "calibration_error": calibration,
}


def logit(p: Any) -> Any:
    return np.log(p) - np.log1p(-p)


PIXELS: dict[str, Callable[[Any, Any], float]] = {
    "pixel_accuracy": of_argmax(exact.accuracy_score),
    "iou": of_argmax(exact.jaccard_score, average="macro"),
    "dice": of_argmax(exact.f1_score, average="macro"),
}
TOKENS: dict[str, Callable[[Any, Any], float]] = {
    "perplexity": lambda logits, y: math.exp(log_loss(logits, y)),
    "bits_per_token": lambda logits, y: log_loss(logits, y) / math.log(2),
    "token_accuracy": of_argmax(exact.accuracy_score),
}


def occurring(logits: Any, y: Any) -> list[int]:
    """Return the labels that some example has or is predicted to have."""
    return np.flatnonzero((y > 0).any(0) | (logits > 0).any(0)).tolist()


def of_signs(score: Callable[..., Any], **options: Any) -> Callable[[Any, Any], float]:
    """Return an F1 over the labels that occur."""

    def computed(logits: Any, y: Any) -> float:
        kept = occurring(logits, y)
        if not kept:
            return math.nan
        both = [np.column_stack([part[:, kept], 0 * y[:, :1]]) for part in (y, logits > 0)]
        return float(score(*both, labels=range(len(kept)), **options))

    return computed


def supported(compute: Callable[[Any, Any], float]) -> Callable[[Any, Any], float]:
    """Return NaN where no example has a label."""
    return lambda logits, y: compute(logits, y) if y.any() else math.nan


SEVERAL: dict[str, Callable[[Any, Any], float]] = {
    "micro_f1": of_signs(exact.f1_score, average="micro"),
    "macro_f1": of_signs(exact.f1_score, average="macro"),
    "weighted_f1": supported(of_signs(exact.f1_score, average="weighted")),
    "auc": rest_auc,
    "exact_match": lambda logits, y: float(exact.accuracy_score(y, logits > 0)),
    "label_accuracy": lambda logits, y: float(1 - exact.hamming_loss(y, logits > 0)),
}


def r2(output: Any, y: Any) -> float:
    varied = [c for c in range(y.shape[1]) if np.ptp(y[:, c]) > 0]
    return float(np.mean([exact.r2_score(y[:, c], output[:, c]) for c in varied] or [math.nan]))


NUMBERS: dict[str, Callable[[Any, Any], float]] = {
    "mse": lambda output, y: float(exact.mean_squared_error(y, output)),
    "rmse": lambda output, y: math.sqrt(exact.mean_squared_error(y, output)),
    "mae": lambda output, y: float(exact.mean_absolute_error(y, output)),
    "r2": r2,
}


def plain(given: Predictions) -> Arrays:
    return given.kept.output.numpy(), given.kept.y.numpy()


class Kind(NamedTuple):
    """A kind of predictions: how they are drawn, and what their metrics must be."""

    draw: Callable[[torch.Generator, int, int, int], Predictions]
    counted: Callable[[Predictions], Arrays]
    wanted: dict[str, Callable[[Any, Any], float]]


KINDS = {
    "one label": Kind(single, of_labels, LABELS),
    "one logit": Kind(binary, of_labels, {**LABELS, "f1": binary_f1}),
    "several labels": Kind(several, plain, SEVERAL),
    "numbers": Kind(numbers, plain, NUMBERS),
    "pixels": Kind(pictures, of_labels, PIXELS),
    "tokens": Kind(texts, of_labels, TOKENS),
}
CASES = [(kind, name) for kind, of in KINDS.items() for name in of.wanted]


def drawn(kind: str, seed: int, n: int, classes: int, used: int, padding: int = 0) -> Predictions:
    draw = torch.Generator().manual_seed(seed)
    found = KINDS[kind].draw(draw, n, classes, min(used, classes))
    return found._replace(padding=min(padding, n))


# --- the laws


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 40),
    classes=st.integers(2, 8),
    used=st.integers(1, 8),
    padding=st.integers(0, 5),
)
def test_a_metric_is_that_of_scikit_learn(
    kind: str, seed: int, n: int, classes: int, used: int, padding: int
) -> None:
    given = drawn(kind, seed, n, classes, used, padding)
    output, y = KINDS[kind].counted(given)
    for name, wanted in KINDS[kind].wanted.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            right = wanted(output, y) if len(y) else math.nan
        found = value(name, given)
        if name == "auc":  # of few examples it jumps where two of them share a bin
            assert math.isnan(found) == math.isnan(right)
        else:
            assert found == pytest.approx(right, rel=1e-9, abs=1e-10, nan_ok=True), name


@pytest.mark.parametrize("kind", ["one label", "one logit", "several labels"])
@pytest.mark.parametrize("used", [1, 2, 5])
def test_auc_from_histograms_is_near_that_of_all_scores(kind: str, used: int) -> None:
    given = drawn(kind, 7, 600, 5, used, padding=50)
    right = KINDS[kind].wanted["auc"](*KINDS[kind].counted(given))
    assert value("auc", given) == pytest.approx(right, abs=1e-3, nan_ok=True)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_sums_of_parts_add_up_to_the_value_of_the_whole(kind: str, name: str) -> None:
    whole, metric = drawn(kind, 3, 30, 6, 4), METRICS[name]
    cut = [Predictions(whole.output[part], whole.y[part]) for part in (slice(11), slice(11, 30))]
    first, second = (metric.sums(part.output, part.batch) for part in cut)
    added = {key: tensor + second[key] for key, tensor in first.items()}
    assert {tensor.dtype for tensor in added.values()} == {torch.float64}
    assert float(metric.value(added)) == pytest.approx(value(name, whole), rel=1e-12)


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_padding_alone_adds_nothing_and_is_undefined(kind: str, name: str) -> None:
    metric, nothing = METRICS[name], drawn(kind, 5, 4, 6, 3, padding=4)
    sums = metric.sums(nothing.output, nothing.batch)
    assert not any(tensor.any() for tensor in sums.values())
    assert math.isnan(metric.value(sums))


@pytest.mark.parametrize("kind", ["pixels", "tokens"])
def test_a_batch_of_ignored_positions_adds_nothing(kind: str) -> None:
    given = drawn(kind, 5, 4, 6, 3)
    given = given._replace(y=torch.full_like(given.y, IGNORED))
    for name in KINDS[kind].wanted:
        sums = METRICS[name].sums(given.output, given.batch)
        assert not any(tensor.any() for tensor in sums.values()), name
        assert METRICS[name].skips_undefined


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_sums_can_be_vectorised_and_traced(kind: str, name: str) -> None:
    metric = METRICS[name]
    lanes = [drawn(kind, seed, 12, 5, 3, padding=seed) for seed in range(3)]
    outputs = torch.stack([lane.output for lane in lanes])
    batches = Batch(*map(torch.stack, zip(*(lane.batch for lane in lanes), strict=True)))
    found = metric.value(vmap(metric.sums)(outputs, batches)).tolist()
    assert found == pytest.approx([value(name, lane) for lane in lanes], rel=1e-12, nan_ok=True)

    def flat(output: Tensor, *batch: Tensor) -> list[Tensor]:
        return list(metric.sums(output, Batch(*batch)).values())

    traced = trimmed(flat, lanes[0].output, *lanes[0].batch)
    again = traced(lanes[2].output, *lanes[2].batch)
    for ours, theirs in zip(again, flat(lanes[2].output, *lanes[2].batch), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


UNBOUNDED = ("log_loss", "perplexity", "bits_per_token", "mse", "rmse", "mae", "r2")


def test_one_output_that_is_no_number_is_infinitely_bad() -> None:
    for kind, name in CASES:
        predicted = drawn(kind, 1, 30, 6, 6)
        predicted.output[3] = math.nan
        found = METRICS[name].rank(value(name, predicted))
        assert not math.isnan(found)
        assert math.isinf(found) or name not in UNBOUNDED


UNFIT = [  # a metric on the shapes of another task
    ("accuracy", "numbers"),
    ("f1", "one label"),
    ("exact_match", "one label"),
    ("rmse", "one label"),
    ("iou", "one label"),
    ("perplexity", "pixels"),
]


@pytest.mark.parametrize(("name", "kind"), UNFIT)
def test_a_metric_refuses_the_shapes_of_another_task(name: str, kind: str) -> None:
    given = drawn(kind, 1, 9, 6, 6)
    with pytest.raises(InputError):
        METRICS[name].sums(given.output, given.batch)


def test_every_metric_is_compared_with_scikit_learn() -> None:
    assert METRICS.keys() - {"loss"} == {name for _, name in CASES}


# --- against torchmetrics


def test_metrics_are_those_of_torchmetrics() -> None:
    theirs = pytest.importorskip("torchmetrics").functional
    one, many = drawn("one label", 2, 200, 7, 5), drawn("several labels", 2, 200, 7, 7)
    pixels, tokens = drawn("pixels", 2, 20, 5, 4), drawn("tokens", 2, 20, 9, 9)
    number = drawn("numbers", 2, 50, 3, 9)
    classes: dict[str, Any] = {"task": "multiclass", "num_classes": 7}
    several: dict[str, Any] = {"task": "multilabel", "num_labels": 7}
    masked: dict[str, Any] = {"task": "multiclass", "num_classes": 5, "ignore_index": IGNORED}
    p = one.output.softmax(1)
    for name, predicted, wanted in [
        ("top5", one, theirs.accuracy(p, one.y, top_k=5, average="micro", **classes)),
        ("calibration_error", one, theirs.calibration_error(p, one.y, n_bins=15, **classes)),
        ("weighted_f1", one, theirs.f1_score(p, one.y, average="weighted", **classes)),
        (
            "micro_f1",
            many,
            theirs.f1_score(many.output.sigmoid(), many.y, average="micro", **several),
        ),
        ("exact_match", many, theirs.exact_match(many.output.sigmoid(), many.y, **several)),
        ("iou", pixels, theirs.jaccard_index(pixels.output, pixels.y, average="macro", **masked)),
        (
            "perplexity",
            tokens,
            theirs.text.perplexity(tokens.output, tokens.y, ignore_index=IGNORED),
        ),
        ("r2", number, theirs.r2_score(number.output, number.y)),
    ]:
        assert value(name, predicted) == pytest.approx(float(wanted), rel=1e-5), name
