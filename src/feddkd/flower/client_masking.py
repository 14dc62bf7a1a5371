"""The client's half of secure aggregation: its secrets of a round, its masked uploads, and the
shares of its peers' secrets that it reveals.

Every exchange of a round has its own key and its own seed, drawn and shared when the round begins,
so a secret that is revealed for one exchange says nothing about another. With one key for the whole
round, the key of a client that stops answering in DKD's last step, together with its seeds that
were revealed before, would uncover all its uploads of the round.

For each exchange a client reveals one share of a peer's secrets: of its seed if the peer's upload
is in the sum, otherwise of its key. It does so for one set of survivors only, however often it is
asked, and for no fewer survivors than the threshold. What it remembers of opened sums is in
`opened_sums`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from feddkd.flower import opened_sums, shamir, shares
from feddkd.flower.masking import encode, mask, to_groups, weights
from feddkd.flower.messages import (
    ExchangeRequest,
    MaskingOrder,
    PublicKeys,
    RevealedShares,
    SealedShares,
)
from feddkd.flower.round_secrets import Hex, Secrets, open_secrets, read_secrets, with_secrets
from feddkd.flower.shares import LEAST, name_of
from feddkd.flower.signing import check_signed, signed
from feddkd.flower.wire import NodeMemory, WireError, pack
from feddkd.method import Collect
from feddkd.tensors import Groups

KINDS = ("seeds", "keys")  # of the secrets that are split into shares


class NodeKeys(NamedTuple):
    """The file of a node's own key, and the folder with the public keys of the other hospitals."""

    own: Path | None = None
    peers: Path | None = None


NO_KEYS = NodeKeys()


class BadSharesError(WireError):
    """The shares that some clients have sent cannot be opened."""

    def __init__(self, dealers: Mapping[int, WireError]) -> None:
        super().__init__("; ".join(map(str, dealers.values())))
        self.dealers = tuple(sorted(dealers))


def begin(
    client: int,
    session: str,
    digest: str,
    round: int,
    names: Sequence[str],
    memory: NodeMemory,
    node: NodeKeys = NO_KEYS,
) -> tuple[PublicKeys, NodeMemory]:
    """Draw new secrets for every exchange of a round.

    A request that comes twice changes nothing.
    """
    before = read_secrets(memory, client)
    if before is not None and (before.session, before.round) == (session, f"{digest}-{round}"):
        secrets = before
    else:
        secrets = Secrets(
            client,
            session,
            f"{digest}-{round}",
            shares.new_key().hex(),
            {name: shares.new_key().hex() for name in names},
            {name: shares.new_seed().hex() for name in names},
        )
    public = secrets.public()
    if node.own is not None:
        public = signed(public, client, session, secrets.round, node.own)
    return public, with_secrets(memory, secrets)


def deal(
    client: int,
    session: str,
    threshold: int,
    public: Mapping[int, PublicKeys],
    memory: NodeMemory,
    node: NodeKeys = NO_KEYS,
    least: int = LEAST,
) -> tuple[SealedShares, NodeMemory]:
    """Split the client's secrets into shares and encrypt one for each of the other members.

    `least` is the smallest threshold that the hospital accepts.
    """
    secrets = open_secrets(memory, client, session)
    members = sorted(public)
    if secrets.peers:
        raise WireError("the client has already sent its shares of this round")
    least = max(least, LEAST)
    if not least <= threshold <= len(members) or 2 * threshold <= len(members):
        raise WireError(
            f"the threshold is {threshold} among {len(members)} clients; it must be at least"
            f" {least} and more than half of them"
        )
    _check_public(secrets, public)
    if node.peers is not None:
        check_signed(public, client, session, secrets.round, node.peers)
    secrets.threshold = threshold
    secrets.peers = {str(member): keys.as_json() for member, keys in public.items()}
    sealed = {}
    for member, parts in zip(members, _split(secrets, len(members)), strict=True):
        if member == client:
            secrets.held[str(client)] = _as_text(parts)
        else:
            seeds, keys = (list(parts[kind].values()) for kind in KINDS)
            sealed[member] = shares.seal(
                secrets.channel_to(member), client, member, seeds, keys
            ).decode()
    return SealedShares(sealed), with_secrets(memory, secrets)


def _split(secrets: Secrets, members: int) -> list[dict[str, dict[str, bytes]]]:
    """Return each member's shares of all secrets: kind -> exchange -> share."""
    parts: list[dict[str, dict[str, bytes]]] = [
        {kind: {} for kind in KINDS} for _ in range(members)
    ]
    for kind, by_exchange in zip(KINDS, (secrets.seeds, secrets.keys), strict=True):
        for name, secret in by_exchange.items():
            split = shamir.split(bytes.fromhex(secret), secrets.threshold, members)
            for part, share in zip(parts, split, strict=True):
                part[kind][name] = share
    return parts


