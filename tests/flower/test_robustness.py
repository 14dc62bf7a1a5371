"""Selections, attacks and compression on Flower nodes: what travels, and what is refused."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from flwr.app import Message

from feddkd import Experiment, InputError
from feddkd.flower.apps import NodeApp, serve
from feddkd.flower.summable import check_summable
from feddkd.flower.transport import bytes_in, tensor_record
from feddkd.flower.wire import pack, unpack
from feddkd.runs.runner import execute
from feddkd.tensors import bytes_of
from flower_double import FEDDKD, LOCAL, SETTING, Double, check_same, rows

# changes an upload in place
Meddle = Callable[[Any], object]


def flower(folder: Path, method: str, grid: Double | None = None, **changes: Any) -> Double:
    grid = grid or Double(NodeApp(), SETTING["clients"])
    config: dict[str, Any] = {
        f"experiment.{key}": value
        for key, value in {**SETTING, "method": method, **changes}.items()
    }
    serve(grid, {**config, "out": str(folder), "poll": 0.0, "deadline": 0.05, "join": 0.3})
    return grid


def serial(folder: Path, method: str, **changes: Any) -> None:
    execute([Experiment(**{**SETTING, "method": method, **changes})], out=folder, engine="serial")


def meddling(change: Meddle, parts: Sequence[int] = (0, 1, 2)) -> Double:
    """Return a grid on which the uploads of some nodes in training are changed in place."""

    def tamper(part: int, asked: Message, reply: Message) -> Message:
        if asked.metadata.message_type.startswith("train") and part in parts:
            upload: Any = unpack(bytes_in(reply.content))
            change(upload)
            reply.content["tensors"] = tensor_record(pack(upload))
        return reply

    return Double(NodeApp(), SETTING["clients"], tamper)


@pytest.mark.parametrize(
    ("piece", "types"),
    [
        ("quantise()", {torch.int8, torch.float64}),
        ("quantise(to='bf16')", {torch.bfloat16}),
        ("topk(share=0.05)", {torch.int32, torch.float64}),
    ],
)
def test_compressed_uploads_travel_to_the_same_model(
    piece: str, types: set[torch.dtype], tmp_path: Path
) -> None:
    seen: list[tuple[set[torch.dtype], int]] = []

    def look(upload: dict[str, dict[str, torch.Tensor]]) -> None:
        seen.append(({t.dtype for g in upload.values() for t in g.values()}, bytes_of(upload)))

    serial(tmp_path / "serial", f"{FEDDKD} | {piece}")
    flower(tmp_path / "flower", f"{FEDDKD} | {piece}", meddling(look))
    check_same(tmp_path / "serial", tmp_path / "flower")
    assert all(found == types for found, _ in seen)
    assert sum(size for _, size in seen) == rows(tmp_path / "flower")[-1]["bytes_up"]


@pytest.mark.parametrize(
    ("piece", "change"),
    [
        ("topk(share=0.05)", lambda upload: upload["params:places"]["all"].fill_(3)),
        ("topk(share=0.05)", lambda upload: upload["params:places"]["all"].add_(1 << 20)),
        ("quantise()", lambda upload: upload["params:scales"]["1.bias"].neg_()),
        ("quantise()", lambda upload: upload.pop("params:codes")),
    ],
)
def test_a_malformed_message_harms_only_its_own_node(
    piece: str, change: Meddle, tmp_path: Path
) -> None:
    method = f"fedavg({LOCAL}) | {piece}"
    flower(tmp_path, method, meddling(change, parts=(1,)), rounds=1)
    assert [client for *_, client, _ in rows(tmp_path)[-1]["missing"]] == [1]


def test_masked_sums_refuse_compressed_uploads() -> None:
    experiment = Experiment(method="fedavg() | topk()").as_dict()
    with pytest.raises(InputError, match="compressed"):
        check_summable(experiment, 0.7)


@pytest.mark.parametrize("rule", ["by_size()", "power_of_choice()", "oort(exploration=0.5)"])
def test_the_same_clients_are_selected_as_on_serial(rule: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"selection": rule, "cohort": 1, "rounds": 3}
    serial(tmp_path / "serial", FEDDKD, **changes)
    flower(tmp_path / "flower", FEDDKD, **changes)
    check_same(tmp_path / "serial", tmp_path / "flower")


def test_masked_sums_refuse_selections_that_ask() -> None:
    experiment = Experiment(method="fedavg()", selection="oort()").as_dict()
    with pytest.raises(InputError, match="every single client's loss"):
        check_summable(experiment, 0.7)


@pytest.mark.parametrize(
    "attack",
    [
        "sign_flip(share=0.4)",
        "gaussian(clients='1', deviation=0.01)",
        "backdoor(clients='0, 2', size=2)",
    ],
)
def test_attacks_take_place_on_the_nodes(attack: str, tmp_path: Path) -> None:
    serial(tmp_path / "serial", FEDDKD, attack=attack)
    flower(tmp_path / "flower", FEDDKD, attack=attack)
    check_same(tmp_path / "serial", tmp_path / "flower")


@pytest.mark.parametrize(
    "rules",
    [
        ("gather='krum'", "gather='geometric'"),
        ("gather='multi_krum'", "gather='centred', radius=1"),
    ],
    ids=lambda rules: rules[0],
)
def test_defences_gather_models_and_gradients_of_nodes(
    rules: tuple[str, str], tmp_path: Path
) -> None:
    first, second = rules
    method = f"fedavg({LOCAL}, {first}) | dkd(steps=2, batch_size=16, lr=0.3, {second})"
    serial(tmp_path / "serial", method, attack="scaling(clients='1')")
    flower(tmp_path / "flower", method, attack="scaling(clients='1')")
    check_same(tmp_path / "serial", tmp_path / "flower")
