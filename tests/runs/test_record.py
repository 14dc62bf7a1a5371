"""Tests of the record of a run, and of tables made from records."""

import io
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.torch import load_file

from feddkd import Experiment, InputError
from feddkd.reports.client_table import drawing
from feddkd.reports.curve_plot import curves
from feddkd.reports.tables import table
from feddkd.runs.prepare import prepare
from feddkd.runs.record import find, folder_name
from feddkd.runs.recorder import Recorder
from feddkd.runs.runner import execute
from feddkd.runs.summary import mean_and_std, summarise, to_target
from feddkd.version import commit
from playing import execute as execute_watched

FEDDKD = "fedavg(epochs=1, batch_size=32) | dkd(steps=2)"


def experiment(**keys: Any) -> Experiment:
    tiny = {
        "method": FEDDKD,
        "partition": "classes(per_client=2)",
        "model": "mlp(hidden='8')",
        "clients": 5,
        "rounds": 2,
    }
    return Experiment(**{**tiny, **keys})


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods on two seeds."""
    out = tmp_path_factory.mktemp("runs")
    for method in (FEDDKD, "fedavg(epochs=1, batch_size=32)"):
        for seed in (0, 1):
            execute(
                [experiment(method=method, seed=seed, target=0.15, split_seed=0)],
                out=out,
                engine="serial",
            )
    return out


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def shown(page: object, width: int = 80) -> list[str]:
    console = Console(width=width, record=True, file=io.StringIO(), markup=False, emoji=False)
    console.print(page)
    return console.export_text().splitlines()


def test_a_run_leaves_its_eight_files(tmp_path: Path) -> None:
    e = experiment()
    (summary,) = execute([e], out=tmp_path, engine="serial")
    folder = tmp_path / folder_name(e)
    files = [
        "confusion.json",
        "final.safetensors",
        "manifest.json",
        "partition.json",
        "rounds.jsonl",
        "seal.jsonl",
        "summary.json",
        "timings.jsonl",
    ]
    assert sorted(path.name for path in folder.iterdir()) == files
    assert json.loads((folder / "summary.json").read_text()) == summary
    assert [row["round"] for row in lines(folder / "rounds.jsonl")] == [1, 2]
    assert [row["round"] for row in lines(folder / "timings.jsonl")] == [1, 2]
    net = prepare(e, None).model.net
    assert {name: t.shape for name, t in load_file(folder / "final.safetensors").items()} == {
        name: t.shape for name, t in net.state_dict().items()
    }


def test_the_manifest_says_what_was_run_on_what(runs: Path) -> None:
    e = experiment(seed=1, target=0.15, split_seed=0)
    manifest = json.loads((runs / folder_name(e) / "manifest.json").read_text())
    prepared = prepare(e, None)
    assert Experiment(**manifest["experiment"]) == e
    assert manifest["canonical"] == e.canonical
    assert manifest["digest"] == e.digest
    assert manifest["data"]["digest"] == prepared.data.digest
    assert manifest["partition"] == {
        "digest": prepared.split.digest,
        "sizes": prepared.federation.sizes,
    }
    assert manifest["protocol"]["test_accuracy"] == "the global model on the whole test set"
    assert manifest["parameters"] == 8 * 64 + 8 + 8 * 10 + 10
    assert manifest["engine"] == {"name": "serial"}
    assert set(manifest["versions"]) >= {"feddkd", "python", "torch", "numpy"}
    assert set(manifest["hardware"]) >= {"machine", "system", "device", "threads"}


def test_the_rounds_are_the_same_byte_by_byte_when_run_again(runs: Path, tmp_path: Path) -> None:
    e = experiment(seed=1, split_seed=0)
    execute([e], out=tmp_path, engine="serial")
    for name in ("rounds.jsonl", "final.safetensors"):
        assert (tmp_path / folder_name(e) / name).read_bytes() == (
            runs / folder_name(e) / name
        ).read_bytes()


def test_each_row_has_accuracies_by_protocol_and_costs(runs: Path) -> None:
    first, second = lines(runs / folder_name(experiment(split_seed=0)) / "rounds.jsonl")
    for name in ("test", "validation", "average_test", "average_validation"):
        assert 0 <= first[f"{name}_accuracy"] <= 1
        assert first[f"{name}_loss"] > 0
    assert first["clients"] == [0, 1, 2, 3, 4]
    assert (first["communications"], second["communications"]) == (3, 6)  # 1 + J a round
    assert second["bytes_up"] == 2 * first["bytes_up"] > 0


def test_a_run_that_diverges_still_writes_json(tmp_path: Path) -> None:
    e = experiment(method="fedavg(epochs=1, lr=1e30)", on_divergence="continue", diagnostics=True)
    execute([e], out=tmp_path, engine="serial")
    rows = (tmp_path / folder_name(e) / "rounds.jsonl").read_text()
    assert not re.search("NaN|Infinity", rows)
    assert json.loads(rows.splitlines()[-1])["test_loss"] is None
    assert len(find(tmp_path)) == 1


def test_rows_are_on_disk_as_soon_as_they_are_there(tmp_path: Path) -> None:
    e, seen = experiment(), []
    execute_watched(
        [e],
        out=tmp_path,
        on_row=lambda _, row: seen.append(len(lines(tmp_path / folder_name(e) / "rounds.jsonl"))),
    )
    assert seen == [1, 2]


def test_an_unknown_engine_or_device_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(InputError):
        execute([experiment()], out=tmp_path / "out", engine="steam")
    with pytest.raises(InputError):
        execute([experiment()], out=tmp_path / "out", device="abacus")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot write the run to .*file"):
        Recorder(tmp_path / "file" / "run").take()


def test_a_table_shows_mean_and_population_std_over_seeds(runs: Path) -> None:
    expected = {}
    for method, label in ((FEDDKD, "fedavg | dkd"), ("fedavg(epochs=1, batch_size=32)", "fedavg")):
        rows = [
            lines(
                runs / folder_name(experiment(method=method, seed=s, split_seed=0)) / "rounds.jsonl"
            )
            for s in (0, 1)
        ]
        best = [
            100 * max(row, key=lambda r: r["validation_accuracy"])["test_accuracy"] for row in rows
        ]
        last = [100 * row[-1]["test_accuracy"] for row in rows]
        average = [100 * row[-1].get("average_test_accuracy", np.nan) for row in rows]
        cells = [
            f"{np.mean(v):.2f}±{np.std(v):.2f}" if np.isfinite(v).all() else "-"
            for v in (best, last, average)
        ]
        hits = [next((r for r in row if r["test_accuracy"] >= 0.15), None) for row in rows]
        hit = [r for r in hits if r]
        costs = [
            np.mean([r[name] for r in hit]) for name in ("round", "communications", "local_steps")
        ]
        costs.append(np.mean([r["bytes_up"] + r["bytes_down"] for r in hit]) / 1e6)
        expected[label] = [*cells, f"{len(hit)}/2", *(f"{cost:.4g}" for cost in costs)]
    text = shown(table(find(runs)))
    for label, cells in expected.items():
        (line,) = [line for line in text if line.startswith(f"{label}  ")]
        assert line.removeprefix(label).split() == cells


def test_a_table_of_the_demos_methods_fits_eighty_columns(runs: Path) -> None:
    records = find(runs)
    for record in records:  # as wide as the numbers get
        for row in record.history:
            row.update(
                test_accuracy=0.85 + 0.1 * record.manifest["canonical"]["seed"],
                communications=1650,
                local_steps=4500.5,
            )
            row.update(bytes_up=400_000_000, bytes_down=400_000_000)
    page = table(records)
    assert max(map(len, shown(page, 200))) <= 80
    assert shown(page, 80) == [line.rstrip().ljust(len(line)) for line in shown(page, 200)]
    assert all(word in " ".join(shown(page)) for word in ("MB", "800", "1650", "4500"))


def test_lines_of_a_table_can_be_told_apart(tmp_path: Path) -> None:
    for keys in (
        {},
        {"cohort": 0.4},
        {"method": "fedavg(epochs=2)"},
        {"method": "fedavg(epochs=3)"},
        {"name": "[/] :smile:", "seed": 1, "rounds": 1},
    ):
        execute([experiment(**keys)], out=tmp_path, engine="serial")
    text = "\n".join(shown(table(find(tmp_path)), 200))
    for label in (
        "fedavg | dkd, cohort 0.4",
        "fedavg | dkd, cohort 1.0",
        "fedavg(epochs=2) ",
        "fedavg(epochs=3) ",
        "[/] :smile: ",
    ):
        assert label in text


def test_runs_cut_short_are_counted_and_said_to_be(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs, tmp_path / "copy")
    folder = find(tmp_path)[0].folder
    (folder / "summary.json").unlink()  # it is there when all rounds are
    first, _ = (folder / "rounds.jsonl").read_text().splitlines()
    (folder / "rounds.jsonl").write_text(first + "\n")
    assert "1 of 4" in " ".join(shown(table(find(tmp_path))))


def test_a_torn_last_line_does_not_count(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs, tmp_path / "copy")
    before = find(tmp_path)[0]
    (before.folder / "summary.json").unlink()
    with (before.folder / "rounds.jsonl").open("a", encoding="utf-8") as lines:
        lines.write('{"round": 1')
    assert find(tmp_path)[0].history == before.history


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("manifest.json", "{}"),
        ("manifest.json", "[1"),
        ("manifest.json", "[]"),
        ("rounds.jsonl", '{"round": 1\n'),
        ("timings.jsonl", "{}\n"),
    ],
)
def test_a_damaged_run_is_named(runs: Path, tmp_path: Path, name: str, content: str) -> None:
    shutil.copytree(runs, tmp_path / "copy")
    folder = find(tmp_path)[0].folder
    (folder / name).write_text(content)
    with pytest.raises(InputError, match=re.escape(str(folder))):
        find(tmp_path)


def test_a_folder_without_runs_is_an_error_that_says_how_to_make_some(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="feddkd run"):
        find(tmp_path)
    with pytest.raises(InputError, match="no folder"):
        find(tmp_path / "nowhere")


HISTORY: list[dict[str, Any]] = [
    {
        "round": t,
        "test_accuracy": test,
        "validation_accuracy": validation,
        "communications": t,
        "local_steps": 1.5 * t,
    }
    | {"bytes_up": t, "bytes_down": t}
    for t, test, validation in [(1, 0.5, 0.6), (2, 0.7, 0.8), (3, 0.9, 0.8), (4, 0.6, 0.7)]
]


def test_the_best_round_is_the_first_of_those_best_in_validation() -> None:
    summary = summarise(HISTORY)
    assert (summary["best_round"], summary["test_accuracy"], summary["final_test_accuracy"]) == (
        2,
        0.7,
        0.6,
    )
    assert (summary["rounds"], summary["communications"], summary["local_steps"]) == (4, 4, 6.0)
    assert summary["selection"] == "best validation round"


def test_without_validation_the_best_round_is_said_to_be_picked_by_test() -> None:
    history = [
        {key: value for key, value in row.items() if key != "validation_accuracy"}
        for row in HISTORY
    ]
    assert (summarise(history)["best_round"], summarise(history)["test_accuracy"]) == (3, 0.9)
    assert "no validation set" in summarise(history)["selection"]


def test_the_price_of_a_target_is_paid_up_to_the_first_round_that_reaches_it() -> None:
    reached = to_target(HISTORY, 0.7)
    assert reached == {
        "target": 0.7,
        "round": 2,
        "communications": 2,
        "local_steps": 3.0,
        "bytes_up": 2,
        "bytes_down": 2,
    }
    assert to_target(HISTORY, 0.95) is None
    assert summarise(HISTORY, 0.7)["to_target"] == reached


def test_deviations_are_those_of_the_population() -> None:
    assert mean_and_std([1.0, 3.0]) == (2.0, 1.0)
    assert mean_and_std([5.0]) == (5.0, 0.0)


def test_a_partition_is_drawn_in_numbers_where_they_fit_and_else_in_shades() -> None:
    held = np.array([[8, 0, 100], [1, 25, 0]])
    assert [line.split() for line in shown(drawing(held, ["a", "b", "c"], 80))[2:]] == [
        ["0", "108", "8", "·", "100"],
        ["1", "26", "1", "25", "·"],
    ]
    narrow = shown(drawing(held, ["a", "b", "c"], 20))
    assert [line.split() for line in narrow[2:4]] == [["0", "108", "▁·█"], ["1", "26", "▁▂·"]]
    assert "abc" in narrow[0]


def test_a_figure_is_drawn_in_the_format_its_name_asks_for(runs: Path, tmp_path: Path) -> None:
    curves(find(runs), tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match=r"cannot draw to .*curves\.doc"):
        curves(find(runs), tmp_path / "curves.doc")


@pytest.mark.parametrize(
    ("dtype", "options", "precision"),
    [("float32", {}, "fp32"), ("float64", {}, "fp64"), ("float32", {"precision": "bf16"}, "bf16")],
)
def test_a_record_says_by_which_code_in_which_precision_and_on_which_data(
    tmp_path: Path, dtype: str, options: dict[str, str], precision: str
) -> None:
    e = experiment(dtype=dtype, rounds=1)
    execute([e], out=tmp_path, engine="batched", options={"strategy": "loop", **options})
    manifest = json.loads((tmp_path / folder_name(e) / "manifest.json").read_text())
    assert manifest["precision"] == precision
    assert manifest["engine"]["strategy"]
    assert manifest["hardware"]["device"]
    assert manifest["versions"].keys() >= {"feddkd", "python", "torch", "numpy"}
    assert manifest["data"]["digest"] == prepare(e, None).data.digest
    if (known := commit()) is not None:
        assert manifest["versions"]["commit"].startswith(known[0])
        assert len(known[0]) == 40


def test_a_package_outside_a_repository_has_no_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even inside another repository."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    monkeypatch.setattr("feddkd.version.__file__", str(tmp_path / "version.py"))
    assert commit.__wrapped__() is None
