"""Clients that drop out, come late or send numbers gone bad; rounds that end early, runs that
cannot go on.
"""

import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, softmax

from feddkd import DivergedError, Experiment, InputError, NobodyAnsweredError, parse, simulate
from feddkd.cli.app import main
from feddkd.data.examples import Examples
from feddkd.data.federation import Federation, assemble
from feddkd.data.transforms import transform
from feddkd.engines.batched.engine import Batched
from feddkd.engines.interface import Engine
from feddkd.engines.pool.engine import Pool
from feddkd.engines.serial import Serial
from feddkd.method import Exchange
from feddkd.models.functional import functional
from feddkd.rounds.availability import Availability, listed, tolerance
from feddkd.rounds.evaluation import Evaluation, Protocol, fitting_protocol, measure
from feddkd.rounds.loop import Run, play
from feddkd.runs.record import find, folder_name
from feddkd.runs.runner import execute
from feddkd.tensors import is_finite
from interrupted import OFTEN, content, experiment
from playing import job_of, play_job
from small import Pair, clients, distance, network, run
from test_resume import cut

SIZES = (12, 20, 30, 16, 14)  # no batch of one: batch norm has no use for it
METHODS = {
    "feddkd": "fedavg(epochs=1, batch_size=8) | dkd(steps=3, batch_size=8)",
    "kept with the client": "scaffold(epochs=1, batch_size=8)",
    "batch norm": "fedbn(epochs=1, batch_size=8) | dkd(steps=2, batch_size=8)",
    "parts, step by step": "astraea(gamma=2, epochs=1, batch_size=8) | dkd(steps=2, batch_size=8)",
    "parts, layer by layer": "fedma(epochs=1, batch_size=8)",
    "at the server": (
        "feddf(epochs=1, batch_size=8, server_steps=2, server_optimiser='sgd') | server_momentum()"
    ),
}
ENGINES: dict[str, dict[str, Any]] = {
    "serial": {},
    "batched": {"strategy": "vmap"},
    "pool": {"workers": 2},
}
# where a round has many exchanges, and one
AWAY = {True: "random(drop=0.1, late=0.1)", False: "random(drop=0.2, late=0.2)"}


def world(seed: int, bad: Sequence[int] = ()) -> Federation:
    """Return five clients; the `bad` ones hold numbers that are not finite."""
    data = clients(SIZES, seed=seed)
    whole = [Examples(x / 0 if k in bad else x, y) for k, (x, y) in enumerate(data)]
    return assemble(whole, Examples(*data[0]), None, transform(""), Examples(*data[1]))


def with_norm() -> nn.Module:
    return nn.Sequential(
        nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3)
    ).double()


def play_on(
    engine: str,
    method: str,
    *,
    seeds: Sequence[int] = (0,),
    bad: Sequence[Sequence[int]] = ((), (), ()),
    rounds: int = 2,
    cohort: int = 5,
    availability: str | Availability = "always()",
    min_clients: int = 1,
    on_divergence: str = "drop",
) -> tuple[list[Run], list[list[Any]]]:
    """Runs in lock-step, and their rows."""
    model = functional(with_norm() if "bn" in method else network())
    job = job_of(
        model,
        method,
        [world(seed, own) for seed, own in zip(seeds, bad, strict=False)],
        [model.initial(("init", seed)) for seed in seeds],
        seeds,
        rounds=rounds,
        cohort=cohort,
        evaluation=Evaluation(fitting_protocol(parse(method), own_tests=False)),
        tolerance=tolerance(availability, min_clients, on_divergence),
    )
    runs, rounds_played = play_job(job, engine, **ENGINES[engine])
    return runs, [[rows[n] for rows in rounds_played if n in rows] for n in range(len(seeds))]


def apart(one: Run, other: Run) -> float:
    """Return the distance between the states of two runs."""
    assert set(one.state) == set(other.state)
    pairs = [
        (tensor, other.state[group][name])
        for group, own in one.state.items()
        for name, tensor in own.items()
    ]
    return max(
        ((a.double() - b.double()).abs() / a.double().abs().clamp(min=1)).max().item()
        for a, b in pairs
        if a.numel()
    )


