"""The success rate of an attack: the accuracy on test examples that are labelled with its aim."""

from feddkd.engines.interface import Engine
from feddkd.rounds.evaluation import Protocol, measure
from feddkd.rounds.evaluation_phases import Sample
from feddkd.rounds.judging import Judging
from feddkd.rounds.metrics import ACCURACY
from feddkd.rounds.turns import Run


def success(
    engine: Engine, run: Run, protocol: Protocol, sample: Sample, rule: Judging
) -> dict[str, float]:
    """Return the success rate on a run's model; the engine's test examples call for the aim."""
    state = (run.index, run.state)
    (measured,) = measure(engine, [state], protocol, "test", (ACCURACY,), sample, rule)
    return {"attack_success": measured.values["accuracy"]}
