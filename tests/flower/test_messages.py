"""Messages between server and nodes have the JSON of version 0.1; wrong fields are named."""

import json
import subprocess
import sys
from typing import Any

import pytest

from feddkd.flower.messages import (
    ClientInfo,
    ExchangeReply,
    ExchangeRequest,
    FederationFacts,
    KeysRequest,
    MaskingOrder,
    NodeInfo,
    NodeRequest,
    PublicKeys,
    RevealedShares,
    SealedShares,
    SharesRequest,
    UnmaskRequest,
    WireMessage,
)
from feddkd.flower.wire import WireError

FACTS = FederationFacts((1, 8, 8), 10, 255.0)
BASE: tuple[dict[str, Any], FederationFacts] = ({"rounds": 2}, FACTS)
BASE_JSON = (
    '"experiment": {"rounds": 2}, "facts": {"shape": [1, 8, 8], "classes": 10, "scale": 255.0}'
)
KEYS = PublicKeys("02ab", {"0-1": "02cd"}, {"0-1": "ef"})
KEYS_JSON = '{"channel": "02ab", "keys": {"0-1": "02cd"}, "checks": {"0-1": "ef"}}'
ORDER = ExchangeRequest(*BASE, 1, (3, 2, 0, 1), "local", "", "nothing", ("a", "b"))
ORDER_JSON = (
    f'{{{BASE_JSON}, "client": 1, "key": [3, 2, 0, 1], "phase": "local", "expects": "",'
    ' "before": "nothing", "retain": ["a", "b"]}'
)
EVALUATION = ExchangeRequest(*BASE, 1, ("evaluate",), "test", "t", "t", None)
MASKED = ExchangeRequest(
    *BASE, 1, (3, 2, 0, 1), "local", "", "", (), MaskingOrder("s", {0: "x", 2: "y"})
)

# the JSON that version 0.1 sent
AS_SENT: list[tuple[WireMessage, str]] = [
    (NodeRequest(*BASE), f"{{{BASE_JSON}}}"),
    (
        KeysRequest(*BASE, 1, "s", 2),
        f'{{{BASE_JSON}, "client": 1, "session": "s", "round": 2}}',
    ),
    (
        SharesRequest(*BASE, 1, "s", 3, {0: KEYS}),
        f'{{{BASE_JSON}, "client": 1, "session": "s", "threshold": 3,'
        f' "public": {{"0": {KEYS_JSON}}}}}',
    ),
    (
        UnmaskRequest(*BASE, 1, "s", "1-2", (0, 1, 2)),
        f'{{{BASE_JSON}, "client": 1, "session": "s", "exchange": "1-2", "survivors": [0, 1, 2]}}',
    ),
    (ORDER, ORDER_JSON),
    (
        EVALUATION,
        f'{{{BASE_JSON}, "client": 1, "key": ["evaluate"], "phase": "test", "expects": "t",'
        ' "before": "t", "retain": null}',
    ),
    (
        MASKED,
        f'{{{BASE_JSON}, "client": 1, "key": [3, 2, 0, 1], "phase": "local", "expects": "",'
        ' "before": "", "retain": [], "secure": {"session": "s", "sealed": {"0": "x", "2": "y"}}}',
    ),
    (
        NodeInfo({0: ClientInfo({"train": 5}, ("nothing", "t"))}),
        '{"clients": {"0": {"counts": {"train": 5}, "held": ["nothing", "t"]}}}',
    ),
    (ExchangeReply(1, ""), '{"client": 1, "held": ""}'),
    (ExchangeReply(1, lost=True), '{"client": 1, "lost": true}'),
    (KEYS, KEYS_JSON),
    (SealedShares({0: "x"}), '{"sealed": {"0": "x"}}'),
    (RevealedShares({0: "ab"}), '{"shares": {"0": "ab"}}'),
]


@pytest.mark.parametrize(("message", "text"), AS_SENT, ids=lambda one: type(one).__name__)
def test_a_message_has_the_json_of_version_0_1_and_is_read_back(
    message: WireMessage, text: str
) -> None:
    assert json.dumps(message.as_json()) == text
    assert type(message).read(json.loads(text)) == message


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"clients": 1}, "unknown field 'clients'"),
        ({"client": "1"}, "field 'client' .* whole number"),
        ({"client": True}, "field 'client' .* whole number"),
        ({"client": 1.0}, "field 'client' .* whole number"),
        ({"key": 3}, "field 'key' .* list"),
        ({"key": [[3]]}, "field 'key'"),
        ({"retain": "all"}, "field 'retain'"),
        ({"facts": [1]}, "FederationFacts must be a JSON object"),
        ({"facts": {"shape": [1], "classes": 2}}, "FederationFacts has no field 'scale'"),
        ({"secure": {"session": "s", "sealed": {"01": "x"}}}, "field 'sealed' .* '01'"),
        ({"secure": {"session": "s", "sealed": {"9" * 5000: "x"}}}, "field 'sealed'"),
        ({"secure": {}}, "MaskingOrder has no field 'session'"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(WireError, match=why):
        ExchangeRequest.read({**json.loads(ORDER_JSON), **changes})


@pytest.mark.parametrize(("message", "text"), AS_SENT, ids=lambda one: type(one).__name__)
def test_a_missing_field_is_named(message: WireMessage, text: str) -> None:
    content = json.loads(text)
    for name in set(content) - {"secure"}:
        with pytest.raises(WireError, match=f"'{name}'"):
            type(message).read({key: value for key, value in content.items() if key != name})


@pytest.mark.parametrize("content", [None, 7, "text", [], [["client", 1]]])
def test_only_an_object_is_a_message(content: object) -> None:
    with pytest.raises(WireError, match="JSON object"):
        ExchangeReply.read(content)


WITHOUT_FLOWER = """
import json, sys, torch
sys.modules["flwr"] = None
from feddkd import Experiment
from feddkd.flower import node
from feddkd.flower.node_data import NodeConfig
from feddkd.flower.node_experiment import open_experiment
from feddkd.flower.messages import ExchangeRequest, FederationFacts
from feddkd.flower.wire import pack, unpack
spelled = Experiment(
    method="fedavg(epochs=1)", data="digits", model="mlp(hidden='4')", clients=2, training=0.1
).as_dict()
facts = FederationFacts((1, 8, 8), 10, 16.0)
config = NodeConfig(0, 2)
info, memory = node.ask(config, "info", {"experiment": spelled, "facts": facts.as_json()}, {})
request = ExchangeRequest(spelled, facts, 0, (0, 1, 0, 1), "local", "", "", ())
opened = open_experiment(config, request)
params, buffers = opened.model.initial(("init", 0))
rates = {"lr": torch.tensor(0.1, dtype=torch.float64)}
sent = pack({"params": params, "buffers": buffers, "rates": rates})
reply, upload, memory = node.respond(config, request, sent, memory)
print(json.dumps([sorted(info.clients), reply.as_json(), sorted(unpack(upload))]))
"""


def test_a_node_answers_without_flwr() -> None:
    command = [sys.executable, "-c", WITHOUT_FLOWER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    clients, reply, groups = json.loads(done.stdout)
    assert clients == [0]
    assert reply["client"] == 0
    assert "params" in groups
