"""The node's part of a federation, without Flower: it reads a request and returns the reply.

A request names the experiment, the client, the exchange's key and the tag of the tensors that the
client should hold. Every node has the method's code; no code comes with a message.
"""

from collections.abc import Mapping

from feddkd.engines.client import retained
from feddkd.engines.interface import purpose_of
from feddkd.flower.messages import (
    ClientInfo,
    ExchangeReply,
    ExchangeRequest,
    KeysRequest,
    NodeInfo,
    NodeRequest,
    SharesRequest,
    UnmaskRequest,
    WireMessage,
)
from feddkd.flower.node_data import NodeConfig
from feddkd.flower.node_experiment import NodeExperiment, open_experiment
from feddkd.flower.sent_experiment import SentExperiment
from feddkd.flower.wire import FIRST, NOTHING, NodeMemory, WireError, pack, unpack
from feddkd.tensors import Groups

SecretRequest = KeysRequest | SharesRequest | UnmaskRequest
SECRET_QUERIES: dict[str, type[SecretRequest]] = {
    "keys": KeysRequest,
    "shares": SharesRequest,
    "unmask": UnmaskRequest,
}


def describe(config: NodeConfig, request: NodeRequest, memory: NodeMemory) -> NodeInfo:
    """Return the node's clients with the sizes of their data sets and the tags that they hold."""
    opened = open_experiment(config, request)
    return NodeInfo(
        {
            client: ClientInfo(
                opened.counts(client), (NOTHING, *_held(memory, client)), opened.weights(client)
            )
            for client in config.clients(opened.experiment)
        }
    )


def ask(
    config: NodeConfig, query: str, content: object, memory: NodeMemory
) -> tuple[WireMessage, NodeMemory]:
    """Answer a query, a request that is no part of an exchange: return (reply, memory)."""
    if query == "info":
        return describe(config, NodeRequest.read(content), memory), memory
    if query not in SECRET_QUERIES:
        raise WireError(f"unknown query {query!r}; there are: info, {', '.join(SECRET_QUERIES)}")
    request = SECRET_QUERIES[query].read(content)
    sent = config.read(request.experiment)
    config.check(request.client, sent.experiment)
    return _answer_of_secrets(config, request, sent, memory)


def _answer_of_secrets(
    config: NodeConfig, request: SecretRequest, sent: SentExperiment, memory: NodeMemory
) -> tuple[WireMessage, NodeMemory]:
    """Answer a query of secure aggregation."""
    from feddkd.flower import client_masking, shares  # they need flwr

    client, session = request.client, request.session
    keys = client_masking.NodeKeys(config.key, config.peers)
    match request:
        case KeysRequest():
            # The plan need not fit the network: methods whose plan depends on it are not summed.
            names = shares.names_of(sent.experiment.parsed_method.plan(request.round))
            return client_masking.begin(
                client, session, sent.name, request.round, names, memory, keys
            )
        case SharesRequest():
            return client_masking.deal(
                client, session, request.threshold, request.public, memory, keys, config.least
            )
        case UnmaskRequest():
            return client_masking.reveal(
                client, session, request.exchange, request.survivors, memory
            )


def respond(
    config: NodeConfig, request: ExchangeRequest, sent: bytes, memory: NodeMemory
) -> tuple[ExchangeReply, bytes, NodeMemory]:
    """Do one client's part in one exchange: return (reply, packed upload, memory).

    The tensors that the client held before are kept until the server names their successors, so a
    reply that is lost or late changes nothing. Those that it held when the round began are kept as
    long as the round, because the server may have to play the round again.
    """
    client, expected = request.client, request.expects
    opened, held = open_experiment(config, request), _held(memory, client)
    config.check(client, opened.experiment)
    evaluating = purpose_of(request.key) == "evaluate"
    if config.secure and not evaluating and request.secure is None:
        raise WireError(
            "this node uploads nothing that is not masked, and the server did not ask for masks;"
            " start the server with --secure"
        )
    if expected not in (FIRST, NOTHING, *held):
        return ExchangeReply(client, lost=True), b"", memory
    memo = opened.here(_memo(opened, client, expected, held))
    received = opened.here(unpack(sent))
    upload, after = opened.answer(request, received, memo)
    if request.secure is None:
        content = pack(upload)
    else:
        from feddkd.flower.client_masking import BadSharesError

        try:
            content, memory = opened.masked(request, request.secure, upload, received, memory)
        except BadSharesError as error:
            return ExchangeReply(client, bad_shares=error.dealers), b"", memory
    if request.retain is None:
        return ExchangeReply(client, expected), content, memory
    after = retained(after, frozenset(request.retain))
    tag = _tag(opened, request, memo, after)
    kept = {name: held[name] for name in (expected, request.before) if name in held}
    if tag not in (NOTHING, expected):
        kept[tag] = pack(after)
    return ExchangeReply(client, tag), content, _with_held(memory, client, kept)


def _memo(opened: NodeExperiment, client: int, tag: str, held: Mapping[str, bytes]) -> Groups:
    """Return the tensors of a client with this tag."""
    if tag == FIRST:
        return opened.malicious.get(client, opened.first)
    return {} if tag == NOTHING else unpack(held[tag])


def _tag(opened: NodeExperiment, request: ExchangeRequest, before: Groups, after: Groups) -> str:
    """Return a tag for a client's tensors after an exchange; a new one if they have changed."""
    if not after:
        return NOTHING
    if request.expects != FIRST and _identity(before) == _identity(after):
        return request.expects
    return "-".join([opened.name, *map(str, request.key)])


def _identity(groups: Groups) -> dict[str, dict[str, int]]:
    return {
        group: {name: id(tensor) for name, tensor in tensors.items()}
        for group, tensors in groups.items()
    }


def _held(memory: NodeMemory, client: int) -> dict[str, bytes]:
    """Return the tensors that one of the node's clients holds, by tag."""
    prefix = f"{client}:"
    return {
        name.removeprefix(prefix): content
        for name, content in memory.items()
        if name.startswith(prefix)
    }


def _with_held(memory: NodeMemory, client: int, held: Mapping[str, bytes]) -> NodeMemory:
    """Return the node's memory after one of its clients holds these tensors and no others."""
    prefix = f"{client}:"
    others = {name: content for name, content in memory.items() if not name.startswith(prefix)}
    return {**others, **{f"{prefix}{tag}": content for tag, content in held.items()}}
