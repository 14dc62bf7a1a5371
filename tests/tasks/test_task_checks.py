"""Targets, networks, metrics and methods that do not fit a task are refused by name first."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from feddkd import METHODS, InputError, Result, Task, parse, simulate
from feddkd.tasks.lookup import TASKS, find_task

DRAW = torch.Generator().manual_seed(0)
X = torch.randn(12, 5, generator=DRAW)
LABELS = torch.randint(0, 3, (12,), generator=DRAW)
NUMBERS = torch.randn(12, 2, generator=DRAW)
MARKS = torch.randint(0, 2, (12, 2), generator=DRAW)
TOKENS = torch.randint(1, 7, (12, 6), generator=DRAW)
MASKS = torch.randint(0, 3, (12, 4, 4), generator=DRAW)


def run(task: Any, x: Tensor, y: Tensor, net: nn.Module, **options: Any) -> Result:
    given: dict[str, Any] = {"method": "fedavg(epochs=1)", "engine": "serial", **options}
    return simulate(model=net, clients=[(x, y)], test=(x, y), task=task, progress=False, **given)


def linear(outputs: int) -> nn.Module:
    return nn.Linear(5, outputs)


def tokens(vocabulary: int = 7) -> nn.Module:
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, vocabulary))


@pytest.mark.parametrize(
    ("task", "x", "y", "net", "named"),
    [
        ("classification", X, NUMBERS[:, 0], linear(3), "whole numbers"),
        ("binary", X, LABELS, linear(1), "0..2"),
        ("binary", X, LABELS % 2, linear(2), "one logit"),
        ("multilabel", X, MARKS, linear(3), "(2,)"),
        ("multilabel", X, MARKS + 1, linear(2), "1..2"),
        ("multilabel", X, LABELS, linear(3), "(N, labels)"),
        ("regression", X, NUMBERS, linear(1), "(2,)"),
        ("regression", X, MASKS.double(), linear(2), "(N, numbers)"),
        ("segmentation", X[:, None, None], MASKS.double(), nn.Conv2d(1, 3, 1), "whole number"),
        ("segmentation", X, LABELS, linear(3), "(N, C, H, W)"),
        ("segmentation", MASKS[:, None].float(), MASKS + 5, nn.Conv2d(1, 3, 1), "5..7"),
        (
            "segmentation(ignored=1)",
            MASKS[:, None].float(),
            torch.ones_like(MASKS),
            nn.Conv2d(1, 3, 1),
            "none of its targets counts",
        ),
        ("language", TOKENS, TOKENS, tokens(), "rows[:, 1:]"),
        ("language", TOKENS, TOKENS.roll(-1, 1), tokens(5), "5 logits"),
        ("language", TOKENS, LABELS, tokens(), "(N, T, V)"),
        ("language", X, LABELS, linear(3), "(N, T, V)"),
        ("regresion", X, NUMBERS, linear(2), "did you mean 'regression'?"),
        ("segmentation(ignore=1)", X, NUMBERS, linear(2), "did you mean 'ignored'?"),
        (7, X, NUMBERS, linear(2), "int"),
    ],
)
def test_targets_and_outputs_that_do_not_fit_a_task_are_refused(
    task: Any, x: Tensor, y: Tensor, net: nn.Module, named: str
) -> None:
    with pytest.raises(InputError) as caught:
        run(task, x, y, net)
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("metric", ["accuracy", "top5", "auc", "macro_f1", "exact_match", "iou"])
@pytest.mark.parametrize("kind", [torch.float32, torch.int64])
def test_a_metric_of_labels_is_refused_for_numbers(metric: str, kind: torch.dtype) -> None:
    with pytest.raises(InputError, match=f"metric '{metric}' does not go with task 'regression"):
        run("regression", X, (9 * NUMBERS).to(kind), linear(2), metrics=[metric])


@pytest.mark.parametrize("kind", [torch.float64, torch.uint8, torch.bool])
def test_marks_of_labels_may_have_any_type(kind: torch.dtype) -> None:
    metrics = ["macro_f1", "auc", "exact_match", "loss"]
    torch.manual_seed(0)
    net = linear(2)
    expected = run("multilabel", X, MARKS, net, metrics=metrics).history
    assert run("multilabel", X, MARKS.to(kind), net, metrics=metrics).history == expected


NOTHING = torch.full_like(TOKENS, -100)


@pytest.mark.parametrize(
    ("parts", "named"),
    [
        ({"clients": [(TOKENS, TOKENS.roll(-1, 1)), (TOKENS, NOTHING)]}, "client 1's training"),
        ({"test": (TOKENS, NOTHING)}, "the test"),
        ({"validation": (TOKENS, NOTHING)}, "the validation"),
        ({"client_tests": [(TOKENS, NOTHING)]}, "client 0's test"),
    ],
)
def test_examples_of_which_nothing_counts_are_refused_by_their_owner(
    parts: dict[str, Any], named: str
) -> None:
    pair = (TOKENS, TOKENS.roll(-1, 1))
    given = {"clients": [pair], "test": pair, **parts}
    with pytest.raises(InputError, match=f"none of the targets of {named} examples counts"):
        simulate(model=tokens(), task="language", method="fedavg()", progress=False, **given)


def test_one_label_each_may_have_an_axis_of_its_own() -> None:
    torch.manual_seed(0)
    net = linear(1)
    expected = run("binary", X, LABELS % 2, net).history
    assert run("binary", X, (LABELS % 2)[:, None].float(), net).history == expected


@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_inputs_may_be_truth_values_or_whole_numbers_of_any_shape(engine: str) -> None:
    torch.manual_seed(0)
    net = linear(3)
    expected = run("classification", (X > 0).float(), LABELS, net, engine=engine).history
    assert run("classification", X > 0, LABELS, net, engine=engine).history == expected
    table = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(24, 3))
    rows = run("classification", TOKENS.reshape(12, 3, 2), LABELS, table, engine=engine).history
    assert rows == run("classification", TOKENS, LABELS, table, engine=engine).history


BAD: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "one floating-point number": (
        lambda z, y, share: (z - y).square().sum(-1),
        lambda t, s, share: (t - s).square().sum(),
    ),
    "its divergence cannot be computed": (
        lambda z, y, share: ((z - y).square().sum(-1) * share).sum(),
        lambda t, s: (t - s).square().sum(),
    ),
}


@pytest.mark.parametrize("named", BAD)
def test_a_task_of_ones_own_that_cannot_be_computed_is_refused(named: str) -> None:
    with pytest.raises(InputError, match=named):
        run(Task(*BAD[named]), X, NUMBERS, linear(2))


@pytest.mark.parametrize(
    "options",
    [{"loss": 1}, {"metrics": "rmse"}, {"metrics": []}, {"offers": {"label"}}],
    ids=lambda options: next(iter(options)),
)
def test_a_task_with_a_wrong_part_is_refused(options: dict[str, Any]) -> None:
    parts: dict[str, Any] = {"loss": lambda z, y, s: z.sum(), "divergence": lambda t, u, s: t.sum()}
    with pytest.raises(InputError, match="a task"):
        Task(**{**parts, **options})


OF_CLASSES = {"ccvr", "feddistill", "feddistill_plus", "fedgen", "fedma", "fedntd", "mix2fld"}
OF_FEATURES = {"fedmax", "moon"}
REFUSED = {
    "classification": set[str](),
    "binary": OF_CLASSES,
    "multilabel": OF_CLASSES | {"astraea"},
    "regression": OF_CLASSES | {"astraea"},
    "segmentation": OF_CLASSES | {"astraea"} | OF_FEATURES,
    "language": OF_CLASSES | {"astraea"} | OF_FEATURES,
}


def refuses(method: str, task: str) -> bool:
    """Return whether a task is refused for a method, by an error that names both."""
    texts = {"dkd": "fedavg() | dkd()", "private": "fedavg() | private(names='*.bias')"}
    text = texts.get(method, f"{method}()")
    try:
        parse(text).check_task(find_task(task))
    except InputError as error:
        return text in str(error) and task in str(error)
    return False


@pytest.mark.parametrize("task", REFUSED)
def test_the_methods_that_a_task_cannot_have_are_refused_by_name(task: str) -> None:
    assert set(REFUSED) == set(TASKS)
    refused = {method for method in METHODS if refuses(method, task)}
    assert refused >= REFUSED[task]
    assert not refused & {"fedavg", "fedprox", "scaffold", "dkd", "local_only", "centralised"}
    assert task != "classification" or not refused


@pytest.mark.parametrize(
    "options", ["divergence='reverse_kl'", "divergence='squared'", "temperature=2.0"]
)
def test_a_divergence_of_classes_is_refused_for_numbers(options: str) -> None:
    with pytest.raises(InputError, match="dkd"):
        run("regression", X, NUMBERS, linear(2), method=f"fedavg() | dkd({options})")


def test_a_record_needs_a_task_with_a_text(tmp_path: Path) -> None:
    task = Task(
        loss=lambda z, y, share: ((z - y).square().sum(-1) * share).sum(),
        divergence=lambda t, s, share: ((t - s).square().sum(-1) * share).sum(),
    )
    run(task, X, NUMBERS, linear(2))
    with pytest.raises(InputError, match="out="):
        run(task, X, NUMBERS, linear(2), out=tmp_path)
