"""`simulate` with a record, a progress bar, early stopping and a target; how its result looks."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from feddkd import InputError, Result, simulate
from feddkd.runs.record import find
from small import clients, distance, network, pooled

DATA, NET = clients(), network()
FEDDKD = "fedavg(epochs=1, batch_size=8) | dkd(steps=2, batch_size=8)"


def run(**changes: Any) -> Result:
    plain: dict[str, Any] = {
        "model": NET, "clients": DATA, "test": pooled(DATA), "method": FEDDKD, "rounds": 4,
        "engine": "serial",
    }  # fmt: skip
    return simulate(**{**plain, **changes})


def stop_after(last: int) -> Any:
    return lambda row: row["round"] == last


class Cut(Exception):  # noqa: N818
    """Stands for a crash in the middle of a run."""


def crash_after(last: int) -> Any:
    def on_round(row: dict[str, Any]) -> None:
        if row["round"] == last:
            raise Cut

    return on_round


def folder_of(tmp_path: Path) -> Path:
    return tmp_path / "one" / "run"


def test_a_record_changes_no_number_and_is_what_feddkd_run_writes(tmp_path: Path) -> None:
    out = folder_of(tmp_path)
    plain, kept = run(), run(out=out)
    assert distance(plain.params, kept.params) == 0
    assert plain.history == kept.history
    (record,) = find(tmp_path)
    assert (record.history, record.finished) == (plain.history, True)
    assert {path.name for path in out.iterdir()} == {
        "manifest.json", "rounds.jsonl", "timings.jsonl", "partition.json", "confusion.json",
        "summary.json", "final.safetensors", "seal.jsonl",
    }  # fmt: skip
    assert record.manifest["made_by"] == "simulate"
    assert record.manifest["experiment"]["method"] == FEDDKD
    assert record.manifest["engine"]["name"] == "serial"


@pytest.mark.parametrize("method", ["fedavg(batch_size=33) | dkd()", "fedbn(batch_size=33)"])
def test_a_finished_record_gives_the_same_result_again(tmp_path: Path, method: str) -> None:
    net = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Linear(7, 3)).double()
    plain: dict[str, Any] = {"model": net, "method": method, "out": tmp_path / "r"}
    first = run(**plain)
    seen: list[Any] = []
    again = run(**plain, on_round=seen.append)
    assert seen == []
    assert distance(first.params, again.params) == 0
    assert first.history == again.history
    assert first.private.keys() == again.private.keys()
    for client in first.private:
        assert distance(dict(first.private[client]), dict(again.private[client])) == 0
        first.state_dict(client)
    assert {t.dtype for t in again.params.values()} == {t.dtype for t in first.params.values()}


def test_a_run_that_was_cut_short_continues_to_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("feddkd.runs.session.Every.due", lambda *_: True)
    with pytest.raises(Cut):
        run(out=tmp_path / "r", on_round=crash_after(3))
    seen: list[Any] = []
    kept = run(out=tmp_path / "r", on_round=lambda row: seen.append(row["round"]))
    assert seen == [3, 4]
    assert distance(run().params, kept.params) == 0
    assert run().history == kept.history


def other_network() -> nn.Module:
    return network(seed=2)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"rounds": 5}, "rounds"),
        ({"method": "fedavg(epochs=2)"}, "method"),
        ({"seed": 1}, "seed"),
        ({"clients": DATA[:2]}, "data"),
        ({"test": DATA[0]}, "data"),
        ({"validation": DATA[0]}, "data"),
        ({"model": network(seed=2)}, "model"),
        ({"model": other_network}, "model"),
        ({"model": network(hidden=8)}, "model"),
        ({"min_clients": 2}, "min_clients"),
    ],
)
def test_a_record_of_another_run_is_refused(
    tmp_path: Path, changes: dict[str, Any], key: str
) -> None:
    run(out=tmp_path / "r", rounds=1)
    before = (tmp_path / "r" / "manifest.json").read_bytes()
    with pytest.raises(InputError, match=rf"another run: its {key} was [^\n]*$"):
        run(out=tmp_path / "r", **{"rounds": 1, **changes})
    assert (tmp_path / "r" / "manifest.json").read_bytes() == before


def test_seeds_of_a_network_that_is_built_are_one_family(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Linear(5, 3).double()

    for seed in (0, 1):
        run(model=build, seed=seed, rounds=1, out=tmp_path / str(seed), method="fedavg()")
    manifests = [record.manifest for record in find(tmp_path)]
    assert len({manifest["family"] for manifest in manifests}) == 1
    assert len({manifest["digest"] for manifest in manifests}) == 2
    assert len({manifest["weights"] for manifest in manifests}) == 2


@pytest.mark.parametrize("out", [None, "r"])
def test_on_round_sees_every_row_and_ends_the_run(tmp_path: Path, out: str | None) -> None:
    how: dict[str, Any] = {"out": None if out is None else tmp_path / out}
    seen: list[Any] = []
    run(on_round=seen.append)
    assert seen == run().history
    stopped = run(on_round=stop_after(2), **how)
    assert stopped.history == run().history[:2]
    assert distance(stopped.params, run(rounds=2).params) == 0
    if out is not None:  # the record is finished, with the rounds that were played
        again = run(**how)
        assert again.history == stopped.history
        manifest = json.loads((tmp_path / out / "manifest.json").read_text())
        assert "round 2" in manifest["stopped"]


def test_a_target_is_reported_and_does_not_end_the_run() -> None:
    result = run(target=0.01)
    assert len(result.history) == 4
    assert result.summary["to_target"]["round"] == 1
    assert result.summary["to_target"]["communications"] > 0
    assert run(target=1.0).summary["to_target"] is None
    assert run().summary["to_target"] is None
    with pytest.raises(InputError, match="target"):
        run(target=2)


def test_a_method_without_a_text_has_no_record(tmp_path: Path) -> None:
    from feddkd import fedavg
    from feddkd.method import Method

    bare = Method(fedavg().phases)
    assert run(method=bare, rounds=1).history
    with pytest.raises(InputError, match="text"):
        run(method=bare, rounds=1, out=tmp_path / "r")


def test_a_bar_is_shown_if_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    run(progress=None)
    assert capsys.readouterr() == ("", "")
    run(progress=True)
    done = capsys.readouterr()
    assert done.out == ""
    assert "4/4" in done.err


def test_a_result_prints_as_a_small_table() -> None:
    result = run(target=0.01)
    for text in (repr(result), str(result), result._repr_html_()):
        assert "fedavg(epochs=1, batch_size=8) | dkd(" in text
        assert f"{100 * result.history[-1]['test_accuracy']:.2f} %" in text
        assert "tensor" not in text
        assert "to 1 %" in text
    assert len(repr(result).splitlines()) == 3
    assert "<script>" not in Result({}, [], NET, method="<script>")._repr_html_()  # type: ignore[arg-type]
    assert repr(Result({}, [], NET))  # type: ignore[arg-type]


def test_a_result_is_plotted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPLBACKEND", "Agg")
    result = run()
    axes = result.plot()
    first, second = axes.lines
    assert list(first.get_ydata()) == [100 * row["test_accuracy"] for row in result.history]
    assert list(second.get_xdata()) == [1, 2, 3, 4]
    assert run(method="fedavg()", rounds=1).plot(axes) is axes
    assert len(axes.lines) == 3
    from matplotlib import pyplot

    pyplot.close(axes.figure)


def test_the_engine_is_chosen_unless_named() -> None:
    chosen = simulate(model=NET, clients=DATA, test=DATA[0], method=FEDDKD)
    serial = run(test=DATA[0], rounds=1)
    for name, tensor in serial.params.items():
        assert torch.allclose(tensor, chosen.params[name], rtol=1e-9)


@pytest.mark.parametrize(("name", "value"), [("on_round", 3), ("out", 5)])
def test_values_of_the_wrong_type_are_refused_by_name(name: str, value: Any) -> None:
    data = (torch.randn(8, 4), torch.randint(0, 3, (8,)))
    given: dict[str, Any] = {name: value}
    with pytest.raises(InputError, match=f"{name} must be"):
        simulate(
            model=nn.Linear(4, 3), clients=[data], test=data, method="fedavg(epochs=1)", **given
        )


def test_the_error_about_another_run_shows_the_difference(tmp_path: Path) -> None:
    data = (torch.randn(8, 4), torch.randint(0, 3, (8,)))
    nets = [nn.Linear(4, 3), nn.Linear(4, 3)]

    def record(net: nn.Module) -> None:
        simulate(
            model=net, clients=[data], test=data, method="fedavg(epochs=1)", out=tmp_path / "run"
        )

    record(nets[0])
    with pytest.raises(InputError, match="model was") as caught:
        record(nets[1])
    parts = re.search(r"model was (.*), now it is (.*); give", str(caught.value))
    assert parts is not None
    assert parts[1] != parts[2]
