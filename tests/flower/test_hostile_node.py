"""A registered node that lies harms itself: the run goes on as if that node were silent."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Error, Message

from feddkd import InputError
from feddkd.engines import select
from feddkd.flower.apps import NodeApp, engine_on
from feddkd.flower.conduct import MOST_FAILURES, ROUNDS_ASIDE
from feddkd.flower.transport import json_record
from feddkd.flower.wire import LONGEST_TEXT, printable
from feddkd.methods import aggregation
from feddkd.runs.record import find
from feddkd.runs.runner import execute
from flower_double import DKD, FEDDKD, LOCAL, SETTING, Double, apart, check_same, final, rows
from test_flower import Deaf, changed, flower, serial, spoiling, with_content, with_page

DEEP = "[" * 200_000 + "]" * 200_000
HEADER = json.dumps({"__metadata__": {"groups": "GROUPS"}}).replace("GROUPS", DEEP).encode()


def with_json(text: Any) -> Callable[[Message, Message], Message]:
    return lambda asked, reply: with_page(reply, ConfigRecord({"json": text}))


LIES: dict[str, Callable[[Message, Message], Message | None]] = {
    "nested JSON": with_json(DEEP),
    "nested JSON in the header of the tensors": lambda asked, reply: with_content(
        reply, len(HEADER).to_bytes(8, "little") + HEADER
    ),
    "a header without end": lambda asked, reply: with_content(
        reply, (1 << 62).to_bytes(8, "little") + bytes(100)
    ),
    "a page of bytes": with_json(b"{}"),
    "a long number": with_json('{"client": ' + "9" * 5000 + ', "held": "x"}'),
    "a page of numbers": with_json(7.5),
    "finite and absurd": changed(lambda tensor: torch.full_like(tensor, 1e30)),
    "an error without end": lambda asked, reply: Message(
        Error(code=2, reason="\x1b[2J\nfeddkd: all is well " * 5000), reply_to=asked
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_the_round_goes_on_without_a_node_that_lies(
    lie: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Deaf, "deaf", frozenset({(1, 0, 1, 1)}))
    monkeypatch.setattr(select, "ENGINES", {**select.ENGINES, "deaf": Deaf})
    serial(tmp_path / "serial", FEDDKD, "deaf")
    flower(tmp_path / "flower", FEDDKD, spoiling(LIES[lie], 1, (1, 0, 1)))
    assert apart(final(tmp_path / "serial"), final(tmp_path / "flower")) < 1e-12
    blamed = [record for record in caplog.records if "has not answered" in record.getMessage()]
    assert [record.args[0] for record in blamed if isinstance(record.args, tuple)] == [1]
    assert all(len(record.getMessage()) < 2 * LONGEST_TEXT for record in caplog.records)
    assert all(record.getMessage().isprintable() for record in caplog.records)


def test_an_absurd_upload_that_comes_alone_does_not_vouch_for_itself(tmp_path: Path) -> None:
    absurd = changed(lambda tensor: torch.full_like(tensor, 1e30))

    def tamper(part: int, asked: Message, reply: Message) -> Message | None:
        if asked.metadata.message_type != "train.local":
            return reply
        return absurd(asked, reply) if part == 1 else None

    flower(tmp_path, FEDDKD, Double(NodeApp(), 3, tamper))
    (record,) = find(tmp_path, begun=True)
    assert "answered phase 'local', step 1, in round 1" in record.manifest["ended"]


def test_a_node_that_is_asked_alone_ends_its_round_and_not_the_run(tmp_path: Path) -> None:
    def tamper(part: int, asked: Message, reply: Message) -> Message | None:
        told = asked.metadata.message_type.startswith("train.") and part == 0
        return with_content(reply, b"nonsense") if told else reply

    flower(tmp_path, FEDDKD, Double(NodeApp(), 3, tamper), cohort=1, rounds=4)
    played = rows(tmp_path)
    assert len(played) == 4
    alone = [row for row in played if row.get("missing") == [["local", 1, 0, "drop"]]]
    assert alone
    assert [row for row in played if "ended" in row] == alone


def test_texts_of_others_are_cut_and_escaped() -> None:
    assert printable("two\nlines \x1b[31mred") == "two\\nlines \\x1b[31mred"
    assert len(printable("x" * 10_000)) == LONGEST_TEXT + 3


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_clipping_is_enforced_where_uploads_arrive(
    noise: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that does not clip moves the mean no further than one that does."""
    monkeypatch.setattr(aggregation, "secret_normal", np.zeros)
    method = f"fedavg({LOCAL}, clip=0.01, noise={noise})"
    push = changed(lambda tensor: tensor + 1.0)
    flower(tmp_path / "honest", method, rounds=1)
    flower(tmp_path / "lie", method, spoiling(push, 1, (1, 0, 1)), rounds=1)
    honest, lie = final(tmp_path / "honest"), final(tmp_path / "lie")
    moved = sum(float((lie[name] - honest[name]).square().sum()) for name in lie) ** 0.5
    assert 0 < moved < 2 * 0.01


