"""Secure aggregation over Flower's Grid gives what plain exchanges give, or nothing.

Nodes stop answering at each moment of an exchange.
"""

import json
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Message

from feddkd import Experiment, InputError
from feddkd.engines import select
from feddkd.flower import node, node_experiment
from feddkd.flower.apps import NodeApp, serve
from feddkd.flower.messages import ExchangeRequest
from feddkd.flower.node_data import NodeConfig
from feddkd.flower.transport import bytes_in, json_in, json_record, tensor_record
from feddkd.flower.wire import WireError, pack, unpack
from feddkd.runs.prepare import prepare
from feddkd.runs.record import find
from flower_double import DKD, FEDDKD, LOCAL, NORM, SETTING, Double, apart, final, rows
from test_flower import Cut, Deaf, serial

FOUR: dict[str, Any] = {"clients": 4, "rounds": 1}  # three of them are the threshold
QUANTUM = 1e-9  # 2^-33 = 1.2e-10 for each mean, and there are a few, one after another


@pytest.fixture(autouse=True, scope="module")
def _every_experiment_stays_open() -> Iterator[None]:
    """Keep all opened experiments: four nodes share this process, and a process keeps one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_experiment, "_open", lru_cache(node_experiment._open.__wrapped__))
        yield


def secure(
    folder: Path,
    method: str,
    grid: Double | None = None,
    told: dict[str, Any] | None = None,
    **changes: Any,
) -> Double:
    grid = grid or Double(NodeApp(), 4)
    experiment = {**SETTING, **FOUR, "method": method, **changes}
    config: dict[str, Any] = {f"experiment.{key}": value for key, value in experiment.items()}
    serve(
        grid,
        {
            **config,
            "out": str(folder),
            "poll": 0.0,
            "deadline": 0.05,
            "join": 0.3,
            "secure": True,
            **(told or {}),
        },
    )
    return grid


@pytest.mark.parametrize("then", ["", f" | {DKD}"], ids=["alone", "with dkd"])
@pytest.mark.parametrize("method", [f"fedavg({LOCAL})", f"fedbn({LOCAL})", f"scaffold({LOCAL})"])
def test_secure_sums_give_what_serial_gives(method: str, then: str, tmp_path: Path) -> None:
    changes = NORM if "fedbn" in method else {"rounds": 2}
    serial(tmp_path / "serial", method + then, **{**FOUR, **changes})
    secure(tmp_path / "secure", method + then, **changes)
    assert apart(final(tmp_path / "serial"), final(tmp_path / "secure")) < QUANTUM
    for expected, found in zip(rows(tmp_path / "serial"), rows(tmp_path / "secure"), strict=True):
        assert found == {key: pytest.approx(value, abs=1e-7) for key, value in expected.items()}


def test_in_float32_it_is_the_same_up_to_rounding(tmp_path: Path) -> None:
    serial(tmp_path / "serial", FEDDKD, **FOUR, dtype="float32")
    secure(tmp_path / "secure", FEDDKD, dtype="float32")
    assert apart(final(tmp_path / "serial"), final(tmp_path / "secure")) < 1e-6


def test_the_server_is_sent_nothing_but_masked_words(tmp_path: Path) -> None:
    seen: list[torch.Tensor] = []

    def look(part: int, asked: Message, reply: Message) -> Message:
        if asked.metadata.message_type.startswith("train."):
            groups = unpack(bytes_in(reply.content))
            assert {group: list(own) for group, own in groups.items()} == {"masked": ["words"]}
            seen.append(groups["masked"]["words"])
        return reply

    for folder in ("one", "other"):
        secure(tmp_path / folder, FEDDKD, Double(NodeApp(), 4, look))
    assert len(seen) == 2 * 4 * 3
    words = torch.cat(seen)
    # the same uploads, twice; of the same numbers there would be many
    assert len(set(words.tolist())) == len(words)
    # and yet the sums are whole numbers
    assert apart(final(tmp_path / "one"), final(tmp_path / "other")) == 0


# --- clients that fall silent


Spoil = Callable[[Message], Message | None]


def spoiling(kind: str, part: int, time: int = 1, spoil: Spoil = lambda reply: None) -> Double:
    """Damage the answer of one node to the n-th message of a kind."""
    heard: list[str] = []

    def tamper(own: int, asked: Message, reply: Message) -> Message | None:
        heard.extend([kind] * (own == part and asked.metadata.message_type == kind))
        return (
            spoil(reply)
            if own == part and asked.metadata.message_type == kind and len(heard) == time
            else reply
        )

    return Double(NodeApp(), 4, tamper)


STAGES = {
    "before keys": ("query.keys", 1, {(1, 0, 1, 1)}),
    "after keys": ("query.shares", 1, {(1, 0, 1, 1)}),
    "after shares": ("train.local", 1, {(1, 0, 1, 1)}),
    "after its masked upload": ("query.unmask", 1, set()),
    "in the first step of DKD": ("train.distil", 1, {(1, 1, 1, 1)}),
    "in the second step of DKD": ("train.distil", 2, {(1, 1, 2, 1)}),
}


@pytest.mark.parametrize("stage", STAGES)
def test_whoever_falls_silent_when_the_sum_is_that_of_the_rest(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, time, deaf = STAGES[stage]
    monkeypatch.setattr(Deaf, "deaf", frozenset(deaf))
    monkeypatch.setattr(select, "ENGINES", {**select.ENGINES, "deaf": Deaf})
    serial(tmp_path / "serial", FEDDKD, "deaf", **FOUR)
    secure(tmp_path / "secure", FEDDKD, spoiling(kind, 1, time))
    assert apart(final(tmp_path / "serial"), final(tmp_path / "secure")) < QUANTUM
    assert rows(tmp_path / "secure")[0].get("missing") == rows(tmp_path / "serial")[0].get(
        "missing"
    )


def page(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    def spoil(reply: Message) -> Message:
        told = json.loads(str(reply.content.config_records["page"]["json"]))
        change(told)
        reply.content["page"] = json_record(told)
        return reply

    return spoil


MALFORMED: dict[str, tuple[str, Spoil]] = {
    "no keys": ("query.keys", page(lambda told: told.pop("keys"))),
    "keys of other exchanges": (
        "query.keys",
        page(lambda told: told["keys"].update({"7-1": told["channel"]})),
    ),
    "no point of the curve": ("query.keys", page(lambda told: told.update(channel="02" * 33))),
    "no hexadecimal": ("query.keys", page(lambda told: told.update(channel=["x"]))),
    "checks that are too long": (
        "query.keys",
        page(lambda told: told["checks"].update({"0-1": "00" * 33})),
    ),
    "a receiver in other words": (
        "query.shares",
        page(lambda told: told["sealed"].update({"00": told["sealed"].pop("0"), "2": 2})),
    ),
    "shares for too few": ("query.shares", page(lambda told: told["sealed"].popitem())),
    "shares that are no texts": ("query.shares", page(lambda told: told.update(sealed=7))),
    "shares without end": (
        "query.shares",
        page(lambda told: told["sealed"].update({"0": "A" * ((1 << 20) + 1)})),
    ),
    "too few words": ("train.local", lambda reply: shortened(reply)),
}


def shortened(reply: Message) -> Message:
    words = unpack(bytes_in(reply.content))["masked"]["words"]
    reply.content["tensors"] = tensor_record(pack({"masked": {"words": words[:-1]}}))
    return reply


@pytest.mark.parametrize("what", MALFORMED)
def test_what_cannot_be_used_has_not_been_answered(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind, spoil = MALFORMED[what]
    secure(tmp_path, f"fedavg({LOCAL})", spoiling(kind, 1, spoil=spoil))
    assert rows(tmp_path)[0]["missing"] == [["local", 1, 1, "drop"]]
    assert "client 1 has not answered" in caplog.text


UNUSABLE: dict[str, Spoil] = {
    "too few": page(lambda told: told["shares"].pop("2")),
    "too short": page(lambda told: told["shares"].update({"2": "00"})),
    "another's": page(lambda told: told["shares"].update({"2": "09" + told["shares"]["2"][2:]})),
    "nothing": page(lambda told: told.clear()),
}


@pytest.mark.parametrize("what", UNUSABLE)
def test_shares_that_cannot_be_used_are_not_needed_as_long_as_there_are_enough(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secure(tmp_path, f"fedavg({LOCAL})", spoiling("query.unmask", 0, spoil=UNUSABLE[what]))
    assert "missing" not in rows(tmp_path)[0]
    assert "client 0 has not answered query.unmask" in caplog.text


# --- too few


def check_nothing_was_learnt(folder: Path, answered: int) -> None:
    (row,) = rows(folder)
    assert row["ended"] == {"phase": "local", "step": 1, "answered": answered, "min_clients": 3}
    start = prepare(Experiment(**{**SETTING, **FOUR, "method": FEDDKD}), None).model.initial(
        ("init", SETTING["seed"])
    )[0]
    assert apart(final(folder), {name: tensor.double() for name, tensor in start.items()}) == 0


@pytest.mark.parametrize(
    ("kind", "left"),
    [("query.keys", 0), ("query.shares", 2), ("train.local", 2), ("query.unmask", 2)],
)
def test_below_the_threshold_the_round_ends_and_nothing_is_learnt(
    kind: str, left: int, tmp_path: Path
) -> None:
    grid = Double(
        NodeApp(),
        4,
        lambda part, asked, reply: (
            None if part > 1 and asked.metadata.message_type == kind else reply
        ),
    )
    secure(tmp_path, FEDDKD, grid)
    check_nothing_was_learnt(tmp_path, left)
    assert "train.distil" not in [kind for _, kind in grid.traffic]


def test_nobody_answering_ends_the_run(tmp_path: Path) -> None:
    secure(
        tmp_path,
        FEDDKD,
        Double(
            NodeApp(),
            4,
            lambda part, asked, reply: None if "keys" in asked.metadata.message_type else reply,
        ),
    )
    (record,) = find(tmp_path, begun=True)
    assert "answered phase 'local', step 1, in round 1" in record.manifest["ended"]


def wrong(at: int) -> Spoil:
    """Damage a byte of the share of client 2's secret."""

    def change(told: dict[str, Any]) -> None:
        share = bytearray.fromhex(told["shares"]["2"])
        share[at] ^= 2
        told["shares"]["2"] = share.hex()

    return page(change)


