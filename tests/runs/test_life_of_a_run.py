"""A run in any order of running, killing, damaging, continuing, renaming and reporting.

A Hypothesis state machine; `make faults` walks further than `make test`.
"""

import logging
import os
import random
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from damaged import DAMAGE, CutError
from feddkd import Experiment, InputError
from feddkd.runs.record import folder_name, survey
from feddkd.runs.repair import check_runs, repaired
from feddkd.runs.runner import execute
from feddkd.runs.summary import summarise
from interrupted import OFTEN, content, experiment
from playing import execute as execute_watched

ROUNDS, SEEDS = 3, (0, 1)
WALKS = int(os.environ.get("FEDDKD_WALKS", "3"))


def of_seed(seed: int) -> Experiment:
    return experiment(rounds=ROUNDS, seed=seed, split_seed=0, model="mlp(hidden='2')")


class LifeOfRuns(RuleBasedStateMachine):
    """Runs of two seeds in one folder. Whatever happens, numbers are right or refused."""

    whole: dict[int, dict[str, bytes]]  # the files of each seed without disturbance

    def __init__(self) -> None:
        super().__init__()
        self.out = Path(tempfile.mkdtemp(prefix="life-"))
        self.seeds = [0]

    def teardown(self) -> None:
        shutil.rmtree(self.out)

    @rule()
    def run(self) -> None:
        """Run or continue all seeds: each ends in the right files, or is refused."""
        for seed in self.seeds:
            with suppress(InputError, OSError):
                (summary,) = execute([of_seed(seed)], out=self.out, engine="serial", every=OFTEN)
                if "ended" not in summary:
                    self.check_finished(seed)

    def check_finished(self, seed: int) -> None:
        folder = self.out / folder_name(of_seed(seed))
        found = {name: text for name, text in content(folder).items() if "(copy)" not in name}
        assert found == self.whole[seed]

    @rule(seed=st.sampled_from(SEEDS), after=st.integers(1, ROUNDS - 1))
    def cut_off(self, seed: int, after: int) -> None:
        """Stop a run dead after a round."""

        def stop(index: int, row: dict[str, object]) -> None:
            if row["round"] == after:
                raise CutError

        with suppress(InputError, OSError, CutError):
            execute_watched(
                [of_seed(seed)], out=self.out, on_row=stop, engine="serial", every=OFTEN
            )

    @rule()
    def add_a_seed(self) -> None:
        self.seeds = list(SEEDS)

    @rule(kind=st.sampled_from(sorted(DAMAGE)), dice=st.integers(0, 10**6))
    def damage(self, kind: str, dice: int) -> None:
        """Damage a file of a run."""
        files = [path for path in sorted(self.out.rglob("*")) if path.is_file()]
        files = [path for path in files if path.stat().st_size and "(copy)" not in path.name]
        if files:
            DAMAGE[kind](files[dice % len(files)], random.Random(dice))

    @rule()
    def repair(self) -> None:
        with suppress(InputError):
            for found in check_runs(self.out):
                repaired(found)

    @rule()
    def rename(self) -> None:
        """Move the folder of all runs."""
        moved = self.out.with_name(f"{self.out.name}-moved")
        self.out.rename(moved)
        self.out = moved

    @rule()
    def start_afresh(self) -> None:
        """Run a seed again from the beginning, whatever is left of it."""
        execute([of_seed(0)], out=self.out, engine="serial", every=OFTEN, fresh=True)
        self.check_finished(0)

    @invariant()
    def what_is_shown_is_right(self) -> None:
        """Rows of runs that are not called damaged are those of the undisturbed runs."""
        with suppress(InputError):
            for record in survey(self.out, begun=True).records:
                seed = record.manifest["canonical"]["seed"]
                rows = (record.folder / "rounds.jsonl").read_bytes().splitlines()
                expected = self.whole[seed]["rounds.jsonl"].splitlines()
                assert rows[: len(record.history)] == expected[: len(record.history)]
                if record.history:
                    summarise(record.history)


def test_whatever_happens_to_runs_their_numbers_are_right_or_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    LifeOfRuns.whole = {}
    for seed in SEEDS:
        execute([of_seed(seed)], out=tmp_path, engine="serial")
        LifeOfRuns.whole[seed] = content(tmp_path / folder_name(of_seed(seed)))
    run_state_machine_as_test(
        LifeOfRuns,
        settings=settings(
            max_examples=WALKS,
            stateful_step_count=12,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
