"""Flower with secure aggregation: clients mask their uploads, and the server learns only sums.

A round begins with two more queries to the cohort, for public keys and for encrypted shares, which
the server passes on. Each exchange ends with one more query, to the clients whose uploads came:
they reveal enough shares of their seeds, and of the keys of the clients that stopped answering, to
remove the masks from the sum. With fewer clients than the threshold the round ends as with too few
clients. The protocol is in `masking.py` and `client_masking.py`; docs/flower.md says what is secure
about it and which attacks it does not prevent.
"""

import logging
import math
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from flwr.app import RecordDict

from feddkd.data.federation import SERVER
from feddkd.engines.interface import Order, Reply
from feddkd.flower import shamir, shares
from feddkd.flower.engine import Flower
from feddkd.flower.masking import (
    decode,
    from_groups,
    length,
    total,
    weights,
)
from feddkd.flower.messages import (
    ExchangeRequest,
    KeysRequest,
    MaskingOrder,
    NodeRequest,
    PublicKeys,
    RevealedShares,
    SealedShares,
    SharesRequest,
    UnmaskRequest,
)
from feddkd.flower.opening import Revealed, RoundSecrets, joined_secrets, masks
from feddkd.flower.shares import LEAST, name_of, names_of
from feddkd.flower.summable import check_summable
from feddkd.flower.transport import BlamelessError, Outgoing, json_in, message_record
from feddkd.flower.wire import WireError, printable
from feddkd.method import Exchange
from feddkd.methods import parse
from feddkd.tensors import Groups

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")
MOST_SEALED = 1 << 20  # bytes of encrypted shares from one client for another


