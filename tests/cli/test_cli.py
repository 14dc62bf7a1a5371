"""The command line, as its users meet it."""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from commandline import TINY, Feddkd
from feddkd import __version__
from feddkd.engines.batched.engine import Batched
from feddkd.experiment import KEYS
from feddkd.methods import METHODS
from feddkd.spec.types import Count

PROMISED = [
    "digest",
    "method",
    "seed",
    "rounds",
    "test_accuracy",
    "best_round",
    "final_test_accuracy",
    "communications",
    "local_steps",
    "bytes_up",
    "bytes_down",
    "seconds",
]


MISTAKES = {
    "run": "Missing argument",
    "run nowhere.toml": "nowhere.toml: No such file",
    "run .": "Is a directory",
    "run broken.toml": "broken.toml is not TOML",
    "run tiny.toml --sett rounds=3": "No such option",
    "run tiny.toml --set rounds": "key=value",
    "run tiny.toml --set ruonds=3": "'ruonds' (did you mean 'rounds'?); there are: a",
    "run tiny.toml --set rounds=many": "rounds must be a whole number, not 'many'",
    "run tiny.toml --set method=fedsvg()": "unknown method 'fedsvg' (did you mean 'fedavg'?); ",
    "run tiny.toml --set method=fedavg(lr=-1)": "lr must be > 0, not -1",
    "run tiny.toml --set method=fedavg(rate=1)": "no option 'rate'",
    "run tiny.toml --set method=dkd()": "put a method that trains locally first",
    "run tiny.toml --set sweep.seed=3": "sweep.seed must be a list",
    "run tiny.toml --set data=digitz": "'digitz' (did you mean 'digits'?); there are: ag_news",
    "run tiny.toml --set data=emnist": "--data DIR",
    "run tiny.toml --set data=emnist --data nowhere": "no folder nowhere",
    "run tiny.toml --set data=emnist --data .": "emnist-letters-train",
    "run tiny.toml --set data=npz(path='a.npz')": "a.npz",
    "run tiny.toml --set clients=2000": "client",
    "run tiny.toml --set cohort=6": "cohort asks for 6 clients",
    "run tiny.toml --set min_clients=6": "min_clients is 6",
    "run tiny.toml --set method=feddf()": "reads public data, and there is none",
    "run tiny.toml --set availability=trace(file='tiny.toml')": (
        "tiny.toml: the first line must name the columns"
    ),
    "run tiny.toml --on-divergence panic": (
        "--on-divergence must be one of 'drop', 'stop', 'continue', not 'panic'"
    ),
    "run tiny.toml --engine serial --strategy vmap": "engine 'serial' takes no strategy",
    "run tiny.toml --set model=femnist_cnn": "'femnist_cnn' takes images of channels x 32 x 32",
    "run tiny.toml --set transform=crop(padding=9)": "'crop' takes images",
    "run tiny.toml --set training=0.95": "more than the whole",
    "run tiny.toml --set training=0.001": "client",
    "run tiny.toml --set partition=saved(path='a.npz')": "a.npz",
    "run tiny.toml --set partition=domains()": "domains",
    "run tiny.toml --engine steam": "'steam'; there are: auto, batched, pool, serial",
    "run tiny.toml --device abacus": "'abacus'",
    "run tiny.toml --threads 0": "--threads",
    "run tiny.toml --out tiny.toml/sub": "tiny.toml/sub",
    "data check digitz": "'digitz'",
    "data get mnist": "--data DIR",
    "data get mnits --data .": "'mnits' (did you mean 'mnist'?)",
    "data get digits --data .": "'digits' needs no download",
    "run tiny.toml --set partition=noise()": "'iid() | noise()'",
    "run tiny.toml --set partition=iid()|nois()": "'nois' (did you mean 'noise'?)",
    "run tiny.toml --set partition=owners()": "needs data with owners",
    "run tiny.toml --set data=mnist": "feddkd data get mnist",
    "run tiny.toml --set data=grammar(speaker=3)": "'speaker' (did you mean 'speakers'?)",
    "run tiny.toml --set data=grammar()": "iid(), quantity()",
    "run tiny.toml --set data=csv(path='no.csv')": "no.csv",
    "run tiny.toml --set data=table(path='no.xls',y='y')": ".parquet",
    "run tiny.toml --set data=table(path='no.csv',y='y')": "no.csv",
    "run tiny.toml --set data=masks(path='no')": "images/ and masks/",
    "run tiny.toml --set data=no.py:function": "no.py",
    "run tiny.toml --set client_tests=owned": "'own'",
    "run tiny.toml --set task=regresion": "'regression'",
    "run tiny.toml --set model=mlp(hiden=4)": "'hidden'",
    "data show nowhere.toml": "No such file",
    "data show tiny.toml --save tiny.toml/a.npz": "tiny.toml/a.npz",
    "report": "there is no folder runs",
    "report .": "no runs under .; `feddkd run",
    "methods fedsvg": "unknown method 'fedsvg' (did you mean 'fedavg'?); there are: ",
    "methods --markdown tiny.toml/sub": "tiny.toml/sub",
    "nonsense": "No such command",
}


