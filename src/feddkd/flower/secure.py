"""Flower with secure aggregation: what clients upload in training comes masked, and the server
learns sums alone.

A round begins with two more questions to the cohort, for public keys and for sealed shares, which
the server passes on. Each exchange ends with one more, to those whose uploads came: so many shares
of their seeds, and of the keys of those who fell silent, that the masks can be taken off the sum.
With fewer than the threshold the round ends as with too few clients. The protocol is that of
`masks.py`; what is sound about it, and what is not covered, docs/flower.md says.
"""

import logging
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from flwr.app import RecordDict

from feddkd.data.federation import SERVER
from feddkd.engines.interface import Order, Reply
from feddkd.errors import InputError
from feddkd.flower import shares
from feddkd.flower.engine import Flower
from feddkd.flower.masking import (
    Words,
    decode,
    from_groups,
    length,
    pairwise,
    stream,
    total,
    weights,
)
from feddkd.flower.messages import Letter, Page, page_of, page_record
from feddkd.flower.shares import LEAST, name_of, names_of
from feddkd.flower.wire import WireError
from feddkd.method import Collect, Exchange, Phase
from feddkd.methods import parse
from feddkd.tensors import Groups

log = logging.getLogger(__name__)
Found = TypeVar("Found")
SEALED = 1 << 20  # bytes of sealed shares from one client for another, at most


class Agreed(NamedTuple):
    """What the cohort of a round has agreed on."""

    round: tuple[Any, ...] = ()  # (seed, round)
    session: str = ""
    threshold: int = LEAST
    public: Mapping[int, Page] = {}  # client -> its public keys, and by what its seeds are known
    sealed: Mapping[int, Mapping[int, str]] = {}  # member -> receiver -> shares

    def number(self, client: int) -> int:
        """Which share of everybody's secrets a client has."""
        return sorted(self.public).index(client) + 1


@dataclass
class Secure(Flower):
    """An engine over the nodes behind a Grid that gathers sums alone."""

    threshold: float = 2 / 3  # the share of a cohort without which no sum is opened; more than half

    def __post_init__(self) -> None:
        super().__post_init__()
        check_summable(self.experiment, self.threshold)
        self._agreed = Agreed()
        # sealed shares that are still to be passed on
        self._parcels: Mapping[int, Mapping[int, str]] = {}
        self._like: Groups = {}

    def exchange(self, exchange: Exchange, orders: Sequence[Order]) -> list[Reply]:
        # an evaluation, or the server's own work
        if exchange.retain is None or orders[0].cohort == (SERVER,):
            return super().exchange(exchange, orders)
        # uploads are wanted one by one, after a round that went bad: not to be had
        if len(orders) != 1:
            return [Reply(order.cohort, {}, (1, LEAST)) for order in orders]
        (order,) = orders
        self._gather_clients()
        if self._agreed.round != order.key[:2]:
            self._agreed = self._agree(order)
            self._parcels = self._agreed.sealed
        agreed = self._agreed
        there = tuple(
            client for client in order.cohort if client in (agreed.sealed or agreed.public)
        )
        if len(agreed.sealed) < agreed.threshold:
            return [Reply(there, {}, (len(agreed.sealed), agreed.threshold))]
        replies = super().exchange(exchange, [order._replace(cohort=there)])
        self._parcels = {}
        return replies

    # --- a round begins

    def _agree(self, order: Order) -> Agreed:
        session, threshold = (
            secrets.token_hex(8),
            max(LEAST, math.ceil(self.threshold * len(order.cohort) - 1e-9)),
        )
        names = set(names_of(parse(self.experiment["method"]).plan(int(order.key[1]))))
        told: Page = {"session": session, "round": order.key[1]}
        public = self._inquire(
            "keys", dict.fromkeys(order.cohort, told), lambda client, page: _announced(page, names)
        )
        agreed = Agreed(order.key[:2], session, threshold, public)
        if len(public) < threshold:
            return agreed
        told = {"session": session, "threshold": threshold, "public": public}
        dealt = self._inquire(
            "shares",
            dict.fromkeys(public, told),
            lambda client, page: _sealed(page, set(public) - {client}),
        )
        return agreed._replace(sealed=dealt)

    def _inquire(
        self,
        what: str,
        pages: Mapping[int, Page],
        take: Callable[[int, Page], Found],
        enough: int | None = None,
    ) -> dict[int, Found]:
        """Ask clients something besides the exchange; what cannot be used has not been answered."""
        found: dict[int, Found] = {}
        for letter, message in self._post.converse(
            list(self._questions(what, pages)), self.deadline
        ):
            try:
                found[letter.client] = take(letter.client, page_of(message))
            except (WireError, KeyError, TypeError, ValueError, AttributeError) as error:
                log.warning("client %s has not answered query.%s: %s", letter.client, what, error)
            if len(found) == enough:
                break
        return found

    def _questions(self, what: str, pages: Mapping[int, Page]) -> Iterator[Letter]:
        online = self._post.online()
        for client, page in pages.items():
            content = RecordDict(
                {"page": page_record({**self._subject(), "client": client, **page})}
            )
            if self._nodes[client] in online:
                yield Letter(self._nodes[client], client, 0, f"query.{what}", content)

    # --- an exchange

    def _page(self, exchange: Exchange, order: Order, client: int) -> Page:
        page = super()._page(exchange, order, client)
        if exchange.retain is None:
            return page
        parcels = {sender: own[client] for sender, own in self._parcels.items() if sender != client}
        return {
            **page,
            "secure": {"session": self._agreed.session, **({"sealed": parcels} if parcels else {})},
        }

    def _pattern(self, exchange: Exchange, order: Order) -> Groups:
        upload = super()._pattern(exchange, order)
        if exchange.retain is None:
            return upload
        self._like = {group: upload[group] for group in exchange.phase.collect}
        return {"masked": {"words": torch.zeros(length(self._like), dtype=torch.int64)}}

    def _reply(self, exchange: Exchange, order: Order, answers: Mapping[int, Groups]) -> Reply:
        if exchange.retain is None:
            return super()._reply(exchange, order, answers)
        clients, least = (
            tuple(client for client in order.cohort if client in answers),
            self._agreed.threshold,
        )
        if len(clients) < least:
            return Reply(clients, {}, (len(clients), least))
        name = name_of(exchange.index, exchange.step)
        told = self._unmask(name, clients)
        if len(told) < least:
            return Reply(clients, {}, (len(told), least))
        try:
            summed = total(
                [from_groups(answers[client]) for client in clients],
                self._masks(name, clients, told),
            )
        except WireError as error:
            log.warning("the sum of exchange %s cannot be opened: %s", name, error)
            # one of them, or more, has told something wrong
            return Reply(clients, {}, (least - 1, least))
        examples = sum(self._counts[client][exchange.phase.reads.source] for client in clients)
        return Reply(
            clients,
            decode(summed, weights(exchange.phase.collect, examples, len(clients)), self._like),
        )

    def _unmask(self, name: str, clients: Sequence[int]) -> dict[int, dict[int, bytes]]:
        """From as many survivors as it takes, their share of one secret of each member."""
        told: Page = {"session": self._agreed.session, "exchange": name, "survivors": list(clients)}
        return self._inquire(
            "unmask", dict.fromkeys(clients, told), self._told, self._agreed.threshold
        )

    def _told(self, client: int, page: Page) -> dict[int, bytes]:
        found = {int(member): bytes.fromhex(share) for member, share in page["shares"].items()}
        if set(found) != set(self._agreed.sealed):
            raise WireError(
                f"shares of {sorted(found)}, and the members are {sorted(self._agreed.sealed)}"
            )
        for member, share in found.items():
            if shares.number(share) != self._agreed.number(client):
                raise WireError(f"its share of client {member} is not its own")
        return found

    def _masks(
        self, name: str, clients: Sequence[int], told: Mapping[int, Mapping[int, bytes]]
    ) -> Iterator[Words]:
        """All that has to be taken off the sum: the survivors' own masks, and what the others would
        have cancelled.
        """
        size = length(self._like)
        for member, public in self._agreed.public.items():
            if member not in self._agreed.sealed:
                continue
            secret = shares.join([own[member] for own in told.values()])
            if member in clients:
                _check(member, shares.derive(secret, "check"), public["checks"][name])
                yield stream(shares.derive(secret, "mask"), size)
            else:
                _check(member, shares.public(secret), public["keys"][name])
                points = {
                    client: bytes.fromhex(self._agreed.public[client]["keys"][name])
                    for client in clients
                }
                yield -pairwise(
                    member,
                    {client: shares.agree(secret, point) for client, point in points.items()},
                    size,
                )