# in its last byte, where the sharing itself notices, and in its first, where only what was
# announced tells
@pytest.mark.parametrize(
    ("at", "why"), [(36, "do not fit together"), (4, "client 2's secret do not give it")]
)
@pytest.mark.parametrize("silent", [False, True])
def test_a_wrong_share_spoils_no_sum(
    at: int, why: str, silent: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The sum is opened by the shares of the others if they are enough; else the round ends."""

    def tamper(part: int, asked: Message, reply: Message) -> Message | None:
        kind = asked.metadata.message_type
        if part == 3 and silent and kind == "train.local":
            return None
        return wrong(at)(reply) if (part, kind) == (0, "query.unmask") else reply

    secure(tmp_path / "secure", f"fedavg({LOCAL})", Double(NodeApp(), 4, tamper))
    assert why in caplog.text
    if silent:
        check_nothing_was_learnt(tmp_path / "secure", 2)
    else:
        serial(tmp_path / "serial", f"fedavg({LOCAL})", **FOUR)
        assert apart(final(tmp_path / "serial"), final(tmp_path / "secure")) < QUANTUM
        assert "shares of client 0 are wrong" in caplog.text


def test_who_deals_shares_that_nobody_can_open_ends_one_round(tmp_path: Path) -> None:
    garbage = page(lambda told: told.update(sealed=dict.fromkeys(told["sealed"], "AAAA")))
    grid = Double(
        NodeApp(),
        4,
        lambda part, asked, reply: (
            garbage(reply) if (part, asked.metadata.message_type) == (1, "query.shares") else reply
        ),
    )
    secure(tmp_path, f"fedavg({LOCAL})", grid, rounds=3)
    first, *later = rows(tmp_path)
    assert "ended" in first
    assert [row["missing"] for row in later] == [[["local", 1, 1, "drop"]]] * 2


def test_a_round_that_goes_bad_is_not_looked_through_upload_by_upload(tmp_path: Path) -> None:
    grid = secure(tmp_path, f"fedavg({LOCAL}) | dkd(steps=1, batch_size=16, lr=1e200)")
    check_nothing_was_learnt(tmp_path, 1)
    assert [kind for part, kind in grid.traffic if part == 0].count("train.local") == 1


# --- rounds that are played again


def test_a_restarted_node_has_no_secrets_and_is_back_in_the_next_round(tmp_path: Path) -> None:
    def restart(reply: Message) -> Message:
        grid.after = lambda: grid.restart(0)
        return reply

    grid = spoiling("query.shares", 0, spoil=restart)
    secure(tmp_path, f"fedavg({LOCAL})", grid, rounds=2)
    first, second = rows(tmp_path)
    assert first["missing"] == [["local", 1, 0, "drop"]]
    assert "missing" not in second


@pytest.mark.parametrize(
    "gone", [False, True], ids=["with the same clients", "with one client less"]
)
def test_a_server_that_resumes_is_told_again_what_it_was_told_and_nothing_else(
    gone: bool, tmp_path: Path
) -> None:
    """It was cut short in the second round, when the average was open; with other survivors it
    would learn a difference.
    """
    method, asked_twice = f"fedavg({LOCAL}) | dkd(steps=1, batch_size=16, lr=0.3)", list[int]()

    def cut(part: int, asked: Message, reply: Message) -> Message:
        asked_twice.extend([part] * (asked.metadata.message_type == "train.distil"))
        if len(asked_twice) > 4:
            raise Cut
        return reply

    grid = Double(NodeApp(), 4, cut)
    with pytest.raises(Cut):
        secure(tmp_path / "secure", method, grid, rounds=2)
    grid.tamper = lambda part, asked, reply: reply
    serial(tmp_path / "serial", method, **{**FOUR, "rounds": 2})
    if gone:
        grid.tamper = lambda part, asked, reply: (
            None if part == 3 and "train" in asked.metadata.message_type else reply
        )
    secure(tmp_path / "secure", method, grid, rounds=2)
    if gone:
        assert rows(tmp_path / "secure")[1]["ended"] == {
            "phase": "local",
            "step": 1,
            "answered": 0,
            "min_clients": 3,
        }
    else:
        assert apart(final(tmp_path / "serial"), final(tmp_path / "secure")) < QUANTUM


CHANGED: dict[str, dict[str, Any]] = {
    "rounds": {"rounds": 2},
    "metrics": {"metrics": ["macro_f1"]},
    "name": {"name": "another"},
    "a later phase": {"method": f"fedavg({LOCAL}) | dkd(steps=1, batch_size=16, lr=0.3)"},
    "a digit of the rate": {"method": f"fedavg({LOCAL[:-3]}0.1000001)"},
}


@pytest.mark.parametrize(
    ("key", "restarted"), [*((key, False) for key in CHANGED), ("metrics", True)]
)
def test_an_experiment_that_is_run_again_with_one_client_less_gives_no_upload_away(
    key: str, restarted: bool, tmp_path: Path
) -> None:
    """The attack: A, the first sum, is over all clients, and B, the second, lacks client 3. Then
    (A sum n - B (sum n - n_3)) / n_3 is the upload of client 3.
    """
    method, app = f"fedavg({LOCAL})", NodeApp(state=tmp_path)
    grid = Double(app, 4)
    secure(tmp_path / "first", method, grid)
    if restarted:
        for part in range(4):
            grid.restart(part)
    grid.tamper = lambda part, asked, reply: (
        None if part == 3 and "train" in asked.metadata.message_type else reply
    )
    secure(tmp_path / "second", **{"method": method, "grid": grid, **CHANGED[key]})
    start = prepare(Experiment(**{**SETTING, **FOUR, "method": method}), None)
    sizes = start.federation.sizes
    a, b = final(tmp_path / "first"), final(tmp_path / "second")
    found = {n: (a[n] * sum(sizes) - b[n] * (sum(sizes) - sizes[3])) / sizes[3] for n in a}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Deaf, "deaf", frozenset({(1, 0, 1, client) for client in range(3)}))
        patch.setattr(select, "ENGINES", {**select.ENGINES, "deaf": Deaf})
        serial(tmp_path / "alone", method, "deaf", **FOUR)
    assert apart(found, final(tmp_path / "alone")) > 0.01


# --- what cannot be


@pytest.mark.parametrize(
    ("method", "changes", "why"),
    [
        ("fedgen()", {}, "phase 'local' of fedgen.* needs every single client's"),
        ("feddistill()", {}, "needs every single client's"),
        ("feddf()", {"public": 0.1}, "needs every single client's"),
        ("fedma()", {"model": "mlp(hidden='8')"}, "needs every single client's"),
        ("astraea()", {}, "needs every single client's"),
        ("fedavg(gather='median')", {}, "needs every single client's"),
        (
            "fedavg() | dkd(gather='trimmed')",
            {},
            "phase 'distil' of .* needs every single client's",
        ),
        ("fedavg()", {"diagnostics": True}, "diagnostics needs"),
        ("fedavg()", {"availability": "random()"}, "availability simulates"),
        ("fedavg()", {"cohort": 2}, "a cohort has 2"),
        ("fedavg()", {"cohort": 0.5}, "a cohort has 2"),
    ],
)
def test_what_is_not_summed_is_refused_before_anything_is_written(
    method: str, changes: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=why):
        secure(tmp_path / "runs", method, **changes)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.1])
def test_a_threshold_is_more_than_a_half(threshold: float, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="more than a half"):
        secure(tmp_path, "fedavg()", told={"threshold": threshold})


def test_a_node_that_insists_uploads_nothing_that_is_not_masked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    insisting = {part: {"secure": True} for part in range(4)}
    secure(
        tmp_path / "plain",
        f"fedavg({LOCAL})",
        Double(NodeApp(), 4, configs=insisting),
        told={"secure": False},
    )
    (record,) = find(tmp_path / "plain", begun=True)
    assert "answered" in record.manifest["ended"]
    assert "uploads nothing that is not masked" in caplog.text
    orders: list[tuple[dict[str, Any], bytes]] = []

    def look(part: int, asked: Message, reply: Message) -> Message:
        if part == 0 and asked.metadata.message_type == "train.local":
            orders.append((json_in(asked), bytes_in(asked.content)))
        return reply

    secure(tmp_path / "secure", f"fedavg({LOCAL})", Double(NodeApp(), 4, look, configs=insisting))
    assert "missing" not in rows(tmp_path / "secure")[0]
    ((order, sent),) = orders
    plain = {key: value for key, value in order.items() if key != "secure"}
    for lie in (
        plain,
        {**plain, "retain": None},
        {**order, "retain": None},
        {**order, "secure": {}},
        {**order, "key": ["diagnose"]},
    ):
        with pytest.raises((WireError, KeyError, ValueError)):
            respond(lie, sent)


def respond(content: dict[str, Any], sent: bytes) -> None:
    """Give a request to a node that insists on masks."""
    request = ExchangeRequest.read(content)
    node.respond(NodeConfig(0, 4, secure=True), request, sent, {})