def _check_public(secrets: Secrets, public: Mapping[int, PublicKeys]) -> None:
    own = public.get(secrets.client)
    if own is None or replace(own, signer=None, signature=None) != secrets.public():
        raise WireError("the client's public keys are not those that it has sent")
    for keys in public.values():
        if set(keys.keys) != set(secrets.keys):
            raise WireError(
                f"a peer has keys for other exchanges: {sorted(keys.keys)} instead of"
                f" {sorted(secrets.keys)}"
            )
        for point in (keys.channel, *keys.keys.values()):
            shares.check_public(bytes.fromhex(point))


def accept(secrets: Secrets, sealed: Mapping[int, str]) -> None:
    """Take the other clients' shares.

    The clients whose shares arrive are the members until the round ends: masks are for all of them.
    """
    if secrets.complete or not secrets.peers:
        raise WireError("shares arrive once a round, after the client has sent its own shares")
    names, bad = list(secrets.seeds), dict[int, WireError]()
    for sender, text in sealed.items():
        try:
            parts = shares.unseal(
                secrets.channel_to(sender), sender, secrets.client, text.encode(), len(names)
            )
        except WireError as error:
            bad[sender] = error
            continue
        theirs = {
            kind: dict(zip(names, part, strict=True))
            for kind, part in zip(KINDS, parts, strict=True)
        }
        secrets.held[str(sender)] = _as_text(theirs)
    if bad:
        raise BadSharesError(bad)
    if len(secrets.held) < secrets.threshold:
        raise WireError(
            f"there are shares of {len(secrets.held)} clients, fewer than the threshold of"
            f" {secrets.threshold}"
        )
    secrets.complete = True


def masked(
    request: ExchangeRequest,
    order: MaskingOrder,
    digest: str,
    collect: Mapping[str, Collect],
    examples: int,
    upload: Groups,
    sent: Groups,
    memory: NodeMemory,
) -> tuple[bytes, NodeMemory]:
    """Weight and mask an upload for the exchange of a request, in which the client was sent `sent`.

    Each mask is used once: a mask that is used twice hides nothing.
    """
    client = request.client
    _, round, index, step = request.key
    secrets, name = open_secrets(memory, client, order.session), name_of(int(index), int(step))
    if secrets.round != f"{digest}-{round}" or name not in secrets.seeds or name in secrets.masked:
        raise WireError(f"the client has no unused mask for exchange {name} of round {round}")
    if order.sealed is not None:
        accept(secrets, order.sealed)
    if not secrets.complete:
        raise WireError("the other clients' shares have not arrived")
    words = encode(upload, weights(collect, examples), len(secrets.held))
    key = bytes.fromhex(secrets.keys[name])
    pairs = {
        int(peer): shares.agree(key, bytes.fromhex(secrets.peers[peer]["keys"][name]))
        for peer in secrets.held
        if int(peer) != client
    }
    own_mask = shares.derive(bytes.fromhex(secrets.seeds[name]), "mask")
    words = words + mask(client, own_mask, pairs, len(words))
    tag = opened_sums.tag(client)
    memory = {tag: opened_sums.new_memory(), **memory}
    collected = {group: upload[group] for group in collect}
    sketches = opened_sums.sketches(memory[tag], collected, sent)
    secrets.masked[name] = {group: sketch.tobytes().hex() for group, sketch in sketches.items()}
    return pack(to_groups(words)), with_secrets(memory, secrets)


def reveal(
    client: int, session: str, name: str, survivors: Sequence[int], memory: NodeMemory
) -> tuple[RevealedShares, NodeMemory]:
    """Reveal one share for each member: of its seed if it survived, otherwise of its key."""
    secrets, wanted = open_secrets(memory, client, session), sorted(set(survivors))
    if name not in secrets.masked or client not in wanted:
        raise WireError("the client has no upload in the sum that it is asked about")
    if not {str(survivor) for survivor in wanted} <= set(secrets.held):
        members = sorted(map(int, secrets.held))
        raise WireError(f"the survivors {wanted} are not all among the members {members}")
    if len(wanted) < secrets.threshold:
        raise WireError(
            f"there are {len(wanted)} survivors, fewer than the threshold of {secrets.threshold}"
        )
    before = secrets.revealed.setdefault(name, wanted)
    if before != wanted:
        raise WireError(
            f"the client has already revealed its shares of exchange {name} for the survivors"
            f" {before}, so it cannot for {wanted}"
        )
    tag = opened_sums.tag(client)
    sketches = {
        group: np.frombuffer(bytes.fromhex(text), "<f4")
        for group, text in secrets.masked[name].items()
    }
    memory = {**memory, tag: opened_sums.remember(memory[tag], sketches, wanted)}
    revealed = {
        int(member): held["seeds" if int(member) in wanted else "keys"][name]
        for member, held in secrets.held.items()
    }
    return RevealedShares(revealed), with_secrets(memory, secrets)


def _as_text(parts: Mapping[str, Mapping[str, bytes]]) -> dict[str, dict[str, Hex]]:
    return {
        kind: {name: share.hex() for name, share in by_exchange.items()}
        for kind, by_exchange in parts.items()
    }
