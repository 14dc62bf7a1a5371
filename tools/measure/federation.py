"""Compare a federation of eight nodes on EMNIST letters with the simulator.

One node is killed for good, one is killed and restarted; in the simulator the same clients miss.

Which clients were missing is read from the federation's record and given to the simulator as a
trace. Writes docs/federation.json, and a page and a picture made of it: docs/federation.md,
docs/pictures/federation.png.

    python tools/measure/federation.py --data DIR [--small] [--out docs/federation.json]
"""

import argparse
import csv
import hashlib
import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import flwr
from flwr.app import Message

from feddkd import Experiment
from feddkd.flower.apps import engine_on
from feddkd.flower.deployment.local_federation import Deployment, deployed
from feddkd.rounds.availability import Absence
from feddkd.rounds.loop import Row
from feddkd.runs.record import Record, find
from feddkd.runs.runner import How, play
from feddkd.runs.session import RoundPlayed

ROOT = Path(__file__).parents[2]
LETTERS = Experiment(
    method=(
        "fedavg(epochs=1, batch_size=64, lr=0.1, momentum=0.1, nesterov=True) | dkd(steps=5,"
        " batch_size=64, lr=0.2)"
    ),
    data="emnist",
    partition="dirichlet(alpha=0.3)",
    model="mlp(hidden='200')",
    clients=8,
    rounds=20,
    training=0.2,
)
DIGITS = replace(
    LETTERS, data="digits", model="mlp(hidden='64')", clients=4, rounds=6, training=0.5
)
DEADLINE = 40.0  # seconds; a node that was killed is waited for as long, once


class NodeKill(NamedTuple):
    """A SIGKILL to a node right after a push of a round."""

    node: int
    round: int
    kind: str
    time: int
    back: bool  # whether the node is started again


@dataclass
class KillingGrid:
    """A Grid that kills nodes after planned pushes and restarts them at the end of a round.

    Restarting is repeated until it works: for about a minute the SuperLink believes that a killed
    node is still online.
    """

    grid: Any
    deployment: Deployment
    kills: Sequence[NodeKill]
    round: int = 1
    pushed: tuple[str, ...] = ()  # kinds, in this round

    def push_messages(self, messages: Sequence[Message]) -> Iterable[str]:
        numbers: Iterable[str] = self.grid.push_messages(messages)
        self.pushed = (*self.pushed, messages[0].metadata.message_type)
        for kill in self.kills:
            if (kill.round, kill.kind, kill.time) == (
                self.round,
                self.pushed[-1],
                self.pushed.count(kill.kind),
            ):
                self.deployment.processes.end(f"node{kill.node}", by=signal.SIGKILL)
        return numbers

    def next_round(self, row: Row) -> None:
        self.round, self.pushed = row["round"] + 1, ()
        running = self.deployment.processes.running
        for kill in self.kills:
            ended = (
                f"node{kill.node}" not in running or running[f"node{kill.node}"].poll() is not None
            )
            if kill.back and kill.round < self.round and ended:
                self.deployment.start_node(kill.node)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.grid, name)


def federate(
    experiment: Experiment,
    kills: Sequence[NodeKill],
    data: Path | None,
    told: Callable[[Row], None],
) -> Record:
    """The experiment on real nodes."""
    with (
        tempfile.TemporaryDirectory() as name,
        deployed(experiment.clients, data) as deployment,
        deployment.link.run() as grid,
    ):
        deployment.wait(grid, 300)
        killing_grid = KillingGrid(grid, deployment, kills)
        engine = engine_on(killing_grid, experiment, secure=False, deadline=DEADLINE, join=300.0)
        for event in play([experiment], Path(name), How(engine, data=data)):
            if isinstance(event, RoundPlayed):
                killing_grid.next_round(event.row)
                told(event.row)
        return find(Path(name))[0]


def missing(rows: Sequence[Row]) -> list[Absence]:
    """Return the clients that did not answer, by round."""
    return [
        Absence(row["round"], client, phase, step, event)
        for row in rows
        for phase, step, client, event in row.get("missing", [])
    ]


def simulate(
    experiment: Experiment,
    absences: Sequence[Absence],
    data: Path | None,
    told: Callable[[Row], None],
) -> Record:
    """The same experiment on the simulator, with the same clients missing."""
    with tempfile.TemporaryDirectory() as name:
        trace = Path(name) / "faults.csv"
        with trace.open("w", newline="") as file:
            csv.writer(file).writerows([Absence._fields, *absences])
        traced = replace(experiment, availability=f"trace(file='{trace}')")
        for event in play([traced], Path(name) / "runs", How("serial", data=data)):
            if isinstance(event, RoundPlayed):
                told(event.row)
        return find(Path(name) / "runs")[0]


def digest(kept: dict[str, Any]) -> str:
    """Return a digest of the content of the picture."""
    return hashlib.sha256(
        json.dumps([kept["federation"], kept["simulator"], kept["blows"]]).encode()
    ).hexdigest()