def told(rows: list[Any]) -> list[Any]:
    return [
        {
            key: row.get(key)
            for key in ("clients", "missing", "ended", "communications", "bytes_down", "bytes_up")
        }
        for row in rows
    ]


# --- absences


@pytest.mark.parametrize("method", METHODS)
def test_the_same_absences_give_the_same_weights_on_every_engine_and_beside_other_runs(
    method: str,
) -> None:
    away = AWAY["dkd" in METHODS[method] or "fedma" in METHODS[method]]
    runs, rows = play_on("serial", METHODS[method], seeds=(0, 1), availability=away)
    missing = [[row.get("missing") for row in own] for own in rows]
    assert any(missing[0])
    assert missing[0] != missing[1]
    for engine in ("batched", "pool"):
        found, same = play_on(engine, METHODS[method], seeds=(0, 1), availability=away)
        assert max(map(apart, runs, found)) < 1e-12, engine
        assert list(map(told, same)) == list(map(told, rows))
    for at, seed in enumerate((0, 1)):
        (alone,), (own,) = play_on("serial", METHODS[method], seeds=(seed,), availability=away)
        assert apart(alone, runs[at]) == 0
        assert own == rows[at]


def by_hand(
    net: nn.Module, data: Sequence[Pair], answers: Sequence[Sequence[int]], lr: float, gamma: float
) -> list[Tensor]:
    """A round of FedDKD on whole data sets, with who answers in each exchange, by torch alone."""
    start = list(net.parameters())

    def logits(weights: Sequence[Tensor], x: Tensor) -> Tensor:
        return torch.relu(x @ weights[0].T + weights[1]) @ weights[2].T + weights[3]

    models = [
        [
            w - lr * g
            for w, g in zip(
                start, torch.autograd.grad(cross_entropy(logits(start, x), y), start), strict=True
            )
        ]
        for x, y in data
    ]
    total = sum(len(data[k][1]) for k in answers[0])
    w = [
        torch.stack([len(data[k][1]) / total * models[k][i] for k in answers[0]]).sum(0).detach()
        for i in range(len(start))
    ]
    for present in answers[1:]:
        w = [tensor.requires_grad_() for tensor in w]
        losses = [
            -(
                softmax(logits(models[k], data[k][0]), -1).detach()
                * log_softmax(logits(w, data[k][0]), -1)
            )
            .sum(-1)
            .mean()
            for k in present
        ]
        slopes = torch.autograd.grad(sum(losses) / len(present), w)  # type: ignore[arg-type]
        w = [(tensor - gamma * g).detach() for tensor, g in zip(w, slopes, strict=True)]
    return w


@pytest.mark.parametrize("event", ["drop", "late"])
@pytest.mark.parametrize(
    ("where", "answers"),
    [
        (("local", 1), [(0, 2), (0, 2), (0, 2)]),
        (("distil", 1), [(0, 1, 2), (0, 2), (0, 2)]),
        (("distil", 2), [(0, 1, 2), (0, 1, 2), (0, 2)]),
    ],
)
def test_a_client_lost_in_an_exchange_is_as_if_the_cohort_had_been_without_it_from_there_on(
    where: tuple[str, int], answers: list[tuple[int, ...]], event: str
) -> None:
    data, net = clients(), network()
    text = "fedavg(epochs=1, batch_size=100, lr=0.1) | dkd(steps=2, batch_size=100, lr=0.3)"
    found = run(text, data, net, rounds=1, availability=listed([(1, 1, *where, event)]))
    expected = by_hand(net, data, answers, 0.1, 0.3)
    assert (
        max(
            (a - b).abs().max().item() for a, b in zip(found.params.values(), expected, strict=True)
        )
        < 1e-12
    )
    assert found.history[0]["missing"] == [[*where, 1, event]]


def test_who_is_asked_in_vain_costs_bytes_down_and_none_up() -> None:
    data, net = clients(), network()
    whole, less = (
        run("fedavg(batch_size=8)", data, net, rounds=1, availability=listed(rows)).history[0]
        for rows in ([], [(1, 1, "local", 1, "drop")])
    )
    assert less["bytes_down"] == whole["bytes_down"]
    assert 3 * less["bytes_up"] == 2 * whole["bytes_up"]
    assert less["communications"] == whole["communications"]


