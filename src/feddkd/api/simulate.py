"""`simulate`: a run on data in memory, in one call."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from feddkd.api.divided import gathered, with_groups
from feddkd.api.progress import RoundBars
from feddkd.api.recorded import Outcome, outcome_of, simulate_recorded
from feddkd.api.result import Result
from feddkd.data.federation import Federation
from feddkd.errors import InputError, choices, line_of, unknown
from feddkd.method import Method
from feddkd.methods import parse
from feddkd.models.functional import Model, built, functional
from feddkd.models.weight_files import Initial, with_initial
from feddkd.rounds.attacks import Attack, find_attack
from feddkd.rounds.availability import Availability, OnDivergence, tolerance
from feddkd.rounds.evaluation import Evaluation, find_protocol
from feddkd.rounds.loop import Row
from feddkd.rounds.metrics import Metric, check_target, find_metrics
from feddkd.rounds.remarks import remark
from feddkd.rounds.selection import Selection, find_selection
from feddkd.runs.description import describe_job
from feddkd.simulation import DTYPES, Job, Simulation, Start
from feddkd.spec.types import Chance, Count, Share, Whole, checked
from feddkd.tasks.lookup import find_task
from feddkd.tasks.task import Task
from feddkd.tensors import Tensors

T = TypeVar("T")


def simulate(
    *,
    model: nn.Module | Model | Callable[[], nn.Module | Model],
    clients: Sequence[Any] | Federation,
    test: Any = None,
    client_tests: Sequence[Any] | None = None,
    method: str | Method,
    validation: Any = None,
    public: Any = None,
    rounds: int = 1,
    cohort: int | float = 1.0,
    seed: int = 0,
    engine: str = "auto",
    device: str = "cpu",
    initial: Initial | None = None,
    dtype: torch.dtype | str | None = None,
    evaluation: str = "auto",
    metrics: Sequence[str | Metric] | None = None,
    task: str | Task = "classification",
    evaluate_every: int = 1,
    evaluate_clients: int | float = 1.0,
    groups: Any = None,
    diagnostics: bool = False,
    delta: float | None = None,
    availability: str | Availability = "always()",
    selection: str | Selection = "uniform()",
    attack: str | Attack = "none()",
    min_clients: int = 1,
    on_divergence: OnDivergence = "drop",
    out: str | Path | None = None,
    progress: bool | None = None,
    on_round: Callable[[Row], Any] | None = None,
    target: float | str | None = None,
) -> Result:
    """Run a method on data in memory and return its result.

    Args:
        model: A module starts from the weights it has. A function or class without arguments that
            builds one is called under the seed, so that seeds differ in their first weights.
        clients: The examples of each client: pairs (x, y) of tensors or arrays, or torch data sets;
            x as the network takes it. Or what `feddkd.divide` returns; then `test`, `validation`
            and `public` are left out.
        test: The examples of the test set. With `client_tests` it may be left out.
        client_tests: The test examples of each client, a list as long as `clients`. A client's
            model is then tested on its own examples.
        method: A method or its text, as in "fedavg(epochs=5) | dkd()".
        validation: Examples that choose the best round.
        public: Examples that the server has and may send to clients, for methods that need them.
        rounds: How many rounds to play.
        cohort: The active clients of a round: a fraction of the clients (0.5) or a number (10).
        seed: Decides every random draw.
        engine: "auto", "serial", "batched" or "pool". Engines agree up to rounding.
        device: "cpu", "cuda", "cuda:1", ...
        initial: The first weights: a state dict, a module, or the path of a safetensors file.
        dtype: The type of the numbers; that of the weights by default.
        evaluation: Which models are tested on which data: "global", "client_mean" or
            "client_pooled". "auto" tests every client's model if clients keep tensors.
        metrics: The names of what is measured, the headline first: "accuracy" and "loss" by
            default, or those of the task; also "macro_f1", "auc", a `feddkd.extend.Metric`, or a
            torchmetrics object where the global model is tested.
        task: What is learned: "classification", "binary", "multilabel", "regression",
            "segmentation", "language", or a `feddkd.Task`.
        evaluate_every: Of this many rounds one is evaluated; the first and the last always are.
        evaluate_clients: How many clients are evaluated, or which share of them, where
            `evaluation` is one of clients: the same clients in all rounds.
        groups: The name or the number of the group of each test example; with `client_tests` a list
            of such lists, one for each client. An empty name is no group. Rows then also have
            the metrics of each group.
        diagnostics: Add the theory's quantities (L1', L2', update norms, ...) to every row.
        delta: The delta of the epsilon that methods with noise report; 1 / (10 K) by default.
        availability: Which clients do not answer: "random(drop=0.1, late=0.05)",
            "trace(file='faults.csv')", or `feddkd.rounds.availability.listed(rows)`.
        selection: Which clients are in a cohort: "uniform()", "by_size()", "round_robin()",
            "by_group(groups='0-4; 5-9')", "power_of_choice()", "oort()".
        attack: What malicious clients do: "label_flip(share=0.2)", "backdoor(clients='0, 3')",
            "sign_flip()", "scaling()", "gaussian()".
        min_clients: With fewer clients left, a round ends.
        on_divergence: A client whose numbers are not finite is left out ("drop"), ends the run
            ("stop"), or is not looked for ("continue").
        out: A folder for a record of the run, as `feddkd run` writes it. Called again with the same
            arguments, `simulate` continues the run, or returns the result if it is finished. If
            anything else is in the record, it raises an error. The record knows data and first
            weights by their digests and the network by its structure; it does not see changes in
            the network's code. Ctrl-C ends the round, saves, and raises KeyboardInterrupt.
        progress: Show a progress bar on standard error; by default if that is a terminal.
        on_round: Called with the row of each round that is played. The run ends early if it returns
            True.
        target: A value of the headline metric, or of a named one, as in "rmse <= 0.3". The result's
            summary has the round and the costs at which it was reached; the run does not stop.

    Returns:
        The final tensors, a row of numbers for each round, and a summary. It prints as a table.
    """
    if on_round is not None and not callable(on_round):
        raise InputError(f"on_round must be a function, not {type(on_round).__name__}")
    if out is not None and not isinstance(out, str | Path):
        raise InputError(f"out must be the path of a folder, not {type(out).__name__}")
    learned = find_task(task)
    federation = gathered(clients, test, client_tests, validation, public, learned)
    federation = with_groups(federation, groups)
    chosen, seed = find_attack(attack).on(_method(method)), checked(seed, Whole, "seed")
    network = _network(model, seed)
    network = network if initial is None else with_initial(network, initial)
    network = replace(network, task=learned)
    start = Start(seed, federation, *network.start())
    job = Job(
        network,
        chosen,
        [start],
        dtype=_dtype(dtype, start.params),
        rounds=checked(rounds, Count, "rounds"),
        cohort=cohort,
        evaluation=Evaluation(
            find_protocol(evaluation, chosen, federation.own_test is not None),
            find_metrics(learned.metrics if metrics is None else metrics),
            checked(evaluate_every, Count, "evaluate_every"),
            checked(evaluate_clients, Count | Share, "evaluate_clients"),
        ),
        tolerance=tolerance(availability, min_clients, on_divergence),
        diagnostics=diagnostics,
        selection=find_selection(selection),
        attack=find_attack(attack),
        delta=checked(delta, Chance | None, "delta"),
    )
    size = job.cohort_size  # raises an InputError if the cohort is wrong
    remark([(chosen, size if isinstance(cohort, int) else cohort, job.clients)])
    target = checked(target, float | str | None, "target")
    check_target(target, job.evaluation.metrics)
    names = " | ".join(call.name for call in chosen.calls) or "method"
    with RoundBars([(names, job.rounds)], progress) as bars:

        def after_round(row: Row) -> bool:
            bars.row(0, row)
            return on_round is not None and bool(on_round(row))

        if out is None:
            outcome = _play(job, engine, device, after_round)
        else:
            built_here = initial is None and not isinstance(model, nn.Module | Model)
            description = describe_job(job, built_here, target)
            outcome = simulate_recorded(job, description, Path(out), engine, device, after_round)
    return Result(
        outcome.params, outcome.history, network, outcome.private, str(chosen) or "method", target
    )


def _play(job: Job, engine: str, device: str, after_round: Callable[[Row], bool]) -> Outcome:
    """Run a job without a record, until `after_round` returns True."""
    history = []
    with Simulation(job, engine, device) as simulation:
        for rows in simulation.rounds():
            history.append(rows[0])
            if after_round(rows[0]):
                break
        return outcome_of(simulation, history)


def _network(given: Any, seed: int) -> Model:
    if not isinstance(given, Model | nn.Module) and not callable(given):
        raise InputError(
            "model must be a torch.nn.Module, functional(...) of one, or what builds one, a"
            f" function or class; not {type(given).__name__}"
        )
    network = (
        functional(given)
        if isinstance(given, Model | nn.Module)
        else built(lambda: _called(given), ("init", seed))
    )
    if not network.param_names:
        frozen = (
            "all of them are frozen (requires_grad=False)"
            if any(True for _ in network.net.parameters())
            else "it has none"
        )
        raise InputError(
            f"model must have parameters to train; of this {type(network.net).__name__} {frozen}"
        )
    return network


def _called(build: Callable[[], T]) -> T:
    try:
        return build()
    except InputError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}{line_of(error)}"
        raise InputError(f"the function that builds the network failed: {reason}") from error


def _method(given: Any) -> Method:
    if not isinstance(given, Method | str):
        raise InputError(
            "method must be a method or its text, such as 'fedavg() | dkd()', not"
            f" {type(given).__name__}"
        )
    return given if isinstance(given, Method) else parse(given)


def _dtype(given: torch.dtype | str | None, params: Tensors) -> torch.dtype:
    """Return the type asked for, or that of the weights."""
    of_weights = next((tensor.dtype for tensor in params.values()), torch.float32)
    wanted = of_weights if given is None else given
    name = str(wanted).removeprefix("torch.")
    if given is None and name not in DTYPES:
        raise InputError(
            f"the network's weights are {name}; a run computes in one of {choices(DTYPES)}:"
            " choose with dtype=..."
        )
    if name not in DTYPES:
        raise unknown(f"unknown dtype {name!r}", name, DTYPES)
    return DTYPES[name]
