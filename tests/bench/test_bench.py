"""The benchmark:

every job runs, its two sides do the same work, and its numbers mean what they say. Nothing here is
timed.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from feddkd.bench import JOBS, Bench, document, page, setting, sized
from feddkd.bench.baseline import PlainLoop
from feddkd.bench.clock import flops_an_example
from feddkd.bench.engine_side import driven
from feddkd.bench.jobs import DIRICHLET, FEMNIST, MANY_SMALL, BenchJob
from feddkd.bench.setting import BenchSetting
from feddkd.cli.app import main
from feddkd.engines.select import ENGINES
from feddkd.errors import InputError
from feddkd.methods import parse
from feddkd.models.functional import functional
from feddkd.models.registry import MODELS
from small import distance

CPU = torch.device("cpu")
NUMBERS = [
    "seconds",
    "loop_seconds",
    "ratio",
    "images_per_second",
    "tflops",
    "peak_tflops",
    "peak_share",
    "figure",
]
PROMISED = ["job", "engine", "strategy", "device", "precision", "unit", "repeats", *NUMBERS]
ENGINES_HERE = [name for name in ("serial", "batched", "pool") if name in ENGINES]


QUICK = {
    ("mlp", "serial"),
    ("mlp", "batched"),
    ("mlp", "pool"),
    ("dkd", "serial"),
    ("lora", "serial"),
}


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        pytest.param(
            name,
            engine,
            marks=[] if (name, engine) in QUICK else [pytest.mark.long],
        )
        for name in JOBS
        for engine in ENGINES_HERE
    ],
)
def test_every_job_runs(name: str, engine: str) -> None:
    # to choose one takes longer; the test below does, and `mlp` of the CLI
    strategy = "vmap" if engine == "batched" else None
    here = setting(engine=engine, device="cpu", strategy=strategy, repeats=1)
    runner = Bench(here, sized(device=CPU, small=True))
    entry = runner.measure(runner.find(name))
    assert set(PROMISED) <= set(entry)
    assert all(entry[number] > 0 for number in NUMBERS)
    assert entry["seconds_range"][0] <= entry["seconds"] <= entry["seconds_range"][1]
    assert page([entry], here).row_count == 1


@pytest.mark.parametrize("name", [pytest.param("mlp", marks=pytest.mark.long), "dkd"])
def test_the_choice_is_compared_with_every_single_strategy_and_the_loop(name: str) -> None:
    here = setting(engine="batched", device="cpu", repeats=1)
    runner = Bench(here, sized(device=CPU, small=True), strategies=True)
    entry = runner.measure(runner.find(name))
    assert set(entry["strategy_seconds"]) == {"loop", "vmap", "traced"}
    best = min(*entry["strategy_seconds"].values(), entry["loop_seconds"])
    if name == "mlp":
        assert entry["regret"]["10"] > 0
    assert entry["auto_over_best"] == pytest.approx(entry["seconds"] / best)
    assert len(page([entry], here).columns) == 8


def whole_batches(job: BenchJob) -> BenchJob:
    """With one batch of everything nothing random is left, so that two programs can be compared."""
    return replace(job, local=replace(job.local, batch_size=max(job.sizes)))


@pytest.mark.parametrize(
    "name", ["femnist", "mlp", "dkd", "resnet18", "gpt-mini", "lstm", "unet", "lora"]
)
def test_the_plain_loop_and_the_engine_do_the_same_work(name: str) -> None:
    job, here = (
        whole_batches(sized(device=CPU, small=True)[name]),
        setting(engine="serial", device="cpu", precision="fp64"),
    )
    job = replace(job, active=None)
    federations = job.federations(CPU)
    loop = PlainLoop.of(job, here, federations)
    with driven(job, here, federations) as drive:
        drive.play(1)
        if job.distil:
            drive.play(1, phase=1)
            loop.distil(loop.teachers(), job.distil)
            theirs = dict(loop.net.state_dict())
        else:
            (theirs,) = loop.round([range(job.clients)])
        assert distance(dict(drive.states[0]["params"]), theirs) < 1e-12


def test_the_jobs_are_of_the_stated_size() -> None:
    assert FEMNIST.sizes == [3120] * 10
    assert (MANY_SMALL.sizes, MANY_SMALL.client_steps, MANY_SMALL.images_read) == (
        [50] * 1000,
        250,
        2500,
    )
    assert sum(DIRICHLET.sizes) == 45_000
    assert max(DIRICHLET.sizes) > 2 * min(DIRICHLET.sizes)
    assert replace(FEMNIST, local=replace(FEMNIST.local, steps=49)).images_read == 31_200
    for job in JOBS.values():
        assert str(parse(job.method)) == job.method


def test_the_small_network_has_the_size_of_pfls() -> None:
    params, _ = functional(MODELS.one("small_cnn").build((3, 32, 32), 10)).initial(("init", 0))
    assert sum(tensor.numel() for tensor in params.values()) == 1_626_442


def test_operations_are_counted_for_the_forward_and_the_backward_pass() -> None:
    first, second = 2 * 64 * 64, 2 * 64 * 10
    net = MODELS.one("mlp(hidden='64')").build((64,), 10)
    # no gradient in the input
    assert flops_an_example(net, torch.empty(64, device="meta")) == (
        first + second,
        2 * first + 3 * second,
    )


def run_cli(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["feddkd", "bench", *words])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


def test_the_command_ends_with_one_json_object_and_writes_it_to_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [
        "--small",
        "--job",
        "mlp",
        "--repeats",
        "2",
        "--engine",
        "serial",
        "--device",
        "cpu",
        "--json",
    ]
    assert run_cli(monkeypatch, *words, "--out", str(tmp_path / "bench.json")) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    kept = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert [entry["job"] for entry in told["jobs"]] == ["mlp"]
    assert kept["jobs"] == told["jobs"]
    assert {"torch", "feddkd", "commit", "precision", "repeats"} <= set(told)
    assert (told["repeats"], told["precision"], told["small"]) == (2, "fp32", True)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--job", "imagenet"], "unknown job 'imagenet'; there are: "),
        (["--engine", "steam"], "unknown engine 'steam'"),
        (["--precision", "fp8"], "unknown precision 'fp8' on cpu; there are: "),
        (["--precision", "tf32"], "unknown precision 'tf32' on cpu"),
        (["--precision", "bf16"], "unknown precision 'bf16' on cpu"),
        (["--engine", "serial", "--strategy", "graph"], "engine 'serial' has no strategies"),
        (
            ["--engine", "serial", "--strategies"],
            "of engine 'batched'",
        ),
        (
            ["--strategy", "vmap", "--strategies"],
            "of engine 'batched'",
        ),
        (["--out", "no/such/folder/bench.json"], "cannot write no/such/folder/bench.json"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    complaint: str,
) -> None:
    assert run_cli(monkeypatch, "--small", "--device", "cpu", *words) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1


def test_the_document_of_no_jobs_still_says_where_it_was_made() -> None:
    made = document([], setting(engine="serial", device="cpu"), small=False)
    assert made["jobs"] == []
    assert made["device"].startswith("cpu")


def test_an_engine_that_cannot_cast_is_not_measured_against_a_loop_that_does() -> None:
    with pytest.raises(InputError, match=r"engine 'serial' .* 'bf16'"):
        _ = BenchSetting("serial", torch.device("cuda"), "bf16", 1).options


@pytest.mark.parametrize(
    ("precision", "allowed"), [("tf32", True), ("bf16", True), ("fp32", False), ("fp64", False)]
)
def test_tf32_is_allowed_where_the_precision_says_so_and_put_back(
    precision: str, allowed: bool
) -> None:
    flags = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [flag.allow_tf32 for flag in flags]
    with BenchSetting("serial", torch.device("cuda"), precision, 1).arithmetic():
        assert [flag.allow_tf32 for flag in flags] == [allowed, allowed]
    assert [flag.allow_tf32 for flag in flags] == before