def draw(kept: dict[str, Any], path: Path) -> None:
    """Both curves, one upon the other, and how many clients took part in each round to its end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rounds = range(1, len(kept["federation"]) + 1)
    figure, (axis, below) = pyplot.subplots(
        2, 1, figsize=(7, 4.6), sharex=True, height_ratios=(4, 1), layout="constrained"
    )
    axis.plot(
        rounds,
        [100 * value for value in kept["federation"]],
        linewidth=5,
        alpha=0.4,
        label="Flower: real nodes",
    )
    axis.plot(
        rounds,
        [100 * value for value in kept["simulator"]],
        "k--",
        linewidth=1,
        label="simulator, same clients missing",
    )
    for kill in (NodeKill(*one) for one in kept["blows"]):
        axis.axvline(kill.round, color="tab:red", linestyle=":")
        words = f" node {kill.node} killed" + (", then restarted" if kill.back else "")
        axis.annotate(
            words,
            (kill.round, 0.03),
            xycoords=("data", "axes fraction"),
            fontsize=8,
            color="tab:red",
            rotation=90,
        )
    axis.set_ylabel("test accuracy, %")
    axis.legend(loc="lower right")
    below.step(rounds, kept["left"], where="mid", color="tab:gray")
    below.set(ylabel="clients left", xlabel="rounds", ylim=(0, None))
    below.xaxis.get_major_locator().set_params(integer=True)
    for one in (axis, below):
        one.grid(alpha=0.3)
    figure.savefig(path, dpi=120, metadata={"Description": digest(kept)})
    pyplot.close(figure)


def page(kept: dict[str, Any]) -> str:
    """The record as a page."""
    kills = [NodeKill(*one) for one in kept["blows"]]
    told = [
        f"node {kill.node} in round {kill.round}, just after order {kill.time} to {kill.kind} had"
        " gone out, "
        + ("and started again as soon as the round was over" if kill.back else "for good")
        for kill in kills
    ]
    ends = {name: f"{kept[name][-1]:.2%}" for name in ("federation", "simulator")}
    spans = [
        (count, [at for at, _ in same])
        for count, same in groupby(enumerate(kept["gone"], 1), key=lambda one: one[1])
    ]
    gone = ", ".join(f"{count} in {_span(ats)}" for count, ats in spans if count)
    return PAGE.format(
        **{
            **kept,
            "blows": "; ".join(told),
            "ends": ends,
            "gone": gone,
            "experiment": "\n".join(kept["toml"]),
            "rounds": len(kept["federation"]),
            "points": f"{100 * kept['largest']:.4f}",
        }
    )


def _span(rounds: Sequence[int]) -> str:
    return f"round {rounds[0]}" if len(rounds) == 1 else f"rounds {rounds[0]} to {rounds[-1]}"


PAGE = """\
<!-- written by tools/measure/federation.py -->
# A federation with faults, beside the simulator

`{command}`: {nodes} nodes on one machine over loopback, TLS and node authentication, {rounds} rounds of

<!-- not run: its data are not in this tree -->
```toml
{experiment}
```

Nodes were killed with SIGKILL: {blows}. Clients that did not answer: {gone}. The same experiment then ran on the simulator with
just these clients missing (`availability = "trace(...)"`).

![Both curves](pictures/federation.png)

Test accuracy after {rounds} rounds: {ends[federation]} on the federation, {ends[simulator]} on the simulator; in no round were
they further apart than {points} points. The federation took {seconds[0]:.0f} s, start and end included, the simulator
{seconds[1]:.0f} s ({cores} cores, load average {load}, flwr {flwr}).
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="the folder with the letters")
    parser.add_argument(
        "--small", action="store_true", help="four nodes, six rounds, digits: to see that it works"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "federation.json")
    given = parser.parse_args()
    (given.out.parent / "pictures").mkdir(parents=True, exist_ok=True)
    experiment = DIGITS if given.small else LETTERS
    last, scale = experiment.clients - 1, experiment.rounds // 5
    kills = [
        NodeKill(last, scale, "train.distil", 3, False),
        NodeKill(1, 2 * scale, "train.local", 1, True),
    ]
    data, start = given.data.resolve() if given.data else None, time.perf_counter()

    def told(row: Row) -> None:
        passed = time.perf_counter() - start
        print(
            f"{passed:6.0f} s  {row['round']:3}  {row['test_accuracy']:.4f} "
            f" {row.get('missing', '')}",
            flush=True,
        )

    real = federate(experiment, kills, data, told).history
    middle = time.perf_counter()
    absences = missing(real)
    simulated = simulate(experiment, absences, data, told).history
    curves = {
        name: [row["test_accuracy"] for row in rows]
        for name, rows in (("federation", real), ("simulator", simulated))
    }
    gone = [sum(absence.round == row["round"] for absence in absences) for row in real]
    kept = {
        "command": (
            "python tools/measure/federation.py" + (" --small" if given.small else " --data DIR")
        ),
        "flwr": flwr.__version__,
        "nodes": experiment.clients,
        "toml": [f"{key} = {json.dumps(value)}" for key, value in experiment.as_dict().items()],
        "blows": kills,
        "absences": absences,
        "gone": gone,
        "left": [experiment.clients - count for count in gone],
        **curves,
        "largest": max(abs(a - b) for a, b in zip(*curves.values(), strict=True)),
        "cores": os.cpu_count(),
        "seconds": [round(middle - start, 1), round(time.perf_counter() - middle, 1)],
        "load": round(os.getloadavg()[0], 1),
    }
    kept = json.loads(json.dumps(kept))
    given.out.write_text(json.dumps(kept) + "\n", encoding="utf-8")
    given.out.with_suffix(".md").write_text(page(kept), encoding="utf-8")
    draw(kept, given.out.parent / "pictures" / "federation.png")


if __name__ == "__main__":
    main()