@dataclass
class Secure(Flower):
    """An engine over the nodes behind a Grid that gathers only sums."""

    # a sum needs this fraction of the cohort; more than half
    threshold: float = 2 / 3

    def __post_init__(self) -> None:
        super().__post_init__()
        check_summable(self.experiment, self.threshold)
        self._secrets = RoundSecrets()
        # sealed shares that the server has not passed on yet
        self._undelivered: Mapping[int, Mapping[int, str]] = {}
        self._like: Groups = {}
        self._complaints: dict[int, set[int]] = {}  # dealer -> who cannot open its shares

    def exchange(self, exchange: Exchange, orders: Sequence[Order]) -> list[Reply]:
        """Perform one exchange; in training the reply holds the means of masked uploads."""
        evaluation = exchange.retain is None
        if evaluation or orders[0].cohort == (SERVER,):
            return super().exchange(exchange, orders)
        if len(orders) != 1:  # after a bad round the uploads are asked for one by one: refused
            return [Reply(order.cohort, {}, (1, LEAST)) for order in orders]
        (order,) = orders
        self._gather_clients()
        self._held.begin_round(order)
        if self._secrets.round != order.key[:2]:
            self._secrets = self._begin_secure_round(order)
            self._undelivered = self._secrets.sealed
        agreed = self._secrets
        members = agreed.sealed or agreed.public
        cohort = tuple(client for client in order.cohort if client in members)
        if len(agreed.sealed) < agreed.threshold:
            short = Reply(cohort, {}, (len(agreed.sealed), agreed.threshold))
            return self._unless_nobody([short])
        self._complaints = {}
        replies = super().exchange(exchange, [order._replace(cohort=cohort)])
        self._undelivered = {}
        self._blame_dealers()
        return replies

    @property
    def _fewest(self) -> int:
        return self._secrets.threshold

    def _note_complaint(self, client: int, dealers: Sequence[int]) -> None:
        for dealer in dealers:
            self._complaints.setdefault(dealer, set()).add(client)

    def _blame_dealers(self) -> None:
        """Put aside who has kept a sum closed by shares that the others cannot open."""
        needless = len(self._secrets.sealed) - self._secrets.threshold
        for dealer, clients in self._complaints.items():
            if dealer in self._secrets.sealed and len(clients) > needless:
                node, why = self._roster.nodes[dealer], "has sent shares that others cannot open"
                self._roster.conduct.put_aside(node, self._held.round, why)

    # --- the beginning of a round

    def _begin_secure_round(self, order: Order) -> RoundSecrets:
        """Collect public keys and encrypted shares from the cohort."""
        session, number = secrets.token_hex(8), int(order.key[1])
        threshold = max(LEAST, math.ceil(self.threshold * len(order.cohort) - 1e-9))
        names = set(names_of(parse(self.experiment["method"]).plan(number)))
        public = self._query(
            "keys",
            {client: KeysRequest(*self._base, client, session, number) for client in order.cohort},
            lambda client, content: _checked_keys(PublicKeys.read(content), names),
            number,
        )
        agreed = RoundSecrets(order.key[:2], session, threshold, public)
        if len(public) < threshold:
            return agreed
        sealed = self._query(
            "shares",
            {
                client: SharesRequest(*self._base, client, session, threshold, public)
                for client in public
            },
            lambda client, content: _checked_shares(
                SealedShares.read(content), set(public) - {client}
            ),
            number,
        )
        return agreed._replace(sealed=sealed)

    def _query(
        self,
        query: str,
        requests: Mapping[int, NodeRequest],
        read: Callable[[int, object], Answer],
        round: int,
        enough: int | None = None,
    ) -> dict[int, Answer]:
        """Send a query to clients and return what `read` makes of their replies.

        A reply that cannot be used counts as no answer. Stop when `enough` clients have answered.
        """
        answers: dict[int, Answer] = {}
        outgoing = list(self._queries(query, requests, round))
        silent = {asked.node for asked in outgoing}
        for asked, message in self._transport.send(outgoing, self.deadline):
            silent.discard(asked.node)
            try:
                answers[asked.client] = read(asked.client, json_in(message))
            except Exception as error:  # whatever a node sends, it is that node's fault
                why = printable(error)
                log.warning("client %s has not answered query.%s: %s", asked.client, query, why)
                if not isinstance(error, BlamelessError):
                    self._roster.conduct.failed(asked.node, round)
            if len(answers) == enough:
                return answers
        for node in silent:
            self._roster.conduct.failed(node, round)
        return answers

    def _queries(
        self, query: str, requests: Mapping[int, NodeRequest], round: int
    ) -> Iterator[Outgoing]:
        """Yield the messages to the clients whose nodes are online and not put aside."""
        online = self._transport.online_nodes()
        for client, request in requests.items():
            node, content = self._roster.nodes.get(client), message_record(request)
            if node in online and not self._roster.conduct.is_aside(node, round):
                yield Outgoing(node, client, 0, f"query.{query}", RecordDict({"page": content}))

    # --- an exchange

    def _request(self, exchange: Exchange, order: Order, client: int) -> ExchangeRequest:
        request = super()._request(exchange, order, client)
        if exchange.retain is None:
            return request
        sealed = {
            sender: by_receiver[client]
            for sender, by_receiver in self._undelivered.items()
            if sender != client
        }
        return replace(request, secure=MaskingOrder(self._secrets.session, sealed or None))

    def _pattern(self, exchange: Exchange, order: Order) -> Groups:
        upload = super()._pattern(exchange, order)
        if exchange.retain is None:
            return upload
        self._like = {group: upload[group] for group in exchange.phase.collect}
        return {"masked": {"words": torch.zeros(length(self._like), dtype=torch.int64)}}

    def _reply(self, exchange: Exchange, order: Order, uploads: Mapping[int, Groups]) -> Reply:
        if exchange.retain is None:
            return super()._reply(exchange, order, uploads)
        clients = tuple(client for client in order.cohort if client in uploads)
        least = self._secrets.threshold
        if len(clients) < least:
            return Reply(clients, {}, (len(clients), least))
        name = name_of(exchange.index, exchange.step)
        revealed = self._unmask(name, clients, least)
        if len(revealed) < least:
            return Reply(clients, {}, (len(revealed), least))
        joined: dict[int, bytes] | None
        try:
            joined = joined_secrets(self._secrets, name, clients, revealed)
        except WireError as error:
            log.warning("cannot remove the masks from the sum of exchange %s: %s", name, error)
            joined = self._without_wrong_shares(name, clients)
        if joined is None:
            return Reply(clients, {}, (least - 1, least))
        words = [from_groups(uploads[client]) for client in clients]
        summed = total(words, masks(self._secrets, name, clients, joined, length(self._like)))
        examples = sum(self._weight(client, exchange.phase.reads.source) for client in clients)
        weight = weights(exchange.phase.collect, examples, len(clients))
        return Reply(clients, decode(summed, weight, self._like))

    def _unmask(self, name: str, clients: Sequence[int], enough: int | None) -> Revealed:
        """Ask the clients of a sum for their share of one secret of each member.

        Stop when `enough` have answered.
        """
        session = self._secrets.session
        requests = {
            client: UnmaskRequest(*self._base, client, session, name, tuple(clients))
            for client in clients
        }
        number = int(self._secrets.round[1])
        return self._query("unmask", requests, self._checked_revealed, number, enough)

    def _without_wrong_shares(self, name: str, clients: Sequence[int]) -> dict[int, bytes] | None:
        """Return the members' secrets without the shares of one client; None if that does not help.

        The client whose shares are wrong has failed.
        """
        revealed = self._unmask(name, clients, None)
        for wrong in (None, *revealed):
            rest = {client: told for client, told in revealed.items() if client != wrong}
            if len(rest) < self._secrets.threshold:
                return None
            with suppress(WireError):
                joined = joined_secrets(self._secrets, name, clients, rest)
                if wrong is not None:
                    log.warning("the shares of client %s are wrong; the others suffice", wrong)
                    node, number = self._roster.nodes[wrong], int(self._secrets.round[1])
                    self._roster.conduct.failed(node, number)
                return joined
        return None

    def _checked_revealed(self, client: int, content: object) -> dict[int, bytes]:
        """Return a client's shares if there is one of each member, made for this client."""
        texts = RevealedShares.read(content).shares
        revealed = {member: bytes.fromhex(share) for member, share in texts.items()}
        if set(revealed) != set(self._secrets.sealed):
            raise WireError(
                f"it reveals shares of {sorted(revealed)}; the members are"
                f" {sorted(self._secrets.sealed)}"
            )
        for member, share in revealed.items():
            if shamir.number(share) != self._secrets.number(client):
                raise WireError(f"its share of client {member} was made for another client")
        return revealed


def _checked_keys(public: PublicKeys, names: set[str]) -> PublicKeys:
    """Return a client's public keys if there is a valid one for every exchange."""
    if set(public.keys) != names or set(public.checks) != names:
        raise WireError(f"it has keys for the exchanges {sorted(public.keys)}, not {sorted(names)}")
    for point in (public.channel, *public.keys.values()):
        shares.check_public(bytes.fromhex(point))
    if any(len(bytes.fromhex(check)) != shamir.SECRET for check in public.checks.values()):
        raise WireError(f"the check of a seed must have {shamir.SECRET} bytes")
    return public


def _checked_shares(reply: SealedShares, receivers: set[int]) -> Mapping[int, str]:
    """Return a client's encrypted shares if there is one for every receiver."""
    if set(reply.sealed) != receivers:
        raise WireError(f"it has shares for {sorted(reply.sealed)}, not {sorted(receivers)}")
    if any(len(text) > MOST_SEALED for text in reply.sealed.values()):
        raise WireError(f"its shares for one client have more than {MOST_SEALED:,} bytes")
    return reply.sealed