@pytest.mark.parametrize("line", MISTAKES)
def test_a_users_mistake_is_one_line_and_status_two(feddkd: Feddkd, line: str) -> None:
    Path("broken.toml").write_text("method = ")
    done = feddkd(*line.split())
    assert done.status == 2
    assert re.fullmatch(r"feddkd: .+\n", done.err)
    assert MISTAKES[line] in done.err
    assert done.out == ""
    assert not Path("runs").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_a_mistake(feddkd: Feddkd) -> None:
    done = feddkd("run", "tiny.toml", "--device", "cuda")
    assert done.status == 2
    assert done.err.startswith("feddkd: device 'cuda' is not available")


def test_memory_that_runs_out_is_told_in_a_line(
    feddkd: Feddkd, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("CUDA error: out of memory\nmore words")

    monkeypatch.setattr(Batched, "_fold_chunk", fails)
    done = feddkd(
        "run", "tiny.toml", "--engine", "batched", "--set", "cohort=1", "--set", "sweep.seed=[0]"
    )
    assert (done.status, done.err.splitlines()[-1]) == (
        1,
        "feddkd: memory ran out: CUDA error: out of memory more words",
    )


def test_the_installed_command_reports_a_mistake_without_a_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "feddkd", "run", "no.toml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "feddkd: cannot read the experiment no.toml: No such file or directory\n"


def test_a_run_shows_a_table_and_where_it_was_written(feddkd: Feddkd) -> None:
    done = feddkd(
        "run", "tiny.toml", "--out", "here", "--set", "target=0.1", "--set", "name=[/] :smile:"
    )
    assert done.status == 0
    assert re.search(r"^\[/\] :smile: +\d+\.\d\d±0\.00", done.out, re.MULTILINE)
    assert done.out.endswith("written to here/\n")
    assert re.search(r"^\[/\] :smile:, seed 0: round 2, test \d+\.\d %\n\Z", done.err, re.MULTILINE)
    assert "\x1b" not in done.out + done.err
    assert len(list(Path("here").iterdir())) == 1


def test_with_json_the_last_line_is_one_object_with_what_is_promised(feddkd: Feddkd) -> None:
    done = feddkd("run", "tiny.toml", "--json", "--set", "sweep.seed=[3, 4]")
    assert done.status == 0
    runs = json.loads(done.out)["runs"]  # nothing else is on standard output
    assert [run["seed"] for run in runs] == [3, 4]
    for run in runs:
        assert set(PROMISED) <= set(run)
        folder = next(Path("runs").glob(f"*-{run['digest'][:12]}"))
        rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
        assert run["method"] == "fedavg(epochs=1, batch_size=32) | dkd(steps=1)"
        assert (run["rounds"], run["communications"]) == (2, 4)
        assert run["test_accuracy"] == rows[run["best_round"] - 1]["test_accuracy"]
        assert run["final_test_accuracy"] == rows[-1]["test_accuracy"]
        assert run["bytes_up"] > 0 < run["seconds"]


def test_bars_on_a_terminal_leave_standard_output_alone(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(TINY)
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "feddkd", "run", "tiny.toml", "--json"]
    wide = {**os.environ, "COLUMNS": "140"}
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=end, text=True, env=wide
    ) as process:
        os.close(end)
        seen = b""
        while chunk := _read(terminal):
            seen += chunk
        assert process.stdout is not None
        assert len(json.loads(process.stdout.read())["runs"]) == 1
    os.close(terminal)
    for said in ("━", "2/2", "test ", "DKD ", "images/s"):
        assert said in seen.decode()


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # Linux says so when the other end is closed
        return b""


