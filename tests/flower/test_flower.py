"""Flower's nodes give what `serial` gives, and whatever goes wrong with one of them, the round goes
on with the rest.
"""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError, pull_objects

from feddkd import ClientError, Experiment, InputError
from feddkd.engines import select
from feddkd.engines.interface import Order, Reply
from feddkd.engines.serial import Serial
from feddkd.flower.apps import NodeApp, serve
from feddkd.flower.flwr_internals import retry_content_sooner
from feddkd.flower.transport import bytes_in, json_record, tensor_record
from feddkd.flower.wire import pack, unpack
from feddkd.method import Exchange
from feddkd.methods import aggregation
from feddkd.runs.prepare import prepare
from feddkd.runs.record import find
from feddkd.runs.runner import execute
from flower_double import (
    DKD,
    FEDDKD,
    LOCAL,
    METHODS,
    NORM,
    SETTING,
    Double,
    apart,
    check_same,
    final,
    rows,
)


def flower(folder: Path, method: str, grid: Double | None = None, **changes: Any) -> Double:
    grid = grid or Double(NodeApp(), SETTING["clients"])
    config: dict[str, Any] = {
        f"experiment.{key}": value
        for key, value in {**SETTING, "method": method, **changes}.items()
    }
    serve(grid, {**config, "out": str(folder), "poll": 0.0, "deadline": 0.05, "join": 0.3})
    return grid


def serial(folder: Path, method: str, engine: str = "serial", **changes: Any) -> None:
    execute([Experiment(**{**SETTING, "method": method, **changes})], out=folder, engine=engine)


@pytest.mark.parametrize("then", ["", f" | {DKD}"], ids=["alone", "with dkd"])
@pytest.mark.parametrize("method", METHODS)
def test_flower_gives_what_serial_gives(method: str, then: str, tmp_path: Path) -> None:
    changes = {"cohort": 2, **(NORM if "fedbn" in method else {})}
    serial(tmp_path / "serial", method + then, **changes)
    flower(tmp_path / "flower", method + then, **changes)
    check_same(tmp_path / "serial", tmp_path / "flower")


def test_unshuffled_examples_are_read_as_on_serial(tmp_path: Path) -> None:
    method = f"fedavg(steps=3, batch_size=8) | {DKD}"
    serial(tmp_path / "serial", method, shuffle=False)
    flower(tmp_path / "flower", method, shuffle=False)
    check_same(tmp_path / "serial", tmp_path / "flower")


