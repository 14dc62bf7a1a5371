"""The success rate of an attack: the accuracy on test examples that are labelled with its aim."""

from dataclasses import replace

from feddkd.engines.interface import Engine
from feddkd.rounds.evaluation import Evaluation, measure
from feddkd.rounds.metrics import ACCURACY
from feddkd.rounds.turns import Run


def success(engine: Engine, run: Run, evaluation: Evaluation) -> dict[str, float]:
    """Return the success rate on a run's model; the engine's test examples call for the aim."""
    evaluation = replace(evaluation, metrics=(ACCURACY,))
    (measured,) = measure(engine, [(run.index, run.state)], evaluation, "test")
    return {"attack_success": measured.values["accuracy"]}