def engine_after(event: str | None, bad: Sequence[int] = ()) -> Serial:
    method, model = parse(METHODS["kept with the client"]), functional(network())
    state, memo = method.start(model, *model.initial(("init", 0)))
    engine = Serial(model, [world(0, bad)], [memo], torch.float64)
    absences = listed([(1, 1, "local", 1, event)] if event else [])
    for _ in play(
        method,
        model,
        engine,
        [Run(0, 0, state, has_validation=False)],
        cohort=5,
        last=1,
        evaluation=Evaluation(fitting_protocol(method, own_tests=False)),
        tolerance=tolerance(absences, 1, "drop"),
    ):
        pass
    return engine


def test_a_late_clients_memo_changes_and_that_of_a_dropped_or_bad_one_does_not() -> None:
    present, late, dropped = (engine_after(event).memos_of(0) for event in (None, "late", "drop"))
    assert distance(dict(late[1]["control"]), dict(present[1]["control"])) == 0
    assert any(tensor.any() for tensor in late[1]["control"].values())
    assert 1 not in dropped
    assert 1 not in engine_after(None, bad=[1]).memos_of(0)


def test_rates_are_probabilities_by_exchange_and_follow_the_seed() -> None:
    rule, exchange = (
        tolerance("random(drop=0.2, late=0.1)", 1, "drop").availability,
        Exchange(parse("fedavg()").phases[0]),
    )
    events = [rule.event(seed, 1, exchange, client) for seed in (0, 1) for client in range(2000)]
    assert [round(events.count(event) / 4000, 1) for event in ("drop", "late", None)] == [
        0.2,
        0.1,
        0.7,
    ]
    assert events[:2000] != events[2000:]
    fixed = tolerance("random(drop=0.2, late=0.1, seed=1)", 1, "drop").availability
    assert [fixed.event(7, 1, exchange, client) for client in range(2000)] == events[2000:]


# --- too few


def test_a_round_with_too_few_ends_with_the_average_kept_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data, net = clients(), network()
    gone = listed([(1, 0, "distil", 1, "drop"), (1, 2, "distil", 1, "late")])
    found = run(
        "fedavg(batch_size=8) | dkd(steps=3)",
        data,
        net,
        rounds=1,
        availability=gone,
        min_clients=2,
        diagnostics=True,
    )
    assert distance(found.params, run("fedavg(batch_size=8)", data, net, rounds=1).params) == 0
    assert found.history[0]["ended"] == {
        "phase": "distil",
        "step": 1,
        "answered": 1,
        "min_clients": 2,
    }
    assert found.history[0]["communications"] == 2
    assert found.history[0]["test_loss"] == found.history[0]["average_test_loss"]
    assert (
        "too few clients answered phase 'distil', step 1, in round 1 (seed 3): 1 of at least 2"
        in caplog.text
    )


def test_steps_made_before_the_round_ended_count_and_the_next_round_is_whole() -> None:
    data, net = clients(), network()
    gone = listed([(1, 0, "distil", 3, "drop")])
    one, two = (
        run(
            f"fedavg(batch_size=8) | dkd(steps={steps}, batch_size=8)",
            data,
            net,
            rounds=rounds,
            availability=absent,
            min_clients=3,
        )
        for steps, rounds, absent in ((4, 2, gone), (2, 1, listed([])))
    )
    assert one.history[0]["test_loss"] == two.history[0]["test_loss"]
    assert "ended" not in one.history[1]
    assert one.history[1]["communications"] == 1 + 3 + 1 + 4


@pytest.mark.parametrize("where", [("local", 1), ("distil", 2)])
def test_nobody_at_all_is_an_error(where: tuple[str, int]) -> None:
    gone = listed([(2, k, *where, "drop") for k in range(3)])
    words = f"phase '{where[0]}', step {where[1]}, in round 2 \\(seed 3\\)"
    with pytest.raises(NobodyAnsweredError, match=words):
        run("fedavg() | dkd(steps=2)", clients(), network(), availability=gone)


