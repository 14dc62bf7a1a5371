"""A client's half of secure aggregation: its secrets of a round, its masked uploads, and what it
tells of its peers' secrets.

Every exchange of a round has a key and a seed of its own, drawn and shared when the round begins.
So what is told in one of them says nothing of another: were it one key for the round, then the key
of a client that falls silent in DKD's last step, together with its seeds, told before, would lay
open all that it has uploaded since the round began.

A client tells one thing of a peer for an exchange: its seed, if the peer's upload is in the sum, or
else its key. It tells it for one set of survivors and no other, whoever asks again, and for no
fewer than the threshold.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from feddkd.flower import shares
from feddkd.flower.masking import encode, mask, to_groups, weights
from feddkd.flower.shares import LEAST, name_of
from feddkd.flower.wire import WireError, pack
from feddkd.method import Collect
from feddkd.tensors import Groups

Page = dict[str, Any]
Kept = dict[str, bytes]
KINDS = ("seeds", "keys")  # what shares are of
Hex = str


@dataclass
class Secrets:
    """What a client keeps of a round: its own secrets, and its shares of the others'."""

    client: int
    session: str
    round: str
    channel: Hex
    keys: dict[str, Hex]  # by exchange
    seeds: dict[str, Hex]
    threshold: int = 0
    # what each member has made public; keys of JSON are texts
    peers: dict[str, Any] = field(default_factory=dict)
    # member -> "seeds", "keys" -> exchange -> share
    held: dict[str, dict[str, dict[str, Hex]]] = field(default_factory=dict)
    complete: bool = False  # whether the others' shares have come
    masked: list[str] = field(default_factory=list)  # exchanges for which there is an upload
    # round -> exchange -> survivors; outlives the round
    revealed: dict[str, dict[str, list[int]]] = field(default_factory=dict)

    def announce(self) -> Page:
        """What everybody may know."""
        return {
            "channel": shares.public(bytes.fromhex(self.channel)).hex(),
            "keys": {
                name: shares.public(bytes.fromhex(key)).hex() for name, key in self.keys.items()
            },
            "checks": {
                name: shares.derive(bytes.fromhex(seed), "check").hex()
                for name, seed in self.seeds.items()
            },
        }

    def with_peer(self, peer: int) -> bytes:
        """The key for what passes between the two."""
        return shares.agree(
            bytes.fromhex(self.channel), bytes.fromhex(self.peers[str(peer)]["channel"])
        )


def begin(
    client: int, session: str, digest: str, round: int, names: Sequence[str], kept: Kept
) -> tuple[Page, Kept]:
    """New secrets for every exchange of a round. For which survivors others were told of is not
    forgotten while the experiment is the same: a server that goes on from its checkpoint plays a
    round again.
    """
    past = _read(kept, client).revealed if _tag(client) in kept else {}
    own = Secrets(
        client,
        session,
        f"{digest}-{round}",
        shares.new_key().hex(),
        {name: shares.new_key().hex() for name in names},
        {name: shares.new_seed().hex() for name in names},
        revealed={name: told for name, told in past.items() if name.startswith(f"{digest}-")},
    )
    return own.announce(), _write(kept, own)


def deal(
    client: int, session: str, threshold: int, public: Mapping[str, Any], kept: Kept
) -> tuple[Page, Kept]:
    """Shares of one's secrets, sealed for each of the others."""
    own = _open(kept, client, session)
    members = sorted({int(member) for member in public})
    if own.peers:
        raise WireError("it has dealt out its shares of this round already")
    if not LEAST <= threshold <= len(members) or 2 * threshold <= len(members):
        raise WireError(
            f"a threshold of {threshold} among {len(members)} clients: at least {LEAST}, and more"
            " than half of them"
        )
    _check_public(own, public, members)
    own.threshold, own.peers = threshold, dict(public)
    dealt = {
        kind: {
            name: shares.split(bytes.fromhex(secret), threshold, len(members))
            for name, secret in secrets.items()
        }
        for kind, secrets in zip(KINDS, (own.seeds, own.keys), strict=True)
    }
    sealed = {}
    for at, member in enumerate(members):
        theirs = {
            kind: {name: cut[at] for name, cut in every.items()} for kind, every in dealt.items()
        }
        if member == client:
            own.held[str(client)] = _as_text(theirs)
        else:
            parts = (list(theirs[kind].values()) for kind in KINDS)
            sealed[str(member)] = shares.seal(
                own.with_peer(member), client, member, *parts
            ).decode()
    return {"sealed": sealed}, _write(kept, own)