def check_summable(experiment: Mapping[str, Any], threshold: float) -> None:
    """Whatever needs more than sums is refused before anything is run."""
    if not 0.5 < threshold <= 1:
        raise InputError(
            f"threshold is a share of the cohort, more than a half and at most 1, not {threshold:g}"
        )
    for phase in parse(experiment["method"]).phases:
        if phase.asks_clients and not _is_summed(phase):
            raise InputError(
                f"secure aggregation gives sums alone, and phase {phase.name!r} of"
                f" {experiment['method']} wants each client's upload by itself; methods that"
                " average do not"
            )
    if experiment["diagnostics"]:
        raise InputError(
            "secure aggregation gives sums alone, and diagnostics want each client's numbers by"
            " themselves"
        )
    if experiment["availability"] != "always()":
        raise InputError(
            "availability plays at clients that fail; with secure aggregation only real ones do"
        )
    cohort = experiment["cohort"]
    if (
        size := cohort if isinstance(cohort, int) else int(cohort * experiment["clients"] + 1e-9)
    ) < LEAST:
        raise InputError(
            f"secure aggregation sums over at least {LEAST} clients, and a cohort has {size}"
        )


def _is_summed(phase: Phase) -> bool:
    return not (
        phase.unfolds or phase.parts or phase.every or Collect.EVERY in phase.collect.values()
    )


def _announced(page: Page, names: set[str]) -> Page:
    """Public keys and checks, of every exchange."""
    if set(page["keys"]) != names or set(page["checks"]) != names:
        raise WireError(
            f"keys for the exchanges {sorted(page['keys'])}, and there are {sorted(names)}"
        )
    for point in (page["channel"], *page["keys"].values()):
        shares.check_public(bytes.fromhex(point))
    if any(len(bytes.fromhex(check)) != shares.SECRET for check in page["checks"].values()):
        raise WireError(f"a seed is known by {shares.SECRET} bytes")
    return {"channel": page["channel"], "keys": dict(page["keys"]), "checks": dict(page["checks"])}


def _sealed(page: Page, receivers: set[int]) -> dict[int, str]:
    found = {int(receiver): text for receiver, text in page["sealed"].items()}
    if set(found) != receivers:
        raise WireError(f"shares for {sorted(found)}, and they should be for {sorted(receivers)}")
    if not all(isinstance(text, str) and len(text) <= SEALED for text in found.values()):
        raise WireError(f"shares that are no texts of at most {SEALED:,} bytes")
    return found


def _check(member: int, found: bytes, known: str) -> None:
    if found.hex() != known:
        raise WireError(f"the shares of client {member}'s secret do not give it")
