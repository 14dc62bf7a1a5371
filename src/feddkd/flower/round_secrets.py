"""A client's secrets of a round of secure aggregation, and where its node keeps them."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from feddkd.flower import shares
from feddkd.flower.messages import PublicKeys
from feddkd.flower.wire import NodeMemory, WireError

Hex = str


@dataclass
class Secrets:
    """A client's secrets of a round, and its shares of the others' secrets.

    It is kept as JSON, so its numbers of clients are texts.
    """

    client: int
    session: str
    round: str
    channel: Hex
    keys: dict[str, Hex]  # by exchange
    seeds: dict[str, Hex]
    threshold: int = 0
    peers: dict[str, Any] = field(default_factory=dict)  # member -> its public keys
    # member -> "seeds" or "keys" -> exchange -> share
    held: dict[str, dict[str, dict[str, Hex]]] = field(default_factory=dict)
    complete: bool = False  # whether the others' shares have arrived
    # exchanges for which there is an upload -> group -> its sketch
    masked: dict[str, dict[str, Hex]] = field(default_factory=dict)
    revealed: dict[str, list[int]] = field(default_factory=dict)  # exchange -> survivors

    def public(self) -> PublicKeys:
        """Return the public keys and the checks of the seeds."""
        keys = {name: shares.public(bytes.fromhex(key)).hex() for name, key in self.keys.items()}
        checks = {
            name: shares.derive(bytes.fromhex(seed), "check").hex()
            for name, seed in self.seeds.items()
        }
        return PublicKeys(shares.public(bytes.fromhex(self.channel)).hex(), keys, checks)

    def channel_to(self, peer: int) -> bytes:
        """Return the key that encrypts the messages between this client and a peer."""
        point = self.peers[str(peer)]["channel"]
        return shares.agree(bytes.fromhex(self.channel), bytes.fromhex(point))


def _tag(client: int) -> str:
    return f"secrets:{client}"


def read_secrets(memory: NodeMemory, client: int) -> Secrets | None:
    """Return a client's secrets of its last round; None if it has none."""
    content = memory.get(_tag(client))
    return None if content is None else Secrets(**json.loads(content))


def open_secrets(memory: NodeMemory, client: int, session: str) -> Secrets:
    """Return a client's secrets of a round, or raise WireError if it has none."""
    secrets = read_secrets(memory, client)
    if secrets is None or secrets.session != session:
        raise WireError("the client has no secrets of this round (was its node restarted?)")
    return secrets


def with_secrets(memory: NodeMemory, secrets: Secrets) -> NodeMemory:
    """Return the memory of a node with a client's secrets."""
    return {**memory, _tag(secrets.client): json.dumps(asdict(secrets)).encode()}