def test_noise_has_its_deviation_and_no_seed_gives_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack: a node that knows the seed redraws the noise and removes it from the model."""
    method, exact = "fedavg(steps=1, batch_size=8, clip=1.0, noise={z})", tmp_path / "exact"
    places: dict[str, Any] = {"model": "mlp(hidden='256')", "rounds": 1}
    serial(tmp_path / "redrawn", method.format(z=0.5), **places)
    flower(tmp_path / "noisy", method.format(z=0.5), **places)
    monkeypatch.setattr(aggregation, "secret_normal", np.zeros)
    flower(exact, method.format(z=0.5), **places)
    noises = []
    for folder in ("noisy", "redrawn"):
        noise = [final(tmp_path / folder)[name] - clean for name, clean in final(exact).items()]
        noises.append(torch.cat([part.flatten() for part in noise]))
        assert float(noises[-1].std()) == pytest.approx(0.5 / 3, rel=0.03)
    assert abs(float(torch.corrcoef(torch.stack(noises))[0, 1])) < 0.05


@pytest.mark.parametrize(
    "method",
    [
        "fedavg(epochs=1) | dkd(steps=3, batch_size=8)",
        "scaffold(epochs=1) | dkd(steps=2, batch_size=8)",
    ],
)
def test_clients_drop_out_and_come_late_as_they_do_on_serial(method: str, tmp_path: Path) -> None:
    faults: dict[str, Any] = {"availability": "random(drop=0.1, late=0.1, seed=0)", "rounds": 3}
    flower(tmp_path / "flower", method, **faults)
    serial(tmp_path / "serial", method, **faults)
    check_same(tmp_path / "flower", tmp_path / "serial")
    missing = [event for row in rows(tmp_path / "flower") for *_, event in row.get("missing", [])]
    assert {"drop", "late"} <= set(missing)


def test_a_node_may_stand_for_several_clients(tmp_path: Path) -> None:
    method = f"scaffold({LOCAL}) | {DKD}"
    serial(tmp_path / "serial", method)
    grid = flower(tmp_path / "flower", method, Double(NodeApp(), 2))
    check_same(tmp_path / "serial", tmp_path / "flower")
    assert [part for part, kind in grid.traffic if kind == "train.local"] == [0, 1, 0] * 2


def test_diagnostics_and_what_is_set_aside_go_over_the_wire_too(tmp_path: Path) -> None:
    method = f"fedavg({LOCAL}) | dkd(steps='auto', batch_size=16, lr=0.3)"
    serial(tmp_path / "serial", method, diagnostics=True, rounds=1)
    flower(tmp_path / "flower", method, diagnostics=True, rounds=1)
    assert apart(final(tmp_path / "serial"), final(tmp_path / "flower")) < 1e-12
    expected, found = (rows(tmp_path / name)[0]["diagnostics"] for name in ("serial", "flower"))
    assert found["L2"] == pytest.approx(expected["L2"], abs=1e-10)


def test_clients_are_judged_by_the_metrics_of_the_experiment(tmp_path: Path) -> None:
    asked: dict[str, Any] = {
        "metrics": ["macro_f1", "auc"],
        "evaluation": "client_mean",
        "rounds": 1,
    }
    serial(tmp_path / "serial", FEDDKD, **asked)
    flower(tmp_path / "flower", FEDDKD, **asked)
    (expected,), (found,) = (rows(tmp_path / name) for name in ("serial", "flower"))
    assert list(found) == list(expected)
    for key in ("test_macro_f1", "test_auc", "test_client_auc", "average_test_macro_f1"):
        assert found[key] == pytest.approx(expected[key], abs=1e-10), key


def test_the_bytes_on_the_wire_are_those_of_the_costs(tmp_path: Path) -> None:
    grid = flower(tmp_path, FEDDKD, model="mlp(hidden='256')", evaluation="global")
    last = rows(tmp_path)[-1]
    assert grid.up == pytest.approx(last["bytes_up"], rel=0.05)
    assert grid.down == pytest.approx(last["bytes_down"], rel=0.05)


def test_examples_of_a_nodes_own_count_as_those_of_the_partition(tmp_path: Path) -> None:
    held = prepare(Experiment(**{**SETTING, "method": FEDDKD}), None).federation

    def load(context: Context) -> tuple[Tensor, Tensor]:
        own = held.train[int(context.node_config["partition-id"])]
        return held.x[own], held.y[own]

    serial(tmp_path / "serial", FEDDKD)
    flower(tmp_path / "flower", FEDDKD, Double(NodeApp(load), 3))
    check_same(tmp_path / "serial", tmp_path / "flower")


# --- faults

Spoil = Callable[[Message, Message], Message | None]  # (request, reply) -> the reply that arrives


def with_content(reply: Message, content: bytes) -> Message:
    reply.content["tensors"] = tensor_record(content)
    return reply


def changed(change: Callable[[Tensor], Tensor]) -> Spoil:
    def spoil(asked: Message, reply: Message) -> Message:
        groups = {g: dict(own) for g, own in unpack(bytes_in(reply.content)).items()}
        group = next(group for group in ("params", "gradient") if group in groups)
        name = next(iter(groups[group]))
        groups[group][name] = change(groups[group][name])
        return with_content(reply, pack(groups))

    return spoil


def with_page(reply: Message, page: ConfigRecord) -> Message:
    reply.content["page"] = page
    return reply


FAULTS: dict[str, Spoil] = {
    "no reply": lambda asked, reply: None,
    "an error": lambda asked, reply: Message(Error(code=2, reason="out of memory"), reply_to=asked),
    "nonsense": lambda asked, reply: with_content(reply, b"nonsense"),
    "nothing": lambda asked, reply: with_content(reply, b""),
    "too much": lambda asked, reply: with_content(reply, b"\0" * 200_001),
    "not a number": changed(lambda tensor: torch.full_like(tensor, torch.nan)),
    "infinite": changed(lambda tensor: torch.full_like(tensor, torch.inf)),
    "another shape": changed(lambda tensor: tensor[:1]),
    "another type": changed(lambda tensor: tensor.float()),
    "no tag": lambda asked, reply: with_page(reply, json_record({"client": 1})),
    "no page": lambda asked, reply: with_page(reply, ConfigRecord({})),
    "no records": lambda asked, reply: Message(RecordDict(), reply_to=asked),
}


class Deaf(Serial):
    """A serial engine to which some clients do not answer."""

    deaf: frozenset[tuple[int, int, int, int]] = frozenset()  # (round, phase, step, client)

    def exchange(self, exchange: Exchange, orders: Sequence[Order]) -> list[Reply]:
        return super().exchange(exchange, [self._thinned(order) for order in orders])

    def _thinned(self, order: Order) -> Order:
        left = tuple(client for client in order.cohort if (*order.key[1:], client) not in self.deaf)
        return order._replace(cohort=left)


def spoiling(spoil: Spoil, part: int, exchange: Sequence[int]) -> Double:
    """Replies of one node in one exchange (round, phase, step) arrive spoilt."""

    def tamper(own: int, asked: Message, reply: Message) -> Message | None:
        page = json.loads(str(asked.content.config_records["page"]["json"]))
        return (
            spoil(asked, reply)
            if own == part and page.get("key", [])[1:] == list(exchange)
            else reply
        )

    return Double(NodeApp(), 3, tamper)


@pytest.mark.parametrize(
    "exchange", [(1, 0, 1), (1, 1, 2)], ids=["in training", "in the second step of DKD"]
)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_client_whose_answer_cannot_be_used_has_not_answered(
    fault: str,
    exchange: tuple[int, int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("feddkd.flower.engine.Flower.most", 200_000)
    method = f"scaffold({LOCAL}) | {DKD}"
    monkeypatch.setattr(Deaf, "deaf", frozenset({(*exchange, 1)}))
    monkeypatch.setattr(select, "ENGINES", {**select.ENGINES, "deaf": Deaf})
    serial(tmp_path / "serial", method, "deaf")
    flower(tmp_path / "flower", method, spoiling(FAULTS[fault], 1, exchange))
    assert apart(final(tmp_path / "serial"), final(tmp_path / "flower")) < 1e-12
    assert len(rows(tmp_path / "flower")) == 2
    assert "client" in caplog.text
    assert (
        "from clients [1]" if fault == "no reply" else f"(3, {', '.join(map(str, exchange))}, 1)"
    ) in caplog.text


def test_a_node_that_is_gone_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = spoiling(lambda asked, reply: grid.gone.add(2), 2, (1, 0, 1))
    flower(tmp_path, FEDDKD, grid)
    # asked who it is, and once to train
    assert [part for part, kind in grid.traffic if part == 2] == [2, 2]
    assert "its node is offline" in caplog.text


def test_a_restarted_node_is_not_trusted_in_its_round_and_back_in_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def restart(asked: Message, reply: Message) -> Message:
        grid.after = lambda: grid.restart(0)
        return reply

    grid = spoiling(restart, 0, (1, 0, 1))
    flower(tmp_path, FEDDKD, grid)
    assert "has lost what it kept" in caplog.text
    mine = [kind for part, kind in grid.traffic if part == 0]
    assert mine == [
        "query.info",
        "train.local",
        "train.distil",
        "train.local",
        "train.distil",
        "train.distil",
    ]


def test_a_node_that_fell_out_and_was_restarted_meanwhile_is_back_in_the_next_round(
    tmp_path: Path,
) -> None:
    def die(asked: Message, reply: Message) -> None:
        grid.after = lambda: grid.restart(0)

    grid = spoiling(die, 0, (1, 1, 1))
    flower(tmp_path, FEDDKD, grid)
    mine = [kind for part, kind in grid.traffic if part == 0]
    assert mine == [
        "query.info",
        "train.local",
        "train.distil",
        "train.local",
        "train.distil",
        "train.distil",
    ]
    assert "missing" not in rows(tmp_path)[1]


def test_a_client_that_lost_what_it_keeps_for_ever_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """FedBN's own layers are lost with the node and start again with the first weights."""

    def restart(asked: Message, reply: Message) -> Message:
        grid.after = lambda: grid.restart(0)
        return reply

    grid = spoiling(restart, 0, (1, 0, 1))
    flower(tmp_path, f"fedbn({LOCAL})", grid, **NORM, rounds=3)
    mine = [kind for part, kind in grid.traffic if part == 0]
    assert mine.count("train.local") == 3
    assert "has lost what it kept" in caplog.text
    assert len(rows(tmp_path)[2]["test_client_accuracy"]) == 3


