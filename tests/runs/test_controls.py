"""Controls of an experiment with DKD: their costs are equal, and the counts are true."""

import json
from pathlib import Path
from statistics import fmean

import pytest

from commandline import Feddkd
from feddkd.errors import InputError
from feddkd.experiment import Experiment, load
from feddkd.runs.controls import Control, controls
from feddkd.runs.prepare import prepare
from feddkd.runs.run_costs import run_costs
from feddkd.runs.runner import execute

LOCAL = "fedavg(epochs=2, batch_size=32, lr=0.1, lr_decay=0.9)"
SMALL = Experiment(
    f"{LOCAL} | dkd(steps=8, batch_size=4, lr=0.1, warmup=1)",
    partition="classes(per_client=2)",
    model="mlp(hidden='8')",
    cohort=0.5,
    rounds=6,
)


@pytest.fixture(scope="module")
def made() -> list[Control]:
    return controls(SMALL, None)


def named(made: list[Control], end: str) -> Control:
    return next(one for one in made if str(one.experiment.name).endswith(end))


def test_costs_are_what_a_run_of_the_experiment_counts(tmp_path: Path) -> None:
    said = run_costs(SMALL, None)
    (last,) = execute([SMALL], out=tmp_path, engine="serial")
    assert said.communications == last["communications"]
    assert said.bytes == last["bytes_up"] + last["bytes_down"]
    assert said.steps == pytest.approx(last["local_steps"], rel=0.05)  # which clients: by chance


def test_operations_are_those_of_the_matrix_products() -> None:
    """A layer of a x b takes 2ab operations an example forwards, and as many for the gradients of
    its weights and of its input, which the first layer does not need.
    """
    sizes, hidden = prepare(SMALL, None).federation.sizes, 8
    forward = 2 * (64 * hidden + hidden * 10)
    trained = 3 * forward - 2 * 64 * hidden
    local, distilled = 5 * 2 * fmean(sizes) * trained, 5 * 4 * (trained + forward)
    expected = 6 * local + 5 * 8 * distilled
    assert run_costs(SMALL, None).operations == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("end", "cost"),
    [
        ("equal communications and bytes", "communications"),
        ("equal communications and bytes", "bytes"),
        ("equal local steps", "steps"),
        ("equal compute", "operations"),
        ("equal communications and local steps", "communications"),
    ],
)
def test_a_control_costs_what_its_name_says(made: list[Control], end: str, cost: str) -> None:
    own, base = made[0].costs, named(made, "equal rounds")
    one_round = getattr(base.costs, cost) / base.experiment.rounds
    assert abs(getattr(named(made, end).costs, cost) - getattr(own, cost)) <= one_round / 2


def test_short_rounds_cost_equal_steps_too_and_the_rate_falls_as_far(made: list[Control]) -> None:
    short = named(made, "equal communications and local steps")
    assert short.costs.steps == pytest.approx(made[0].costs.steps, rel=0.15)
    (call,) = short.experiment.parsed_method.calls
    options = dict(call.complete)
    assert options["steps"] == 2
    decay = options["lr_decay"]
    assert isinstance(decay, float)
    assert decay**short.experiment.rounds == pytest.approx(0.9**6, rel=1e-5)


def test_other_teachers_stand_in_the_same_experiment(made: list[Control]) -> None:
    taught = [one.experiment for one in made if "teacher=" in one.experiment.method]
    assert [dict(one.parsed_method.calls[-1].given)["teacher"] for one in taught] == [
        "labels",
        "shuffled",
        "average",
    ]
    for one in taught:
        assert (one.rounds, one.partition, one.seed) == (6, SMALL.partition, SMALL.seed)


def test_a_method_without_dkd_after_local_training_has_no_controls() -> None:
    for method in ("fedavg()", "local_bn() | fedavg()"):
        with pytest.raises(InputError, match="dkd"):
            controls(Experiment(method), None)


# The command


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "experiment.toml"
    lines = [f"{key} = {json.dumps(value)}" for key, value in SMALL.as_dict().items()]
    kept = [line for line in lines if not line.startswith("seed")]
    path.write_text("\n".join([*kept, "[sweep]", "seed = [0, 2]"]), encoding="utf-8")
    return path


def test_the_command_writes_a_file_that_runs(
    file: Path, tmp_path: Path, made: list[Control], feddkd: Feddkd
) -> None:
    out = tmp_path / "controls.toml"
    done = feddkd("controls", str(file), "--out", str(out), "--json")
    written = load(out)
    assert [one.digest for one in written if one.seed == 0] == [
        one.experiment.digest for one in made
    ]
    assert {one.seed for one in written} == {0, 2}
    assert json.loads(done.out.splitlines()[-1])["controls"][0]["communications"] == 46


def test_a_file_with_other_methods_and_many_seeds_is_read_for_its_dkd(
    tmp_path: Path, feddkd: Feddkd
) -> None:
    path = tmp_path / "all.toml"
    path.write_text(
        f'rounds = 2\n[sweep]\nmethod = ["fedavg()", "{SMALL.method}"]\nseed = [0, 1]\n'
    )
    assert feddkd("controls", str(path), "--out", str(tmp_path / "out.toml")).status == 0
    names = [str(one.name) for one in load(tmp_path / "out.toml") if one.seed == 0]
    assert "fedavg, equal rounds and compute" in names  # two rounds are too few to differ
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('method = "fedavg()"', "dkd()"),
        ('[sweep]\nmethod = ["fedavg() | dkd()", "fedbn() | dkd()"]', "--set"),
    ],
)
def test_a_file_without_one_experiment_with_dkd_is_refused(
    tmp_path: Path, feddkd: Feddkd, text: str, says: str
) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(text, encoding="utf-8")
    done = feddkd("controls", str(path), "--out", str(tmp_path / "out.toml"))
    assert (done.status, says in done.err, done.err.count("\n")) == (2, True, 1)
    assert not (tmp_path / "out.toml").exists()


def test_the_demo_has_controls_though_it_has_some_already(tmp_path: Path, feddkd: Feddkd) -> None:
    demo = Path(__file__).parents[2] / "src" / "feddkd" / "cli" / "demo.toml"
    done = feddkd("controls", str(demo), "--out", str(tmp_path / "out.toml"))
    assert done.status == 0
    written = {one.digest for one in load(tmp_path / "out.toml")}
    assert {one.digest for one in load(demo) if "prox" not in one.method} <= written
