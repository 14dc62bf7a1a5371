"""The secrets of a round as the server knows them, and the opening of one masked sum."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from feddkd.flower import shamir, shares
from feddkd.flower.masking import Words, pairwise, stream
from feddkd.flower.messages import PublicKeys
from feddkd.flower.shares import LEAST
from feddkd.flower.wire import WireError

Revealed = Mapping[int, Mapping[int, bytes]]  # who tells -> member -> share


class RoundSecrets(NamedTuple):
    """The public keys and the encrypted shares of a round's cohort."""

    round: tuple[Any, ...] = ()  # (seed, round)
    session: str = ""
    threshold: int = LEAST
    public: Mapping[int, PublicKeys] = {}  # by client
    sealed: Mapping[int, Mapping[int, str]] = {}  # member -> receiver -> shares

    def number(self, client: int) -> int:
        """Return the number of a client: every secret's share with this number is for it."""
        return sorted(self.public).index(client) + 1


def joined_secrets(
    agreed: RoundSecrets, name: str, clients: Sequence[int], revealed: Revealed
) -> dict[int, bytes]:
    """Return the secret of each member that shares give: its seed if it is in the sum, else its
    key. Raise WireError if one is not what its client has announced.
    """
    secrets: dict[int, bytes] = {}
    for member in agreed.sealed:
        public = agreed.public[member]
        secret = shamir.join([told[member] for told in revealed.values()])
        if member in clients:
            _check(member, shares.derive(secret, "check"), public.checks[name])
        else:
            _check(member, shares.public(secret), public.keys[name])
        secrets[member] = secret
    return secrets


def masks(
    agreed: RoundSecrets,
    name: str,
    clients: Sequence[int],
    joined: Mapping[int, bytes],
    size: int,
) -> Iterator[Words]:
    """Yield all masks that must be subtracted from the sum.

    They are the survivors' own masks, and the masks that the other members would have cancelled.
    """
    for member, secret in joined.items():
        if member in clients:
            yield stream(shares.derive(secret, "mask"), size)
        else:
            seeds = {}
            for client in clients:
                point = bytes.fromhex(agreed.public[client].keys[name])
                seeds[client] = shares.agree(secret, point)
            yield -pairwise(member, seeds, size)


def _check(member: int, computed: bytes, known: str) -> None:
    """Raise WireError if a secret does not give the value that its client has published."""
    if computed.hex() != known:
        raise WireError(f"the shares of client {member}'s secret do not give it")