# --- joining


def claiming(change: Callable[[dict[str, Any]], None]) -> Double:
    """Return nodes of which number 3 changes what it says about its clients."""

    def tamper(part: int, asked: Message, reply: Message) -> Message:
        if part == 3 and asked.metadata.message_type == "query.info":
            page = json.loads(str(reply.content.config_records["page"]["json"]))
            change(page["clients"])
            reply.content["page"] = json_record(page)
        return reply

    return Double(NodeApp(), 4, tamper)


def counting(count: object) -> Callable[[dict[str, Any]], None]:
    return lambda clients: clients["3"]["counts"].update(train=count)


CLAIMS: dict[str, Callable[[dict[str, Any]], None]] = {
    "no number": counting("many"),
    "infinitely many": counting(float("inf")),
    "a fraction": counting(7.5),
    "a number without end": counting(10**400),
    "too many": counting(10**12),
    "less than none": counting(-100),
    "none": counting(0),
    "true": counting(True),
    "no counts": lambda clients: clients["3"].update(counts={}),
    "another's client": lambda clients: clients.update({"0": clients.pop("3")}),
    "its own and another's": lambda clients: clients.update({"0": clients["3"]}),
    "a client beyond": lambda clients: clients.update({"9": clients.pop("3")}),
    "no client's number": lambda clients: clients.update({"x": clients.pop("3")}),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_who_joins_with_a_lie_is_refused_and_harms_nobody(
    claim: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = claiming(CLAIMS[claim])
    joining(tmp_path, grid, start_with=3)
    assert {part for part, kind in grid.traffic if kind == "train.local"} == {0, 1, 2}
    assert "cannot join" in caplog.text
    with pytest.raises(InputError, match=r"clients \[3\] have not joined"):
        joining(tmp_path / "all", claiming(CLAIMS[claim]))


def joining(folder: Path, grid: Double, **options: Any) -> None:
    from feddkd import Experiment

    experiment = Experiment(**{**SETTING, "method": FEDDKD, "clients": 4})
    engine = engine_on(grid, experiment, deadline=0.05, join=0.3, poll=0.0, **options)
    execute([experiment], out=folder, engine=engine)


def test_a_run_starts_when_enough_are_there_and_goes_on_with_those_that_come(
    tmp_path: Path,
) -> None:
    class Late(Double):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            if ("train.local" in {kind for _, kind in self.traffic}) and 3 in self.gone:
                self.gone.discard(3)
            return super().push_messages(messages)

    grid = Late(NodeApp(), 4)
    grid.gone.add(3)
    joining(tmp_path, grid, start_with=3)
    mine = [kind for part, kind in grid.traffic if part == 3]
    assert mine[0] == "query.info"
    assert "train.local" in mine
    assert rows(tmp_path)[0]["missing"][0][:3] == ["local", 1, 3]
    assert "missing" not in rows(tmp_path)[1]


def test_a_node_that_says_nothing_delays_no_other(tmp_path: Path) -> None:
    silent = Double(
        NodeApp(),
        4,
        lambda part, asked, reply: None if part == 3 else reply,
    )
    joining(tmp_path, silent, start_with=3)
    assert len(rows(tmp_path)) == 2


# --- again and again


def test_a_node_that_fails_again_and_again_is_put_aside_for_a_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rounds = MOST_FAILURES + ROUNDS_ASIDE + 1
    bad = {f'"key": [3, {t}, 0, 1]' for t in range(1, MOST_FAILURES + 1)}

    def tamper(part: int, asked: Message, reply: Message) -> Message:
        text = str(asked.content.config_records["page"]["json"])
        if part == 1 and any(key in text for key in bad):
            return with_content(reply, b"nonsense")
        return reply

    grid = Double(NodeApp(), 3, tamper)
    flower(tmp_path, f"fedavg({LOCAL})", grid, rounds=rounds)
    absent = [t for t, row in enumerate(rows(tmp_path), 1) if "missing" in row]
    assert absent == list(range(1, rounds))
    trained = [part for part, kind in grid.traffic if (part, kind) == (1, "train.local")]
    assert len(trained) == MOST_FAILURES + 1
    assert "is not asked before round 7" in caplog.text


def test_one_failure_costs_one_round(tmp_path: Path) -> None:
    grid = spoiling(lambda asked, reply: with_content(reply, b""), 1, (1, 0, 1))
    flower(tmp_path, f"fedavg({LOCAL}) | {DKD}", grid, rounds=3)
    assert ["missing" in row for row in rows(tmp_path)] == [True, False, False]


def test_honest_uploads_of_any_scale_are_within_bounds(tmp_path: Path) -> None:
    """The bound refuses what is absurd among the others, not what is large in itself."""
    method = f"fedavg({LOCAL}) | {DKD}"
    serial(tmp_path / "serial", method, transform="normalise(mean=0.0, std=0.001)")
    flower(tmp_path / "flower", method, transform="normalise(mean=0.0, std=0.001)")
    check_same(tmp_path / "serial", tmp_path / "flower")