def test_nobody_answering_ends_the_run_with_the_phase_and_the_round(tmp_path: Path) -> None:
    grid = Double(
        NodeApp(),
        3,
        lambda part, asked, reply: None if "distil" in asked.metadata.message_type else reply,
    )
    flower(tmp_path / "distil", FEDDKD, grid)
    (record,) = find(tmp_path / "distil", begun=True)
    assert "answered phase 'distil', step 1, in round 1" in record.manifest["ended"]
    grid = Double(
        NodeApp(),
        3,
        lambda part, asked, reply: None if asked.metadata.message_type == "evaluate" else reply,
    )
    with pytest.raises(ClientError, match="answered the evaluation on test"):
        flower(tmp_path / "evaluation", f"fedbn({LOCAL})", grid, **NORM)


def test_content_that_comes_after_its_message_is_asked_for_again_at_once() -> None:
    retry_content_sooner()
    asked: list[float] = []

    def pull(name: str) -> bytes:
        asked.append(time.monotonic())
        if len(asked) < 3:
            raise ObjectUnavailableError(name)
        return b"content"

    assert pull_objects(["name"], pull) == {"name": b"content"}
    # 0.05 s and 0.1 s, give or take; Flower's own would be 1 s and 2 s
    assert 0.1 < asked[-1] - asked[0] < 2.0


