"""Answers of a dishonest node."""

import json
import random
from collections.abc import Callable
from typing import Any

import torch
from flwr.app import ConfigRecord, Error, Message, RecordDict

from feddkd.flower.transport import bytes_in, json_record, tensor_record
from feddkd.flower.wire import pack, unpack

DEEP = "[" * 2_000 + "]" * 2_000


def lie(draw: random.Random, asked: Message, reply: Message) -> Message | None:
    """Return what a node answers that lies to a server without secure aggregation."""
    kind = asked.metadata.message_type
    if reply.has_error():
        return reply
    if kind == "query.info":
        return page(draw.choice(CLAIMS), reply)
    return draw.choice(UPLOADS if kind.startswith("train.") else ANSWERS)(reply)


def lie_of_secure(draw: random.Random, asked: Message, reply: Message) -> Message | None:
    """Return what a node answers that lies in secure aggregation; a wrong masked upload, which
    nobody can see, is not among it.
    """
    if asked.metadata.message_type.startswith("query.") and not reply.has_error():
        kind = asked.metadata.message_type.removeprefix("query.")
        if kind in SECRETS:
            return draw.choice((*(lambda r, c=c: page(c, r) for c in SECRETS[kind]), *ANSWERS))(
                reply
            )
    if asked.metadata.message_type.startswith("train.") and not reply.has_error():
        return draw.choice((*ANSWERS, shortened))(reply)
    return lie(draw, asked, reply)


def page(change: Callable[[dict[str, Any]], Any], reply: Message) -> Message:
    """Change the JSON of a reply."""
    told = json.loads(str(reply.content.config_records["page"]["json"]))
    change(told)
    reply.content["page"] = json_record(told)
    return reply


def changed(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Message], Message]:
    """Return a function that changes a tensor of a reply."""

    def spoil(reply: Message) -> Message:
        content = bytes_in(reply.content)
        if not content:  # the node has lost what it kept
            return reply
        groups = {g: dict(own) for g, own in unpack(content).items()}
        for tensors in groups.values():
            for name in list(tensors)[:1]:
                tensors[name] = change(tensors[name])
        reply.content["tensors"] = tensor_record(pack(groups))
        return reply

    return spoil


def with_content(content: bytes) -> Callable[[Message], Message]:
    def spoil(reply: Message) -> Message:
        reply.content["tensors"] = tensor_record(content)
        return reply

    return spoil


def with_json(text: Any) -> Callable[[Message], Message]:
    def spoil(reply: Message) -> Message:
        reply.content["page"] = ConfigRecord({"json": text})
        return reply

    return spoil


def an_error(reply: Message) -> Message:
    return answering(reply, Error(code=2, reason="\x1b[2Jall is well\n" * 50))


def answering(reply: Message, content: Any) -> Message:
    """Return another reply to the same message."""
    made = Message(RecordDict(), reply_to=reply)
    made.metadata.__dict__.update(reply.metadata.__dict__)
    if isinstance(content, Error):
        made.__dict__["_error"], made.__dict__["_content"] = content, None
    return made


def shortened(reply: Message) -> Message:
    content = bytes_in(reply.content)
    if not content:  # the node has lost what it kept
        return reply
    groups = unpack(content)
    words = groups["masked"]["words"][:-1]
    reply.content["tensors"] = tensor_record(pack({"masked": {"words": words}}))
    return reply


ANSWERS: list[Callable[[Message], Message | None]] = [
    lambda reply: None,
    with_json(DEEP),
    with_json("null"),
    with_json("{"),
    with_json(b"{}"),
    with_json('{"client": ' + "9" * 5000 + "}"),
    an_error,
]
UPLOADS: list[Callable[[Message], Message | None]] = [
    *ANSWERS,
    with_content(b""),
    with_content(b"nonsense"),
    with_content((1 << 62).to_bytes(8, "little")),
    changed(lambda tensor: torch.full_like(tensor, torch.nan)),
    changed(lambda tensor: torch.full_like(tensor, -torch.inf)),
    changed(lambda tensor: torch.full_like(tensor, 1e30)),
    changed(lambda tensor: tensor.flatten()[:1]),
    changed(lambda tensor: tensor.float()),
]
CLAIMS: list[Callable[[dict[str, Any]], Any]] = [
    lambda told: told.clear(),
    lambda told: told.update(clients={}),
    lambda told: told.update(clients={"0": 1, "x": 2}),
    lambda told: [one["counts"].update(train=10**12) for one in told["clients"].values()],
    lambda told: [one["counts"].update(train=-1) for one in told["clients"].values()],
    lambda told: told.update(clients=dict.fromkeys(["99"], *told["clients"].values())),
]
SECRETS: dict[str, list[Callable[[dict[str, Any]], Any]]] = {
    "keys": [
        lambda told: told.pop("keys"),
        lambda told: told.update(channel="02" * 33),
        lambda told: told["checks"].clear(),
    ],
    "shares": [
        lambda told: told["sealed"].popitem(),
        lambda told: told.update(sealed=7),
        lambda told: told.update(sealed=dict.fromkeys(told["sealed"], "AAAA")),
    ],
    "unmask": [
        lambda told: told["shares"].popitem(),
        lambda told: told["shares"].update(dict.fromkeys(told["shares"], "00")),
        lambda told: told["shares"].update({k: v[:-4] + "0102" for k, v in told["shares"].items()}),
    ],
}