def test_settings_and_sweep_decide_what_is_run(feddkd: Feddkd) -> None:
    done = feddkd(
        "run", "tiny.toml", "--json", "--set", "rounds=1", "--set", "method=fedavg(epochs=1)"
    )
    (run,) = json.loads(done.out)["runs"]
    assert (run["method"], run["rounds"]) == ("fedavg(epochs=1)", 1)


def test_report_shows_the_table_of_a_folder_again(feddkd: Feddkd) -> None:
    table = feddkd("run", "tiny.toml", "--set", "sweep.seed=[0, 1]").out
    assert (
        table.removesuffix("written to runs/\n")
        == feddkd("report").out
        == feddkd("report", "runs").out
    )


def test_the_methods_are_listed_with_their_options(feddkd: Feddkd) -> None:
    methods = {
        method["name"]: method for method in json.loads(feddkd("methods", "--json").out)["methods"]
    }
    assert {"dkd", "fedavg", "fedbn", "fedmax", "fedprox"} <= set(methods)
    assert methods["dkd"]["options"]["steps"] == 10
    assert all(method["summary"] for method in methods.values())
    text = feddkd("methods").out
    assert all(name in text for name in methods)
    assert max(map(len, text.splitlines())) <= 80


def test_a_method_with_an_option_that_must_be_given_is_listed_too(
    feddkd: Feddkd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(METHODS, "_factories", dict(METHODS._factories))

    def odd(*, size: Count) -> None:
        """Odd."""

    METHODS.register(odd)  # type: ignore[arg-type]
    (listed,) = (
        m for m in json.loads(feddkd("methods", "--json").out)["methods"] if m["name"] == "odd"
    )
    assert (listed["summary"], listed["options"], listed["paper"], listed["phases"]) == (
        "Odd.",
        {"size": None},
        None,
        [],
    )
    assert "size" in feddkd("methods").out
    assert "must be given" in feddkd("methods", "odd").out


def test_the_sources_and_partitions_are_listed(feddkd: Feddkd) -> None:
    listed = json.loads(feddkd("data", "list", "--json").out)
    names = {kind: {row["name"] for row in listed[kind]} for kind in ("sources", "partitions")}
    assert {"digits", "emnist", "cifar10", "npz"} <= names["sources"]
    assert {"iid", "dirichlet", "saved"} <= names["partitions"]
    text = feddkd("data", "list").out
    assert all(name in text for name in names["sources"] | names["partitions"])
    assert "https://www.cs.toronto.edu/~kriz/cifar.html" in text
    assert max(map(len, text.splitlines())) <= 80


def test_check_says_what_a_source_holds(feddkd: Feddkd) -> None:
    done = feddkd("data", "check", "digits")
    assert done.status == 0
    assert re.fullmatch(
        r"digits: 1,438 training and 359 test examples of 1x8x8, 10 classes, sha256 [0-9a-f]{12}\n",
        done.out,
    )


def test_check_goes_on_to_the_next_source_and_fails_in_the_end(feddkd: Feddkd) -> None:
    done = feddkd("data", "check", "mnist", "digits")
    assert done.status == 2
    assert re.match(r"mnist: .*--data DIR.*\ndigits: 1,438", done.out)
    assert "mnist" in done.err


def test_show_draws_clients_by_classes(feddkd: Feddkd) -> None:
    done = feddkd("data", "show", "tiny.toml")
    table = [line.split() for line in done.out.splitlines() if re.match(r" +\d+ +\d+ ", line)]
    assert [row[0] for row in table] == ["0", "1", "2", "3", "4"]
    counts = np.array([[0 if cell == "·" else int(cell) for cell in row[2:]] for row in table])
    assert counts.shape == (5, 10)
    assert ((counts > 0).sum(1) == 2).all()
    assert (counts.sum(1) == [int(row[1]) for row in table]).all()


def test_a_saved_partition_is_the_same_wherever_the_file_lies(feddkd: Feddkd) -> None:
    drawn = feddkd("data", "show", "tiny.toml", "--save", "deep/split.npz")
    shutil.copy("deep/split.npz", "other.npz")
    tables, digests = [drawn.out.splitlines()[1:]], set()
    for path in ("deep/split.npz", "other.npz"):
        setting = f"partition=saved(path='{path}')"
        tables.append(feddkd("data", "show", "tiny.toml", "--set", setting).out.splitlines()[1:])
        (run,) = json.loads(feddkd("run", "tiny.toml", "--json", "--set", setting).out)["runs"]
        digests.add(run["digest"])
    assert tables[0][-5:] == tables[1][-5:] == tables[2][-5:]
    assert len(digests) == 1
    (saved,) = Path("runs").iterdir()
    feddkd("run", "tiny.toml")
    (plain,) = set(Path("runs").iterdir()) - {saved}
    assert (saved / "rounds.jsonl").read_bytes() == (plain / "rounds.jsonl").read_bytes()
    digest = [
        json.loads((folder / "manifest.json").read_text())["partition"]["digest"]
        for folder in (saved, plain)
    ]
    assert digest[0] == digest[1]
    assert digest[0][:12] in drawn.out


@pytest.mark.parametrize(
    ("line", "taught"),
    [
        ("--help", ["run", "report", "methods", "data", "TOML"]),
        (
            "run --help",
            [
                "partition",
                "clients",
                "docs/experiments.md",
                "[sweep]",
                "--set",
                "fedavg(epochs=5, lr=0.1) | dkd(steps=10, lr=0.2)",
                "--json",
                "FEDDKD_DATA",
            ],
        ),
        ("methods --help", ["fedavg() | dkd()"]),
        (
            "report --help",
            ["DIR", "mean and standard deviation", "--out", "--open", "--figures", "--json"],
        ),
        ("data --help", ["list", "check", "show"]),
        ("data show --help", ["--save", "saved(path='FILE.npz')"]),
    ],
)
def test_help_teaches(feddkd: Feddkd, line: str, taught: list[str]) -> None:
    done = feddkd(*line.split())
    assert (done.status, done.err) == (0, "")
    assert [word for word in taught if word not in " ".join(done.out.split())] == []


def test_the_page_about_experiments_names_every_key() -> None:
    text = (Path(__file__).parents[2] / "docs" / "experiments.md").read_text(encoding="utf-8")
    assert [key for key in KEYS if not re.search(rf"\b{key}\b", text)] == []


@pytest.mark.parametrize("line", ["", "data"])
def test_saying_nothing_shows_the_help(feddkd: Feddkd, line: str) -> None:
    done = feddkd(*line.split())
    assert "Usage: feddkd" in done.out
    assert done.err == ""


def test_the_version_is_told(feddkd: Feddkd) -> None:
    assert feddkd("--version") == (0, f"feddkd {__version__}\n", "")