# --- traces

HEADER = "round,client,phase,step,event\n"
WRONG = {
    "": "first line must name the columns",
    "round,client,phase,step\n1,0,local,1\n": "first line must name the columns",
    HEADER.replace("event", "event,why")
    + "1,0,local,1,drop,x\n": "first line must name the columns",
    HEADER + "1,0,local,1\n": "line 2 ",
    HEADER + "1,0,local,1,drop\n1,0,local,1,drop,again\n": "line 3 ",
    HEADER + "1,0,local,1,gone\n": "event must be one of 'drop', 'late', not 'gone'",
    HEADER + "0,0,local,1,drop\n": "round must be >= 1, not 0",
    HEADER + "1,-1,local,1,drop\n": "client must be a whole number, not '-1'",
    HEADER + "1,one,local,1,drop\n": "client must be a whole number, not 'one'",
    HEADER + "1,0,local,0,drop\n": "step must be >= 1, not 0",
    HEADER + f"1,{'9' * 30},local,1,drop\n": "64 bits",
    HEADER + "1,0,local,1,drop\n1,0,local,1,late\n": "listed twice",
    HEADER + '1,0,"local,1,drop\n': "cannot read the availability trace",
    HEADER + "1,0,lokal,1,drop\n": "local, distil",
    HEADER + "1,3,local,1,drop\n": "no client 3; clients have numbers from 0 to 2",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_trace_is_an_error_that_names_what_is_wrong(text: str, tmp_path: Path) -> None:
    path = tmp_path / "faults.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=r"^[^\n]*$") as caught:
        run("fedavg() | dkd()", clients(), network(), availability=f"trace(file={str(path)!r})")
    assert WRONG[text] in str(caught.value)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", None])
def test_a_trace_that_cannot_be_read_is_an_error(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "faults.csv"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(InputError, match="cannot read the availability trace"):
        Experiment(method="fedavg()", availability=f"trace(file={str(path)!r})")


@pytest.mark.parametrize("given", [5, None, [(1, 0, "local", 1, "drop")]])
def test_something_else_than_an_availability_is_an_error(given: Any) -> None:
    with pytest.raises(InputError, match="availability must be"):
        run("fedavg()", clients(), network(), availability=given)


def test_a_trace_is_known_by_what_it_holds(tmp_path: Path) -> None:
    lines = ["1,0,local,1,drop", "2,1,distil,3,late"]
    texts = [
        "\n".join([HEADER.strip(), *lines, ""]),
        "\r\n".join([HEADER.strip(), *(f" {line}" for line in lines[::-1])]),
        HEADER + lines[0],
        HEADER,
    ]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.csv").write_text(text)
    found = [
        Experiment(method="fedavg()", availability=f"trace(file={str(tmp_path / f'{n}.csv')!r})")
        for n in range(4)
    ]
    assert found[0].digest == found[1].digest
    assert len({one.digest for one in found}) == 3
    assert (
        found[0].tolerance.availability.canonical
        == listed([(2, 1, "distil", 3, "late"), (1, 0, "local", 1, "drop")]).canonical
    )
    assert "file" not in found[0].canonical["availability"]
    assert Experiment(**found[0].as_dict()).digest == found[0].digest


# --- on disk


def test_a_run_with_faults_that_was_cut_short_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    away = {"availability": "random(drop=0.1, late=0.1)", "cohort": 4, "min_clients": 2}
    runs = [
        experiment("scaffold(epochs=1, batch_size=32) | dkd(steps=2)", seed=seed, **away)
        for seed in (0, 1)
    ]
    execute(runs, out=tmp_path / "whole", engine="serial")
    cut(4, runs, tmp_path / "cut", engine="serial")
    execute(runs, out=tmp_path / "cut", engine="serial", every=OFTEN)
    assert content(tmp_path / "cut") == content(tmp_path / "whole")
    rows = [row for record in find(tmp_path / "whole") for row in record.history]
    assert any("ended" in row for row in rows)
    assert any("missing" in row for row in rows)


def test_a_run_whose_trace_has_changed_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("faults.csv").write_text(HEADER)
    execute(
        [experiment(availability="trace(file='faults.csv')", rounds=1)],
        out=Path("runs"),
        engine="serial",
    )
    Path("faults.csv").write_text(HEADER + "1,0,local,1,drop\n")
    monkeypatch.setattr("sys.argv", ["feddkd", "resume", "runs"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "a file that its experiment names has changed" in capsys.readouterr().err


def test_a_run_whose_folder_was_given_another_name_is_not_begun_anew_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    one = experiment(rounds=2)
    execute([one], out=tmp_path, engine="serial", until=1)
    (tmp_path / folder_name(one)).rename(tmp_path / "mine")
    monkeypatch.setattr("sys.argv", ["feddkd", "resume", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert f"rename the folder to {folder_name(one)}" in capsys.readouterr().err
    assert [folder.name for folder in tmp_path.iterdir()] == ["mine"]


# of these seeds it ends one alone
FATAL = {"availability": "random(drop=0.2)", "rounds": 4, "cohort": 3}


def test_a_run_that_cannot_go_on_is_recorded_as_such_and_the_others_reach_their_end(
    tmp_path: Path,
) -> None:
    runs = [
        experiment("fedavg(epochs=1, batch_size=32) | dkd(steps=1)", seed=seed, **FATAL)
        for seed in (0, 1, 2)
    ]
    summaries = execute(runs, out=tmp_path / "together", engine="serial")
    (lost,) = [n for n, summary in enumerate(summaries) if "ended" in summary]
    folder = tmp_path / "together" / folder_name(runs[lost])
    assert summaries[lost]["ended"].count("answered phase") == 1
    assert json.loads((folder / "manifest.json").read_text())["ended"] == summaries[lost]["ended"]
    assert not (folder / "summary.json").exists()
    assert 0 < len(find(folder)[0].history) == summaries[lost]["rounds"] < 4
    for n in {0, 1, 2} - {lost}:
        execute([runs[n]], out=tmp_path / "alone", engine="serial")
        name = folder_name(runs[n])
        assert content(tmp_path / "alone" / name) == content(tmp_path / "together" / name)
    before = content(tmp_path / "together")
    again = execute(runs, out=tmp_path / "together", engine="serial")
    assert [{**summary, "seconds": 0} for summary in again] == [
        {**summary, "seconds": 0} for summary in summaries
    ]
    assert content(tmp_path / "together") == before


def test_feddkd_run_names_a_run_that_cannot_go_on_and_leaves_with_status_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = experiment("fedavg(epochs=1, batch_size=32) | dkd(steps=1)", **FATAL).as_dict()
    text = "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items() if key != "seed")
    (tmp_path / "fatal.toml").write_text(text + "[sweep]\nseed = [0, 1, 2]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["feddkd", "run", "fatal.toml", "--engine", "serial", "--json"])
    with pytest.raises(SystemExit) as caught:
        main()
    done = capsys.readouterr()
    assert caught.value.code == 1
    assert "1 of 3 runs could not go on: fedavg | dkd, seed " in done.err
    runs = json.loads(done.out.splitlines()[-1])["runs"]
    assert sorted(one["ended"] is None for one in runs) == [False, True, True]
    assert sorted(one["test_accuracy"] is None for one in runs) == [False, False, True]


# --- numbers gone bad


@pytest.mark.parametrize(
    ("engine", "method"),
    [*product(("serial", "batched"), METHODS), ("pool", "kept with the client")],
)
def test_a_client_whose_numbers_are_not_finite_is_left_out_as_if_it_had_dropped_out(
    engine: str, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    (found,), (rows,) = play_on(engine, METHODS[method], bad=[[3]])
    missing = [row["missing"] for row in rows]
    assert [[(client, why) for _, _, client, why in own] for own in missing] == [
        [(3, "not finite")]
    ] * 2
    absences = [
        (t, client, phase, step, "drop")
        for t, own in enumerate(missing, 1)
        for phase, step, client, _ in own
    ]
    (expected,), (same,) = play_on(
        "serial", METHODS[method], bad=[[3]], availability=listed(absences)
    )
    assert apart(found, expected) < 1e-12
    assert [row["bytes_down"] for row in rows] == [row["bytes_down"] for row in same]
    phase, step = missing[0][0][:2]
    assert (
        f"client 3 is not finite: phase '{phase}', step {step}, in round 1 (seed 0), key (0, 1, "
        in caplog.text
    )


def test_to_stop_names_the_client_and_to_go_on_is_to_go_on() -> None:
    (found,), _ = play_on("serial", METHODS["feddkd"], bad=[[3]], on_divergence="stop")
    assert isinstance(found.error, DivergedError)
    assert str(found.error).endswith(
        "client 3 is not finite: phase 'local', step 1, in round 1 (seed 0), key (0, 1, 0, 1, 3)"
    )
    (found,), (rows,) = play_on("serial", METHODS["feddkd"], bad=[[3]], on_divergence="continue")
    assert not is_finite(found.state)
    assert "missing" not in rows[-1]


def test_a_server_whose_numbers_go_bad_by_itself_is_an_error_that_names_the_phase() -> None:
    with pytest.raises(
        DivergedError,
        match="server's state is not finite after phase 'server_momentum', step 1, in round",
    ):
        run(
            "fedavg(batch_size=8) | server_momentum(lr=1e308)",
            [(100 * x, y) for x, y in clients()],
            network(),
            rounds=5,
        )
    with pytest.raises(DivergedError, match="finite numbers in phase 'local', step 1, in round 1"):
        run("fedavg(batch_size=8, lr=1e300)", clients(), network())


def test_a_loss_that_is_no_number_leaves_nobody_out() -> None:
    data, net = clients(), network()
    huge = 1.7e308 * data[2][0].sign(), data[2][1]
    settings: dict[str, Any] = {
        "model": net,
        "clients": data,
        "test": huge,
        "initial": net.state_dict(),
    }
    found, same = (
        simulate(method="fedavg(batch_size=8)", on_divergence=how, **settings)
        for how in ("drop", "continue")
    )
    assert not math.isfinite(found.history[0]["test_loss"])
    assert "missing" not in found.history[0]
    assert distance(found.params, same.params) < 1e-12


@pytest.mark.parametrize("bad", [[3], range(5)], ids=["a client", "a run"])
@pytest.mark.parametrize("engine", ["serial", "batched"])
def test_runs_beside_one_that_diverges_keep_their_bits(engine: str, bad: Sequence[int]) -> None:
    healthy, rows = play_on(engine, METHODS["feddkd"], seeds=(0, 1, 2), rounds=3)
    found, same = play_on(engine, METHODS["feddkd"], seeds=(0, 1, 2), rounds=3, bad=[[], bad, []])
    exact = engine == "serial" or len(bad) == 1  # one run fewer is another program
    for n in (0, 2):
        assert apart(found[n], healthy[n]) <= (0 if exact else 1e-12)
        assert same[n] == rows[n] or not exact
    assert (found[1].error is None) == (len(bad) == 1)
    assert len(same[1]) == (3 if len(bad) == 1 else 0)


@pytest.mark.parametrize(
    "make", [Serial, partial(Batched, strategy="vmap"), partial(Pool, workers=2)], ids=list(ENGINES)
)
def test_a_run_that_is_restored_holds_what_it_held_and_nothing_else(
    make: Callable[..., Engine],
) -> None:
    method, model = parse("fedbn(epochs=1, batch_size=8)"), functional(with_norm())
    state, memo = method.start(model, *model.initial(("init", 0)))
    engine = make(model, [world(0), world(1)], [memo, memo], torch.float64)
    runs = [Run(n, n, state, has_validation=False) for n in (0, 1)]

    by_client = Evaluation(Protocol.CLIENT_MEAN)

    def judged() -> list[Any]:
        return measure(engine, [(0, state), (1, state)], by_client, "test")

    before = judged()
    next(play(method, model, engine, runs, cohort=5, last=1, evaluation=by_client))
    after = judged()
    engine.restore(0, {})
    assert judged() == [before[0], after[1]] != [before[0], before[1]] != after
    engine.close()