def test_an_answer_that_comes_twice_counts_once(tmp_path: Path) -> None:
    class Echo(Double):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            found = list(super().pull_messages(message_ids))
            return found + found

    serial(tmp_path / "serial", FEDDKD)
    flower(tmp_path / "flower", FEDDKD, Echo(NodeApp(), 3))
    check_same(tmp_path / "serial", tmp_path / "flower")


# --- who is there


def test_who_has_not_joined_is_named_and_why(tmp_path: Path) -> None:
    def load(context: Context) -> tuple[Tensor, Tensor]:
        labels = torch.tensor([0, 11 if context.node_config["partition-id"] == 1 else 1])
        return torch.zeros(2, 1, 8, 8, dtype=torch.uint8), labels

    with pytest.raises(
        InputError,
        match=r"clients \[1\] have not joined .*label .* is 11; the federation has 10 classes",
    ):
        flower(tmp_path, FEDDKD, Double(NodeApp(load), 3))
    grid = Double(NodeApp(), 3)
    grid.gone.add(2)
    with pytest.raises(InputError, match=r"clients \[2\] have not joined within 0.3 s"):
        flower(tmp_path, FEDDKD, grid)


def test_a_node_with_fewer_classes_than_the_federation_takes_part(tmp_path: Path) -> None:
    """A hospital may hold some of the classes alone.

    Labels beyond those promised are another matter: see above.
    """

    def load(context: Context) -> tuple[Tensor, Tensor]:
        return torch.ones(4, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 0, 1])

    flower(tmp_path, FEDDKD, Double(NodeApp(load), 3))
    assert ["missing" in row for row in rows(tmp_path)] == [False, False]


def test_two_nodes_cannot_be_one_client(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"clients \[2\] have not joined .* client 0"):
        flower(tmp_path, FEDDKD, Double(NodeApp(), 3, configs={2: {"partition-id": 0}}))


# --- a server that was cut short


class Cut(Exception):  # noqa: N818  # nothing went wrong
    pass