def _check_public(own: Secrets, public: Mapping[str, Any], members: Sequence[int]) -> None:
    if public.get(str(own.client)) != own.announce() or set(public) != {
        str(member) for member in members
    }:
        raise WireError("its own public keys are not those it has sent, or a member is there twice")
    for peer in public.values():
        if set(peer["keys"]) != set(own.keys):
            raise WireError(
                f"its peers know of other exchanges: {sorted(peer['keys'])}, and not"
                f" {sorted(own.keys)}"
            )
        for point in (peer["channel"], *peer["keys"].values()):
            shares.check_public(bytes.fromhex(point))


def accept(own: Secrets, sealed: Mapping[str, str]) -> None:
    """The others' shares.

    Whose have come are the members, and masks are for all of them, until the round ends.
    """
    if own.complete or not own.peers:
        raise WireError("shares come once a round, after one's own were dealt out")
    names = list(own.seeds)
    for sender, text in ((int(member), text) for member, text in sealed.items()):
        found = shares.unseal(own.with_peer(sender), sender, own.client, text.encode(), len(names))
        theirs = {
            kind: dict(zip(names, part, strict=True))
            for kind, part in zip(KINDS, found, strict=True)
        }
        own.held[str(sender)] = _as_text(theirs)
    if len(own.held) < own.threshold:
        raise WireError(f"shares of {len(own.held)} clients, and {own.threshold} are the threshold")
    own.complete = True


def masked(
    client: int,
    page: Page,
    digest: str,
    collect: Mapping[str, Collect],
    examples: int,
    upload: Groups,
    kept: Kept,
) -> tuple[bytes, Kept]:
    """An upload, weighted and masked, for the exchange that an order's key names: once, since a
    mask used twice hides nothing.
    """
    _, round, index, step = page["key"]
    own, name = _open(kept, client, page["secure"]["session"]), name_of(index, step)
    if own.round != f"{digest}-{round}" or name not in own.seeds or name in own.masked:
        raise WireError(f"it has no mask, or none any more, for exchange {name} of round {round}")
    if "sealed" in page["secure"]:
        accept(own, page["secure"]["sealed"])
    if not own.complete:
        raise WireError("the others' shares have not come")
    words = encode(upload, weights(collect, examples), len(own.held))
    key = bytes.fromhex(own.keys[name])
    pairs = {
        int(peer): shares.agree(key, bytes.fromhex(own.peers[peer]["keys"][name]))
        for peer in own.held
        if int(peer) != client
    }
    words = words + mask(
        client, shares.derive(bytes.fromhex(own.seeds[name]), "mask"), pairs, len(words)
    )
    own.masked.append(name)
    return pack(to_groups(words)), _write(kept, own)


def reveal(
    client: int, session: str, name: str, survivors: Sequence[int], kept: Kept
) -> tuple[Page, Kept]:
    """For one exchange, of each member one share: of its seed, if it survived, or else of its key."""
    own, there = _open(kept, client, session), sorted({int(survivor) for survivor in survivors})
    if name not in own.masked or client not in there:
        raise WireError("it is asked about a sum that it has no part in")
    if not {str(survivor) for survivor in there} <= set(own.held):
        raise WireError(
            f"survivors {there} are not all among the members {sorted(map(int, own.held))}"
        )
    if len(there) < own.threshold:
        raise WireError(f"{len(there)} survivors, and {own.threshold} are the threshold")
    told = own.revealed.setdefault(own.round, {}).setdefault(name, there)
    if told != there:
        raise WireError(
            f"it has told of exchange {name} for the survivors {told} already, and tells of it for"
            " no others"
        )
    found = {
        member: held["seeds" if int(member) in there else "keys"][name]
        for member, held in own.held.items()
    }
    return {"shares": found}, _write(kept, own)


# --- what is kept


def _tag(client: int) -> str:
    return f"secrets:{client}"


def _read(kept: Kept, client: int) -> Secrets:
    return Secrets(**json.loads(kept[_tag(client)]))


def _open(kept: Kept, client: int, session: str) -> Secrets:
    own = _read(kept, client) if _tag(client) in kept else None
    if own is None or own.session != session:
        raise WireError("it has no secrets of this round (restarted?)")
    return own


def _write(kept: Kept, own: Secrets) -> Kept:
    return {**kept, _tag(own.client): json.dumps(asdict(own)).encode()}


def _as_text(parts: Mapping[str, Mapping[str, bytes]]) -> dict[str, dict[str, Hex]]:
    return {
        kind: {name: share.hex() for name, share in every.items()} for kind, every in parts.items()
    }