def cut_short(
    folder: Path, method: str, grid: Double, exchange: str = "2, 0, 1", **changes: Any
) -> None:
    """Stop in an exchange: round, phase, step. Unless said, in the second round's training."""

    def tamper(part: int, asked: Message, reply: Message) -> Message:
        if f'"key": [3, {exchange}]' in str(asked.content.config_records["page"]["json"]):
            raise Cut
        return reply

    grid.tamper = tamper
    with pytest.raises(Cut):
        flower(folder, method, grid, **changes)
    grid.tamper = lambda part, asked, reply: reply


@pytest.mark.parametrize(
    "exchange", ["2, 0, 1", "2, 1, 2"], ids=["in training", "in the second step of DKD"]
)
@pytest.mark.parametrize(
    "method", [FEDDKD, f"scaffold({LOCAL}) | {DKD}"], ids=["fedavg | dkd", "scaffold | dkd"]
)
def test_a_server_goes_on_from_its_checkpoint_with_the_same_numbers(
    method: str, exchange: str, tmp_path: Path
) -> None:
    serial(tmp_path / "serial", method)
    grid = Double(NodeApp(), 3)
    cut_short(tmp_path / "flower", method, grid, exchange)
    flower(tmp_path / "flower", method, grid)
    check_same(tmp_path / "serial", tmp_path / "flower")


def test_nodes_that_have_forgotten_begin_anew_and_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cut_short(tmp_path, f"fedbn({LOCAL})", Double(NodeApp(), 3), **NORM)
    flower(tmp_path, f"fedbn({LOCAL})", **NORM)
    assert all(f"client {client} has lost what it kept" in caplog.text for client in range(3))
    assert len(rows(tmp_path)) == 2


# --- a round that went bad


@pytest.mark.parametrize("method", [METHODS[0], METHODS[2]], ids=["fedavg", "scaffold"])
def test_a_round_that_is_undone_and_played_again_counts_once(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second round of three is taken for bad though it is not: played again, client by client,
    it is what it was.
    """
    changes: dict[str, Any] = {"rounds": 3, "cohort": 2}
    serial(tmp_path / "serial", f"{method} | {DKD}", **changes)
    verdicts = iter([True, False, True])
    monkeypatch.setattr("feddkd.rounds.loop._good", lambda turns: [next(verdicts)])
    grid = flower(tmp_path / "flower", f"{method} | {DKD}", **changes)
    check_same(tmp_path / "serial", tmp_path / "flower")
    assert len([kind for _, kind in grid.traffic if kind == "train.local"]) == 2 * (3 + 1)


def test_who_fell_out_of_a_round_takes_part_when_the_next_is_played_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A node drops its state of the round before when the next begins.

    So the server cannot begin the round before again.
    """
    verdicts = iter([True, False])
    monkeypatch.setattr("feddkd.rounds.loop._good", lambda turns: [next(verdicts)])
    flower(tmp_path, FEDDKD, spoiling(FAULTS["no reply"], 1, (1, 1, 2)))
    assert [row.get("missing") for row in rows(tmp_path)] == [[["distil", 2, 1, "drop"]], None]
    assert "lost" not in caplog.text


def test_a_client_that_sends_bad_numbers_is_left_out_as_on_serial(tmp_path: Path) -> None:
    """There the round is undone and played again without it; here its upload is refused
    when it arrives.
    """
    method, absent = f"scaffold({LOCAL}) | {DKD}", tmp_path / "absent.csv"
    absent.write_text("round,client,phase,step,event\n1,1,distil,2,drop\n")
    serial(tmp_path / "serial", method, availability=f"trace(file='{absent}')")
    flower(tmp_path / "flower", method, spoiling(FAULTS["infinite"], 1, (1, 1, 2)))
    check_same(tmp_path / "serial", tmp_path / "flower")


def test_a_run_that_diverges_for_all_ends_and_says_where_and_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flower(tmp_path, "fedavg(epochs=1) | dkd(steps=2, batch_size=16, lr=1e308)")
    (record,) = find(tmp_path, begun=True)
    assert "answered phase 'distil', step 2, in round 1" in record.manifest["ended"]
    assert caplog.text.count("holds NaN or infinite numbers") == 3
