"""The messages between the server and the nodes: one class for each kind, read from JSON and
written as JSON.

The server sends a request and the node sends a reply:

    query.info                NodeRequest      NodeInfo
    query.keys                KeysRequest      PublicKeys
    query.shares              SharesRequest    SealedShares
    query.unmask              UnmaskRequest    RevealedShares
    train.<phase>, evaluate   ExchangeRequest  ExchangeReply

The tensors of an exchange travel beside these messages: see `wire`. The queries about keys, shares
and masks belong to secure aggregation: see `secure`.
"""

import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Self

from feddkd.flower.wire import WireError
from feddkd.randomness import Key


@dataclass(frozen=True)
class WireMessage:
    """A message whose declared fields are the fields of its JSON object.

    A field with a default is left out of the JSON while it has that default.
    """

    @classmethod
    def read(cls, content: object) -> Self:
        """Return the message in a JSON object, or raise WireError that names the wrong field."""
        if not isinstance(content, dict):
            raise WireError(f"{cls.__name__} must be a JSON object, not {_shown(content)}")
        declared = {field.name: field for field in fields(cls)}
        for name in content:
            if name not in declared:
                raise WireError(
                    f"{cls.__name__} has an unknown field {name!r:.100}; the fields are"
                    f" {', '.join(declared)}"
                )
        for name, field in declared.items():
            if name not in content and field.default is MISSING:
                raise WireError(f"{cls.__name__} has no field {name!r}")
        return cls(**{name: cls._value(name, content[name]) for name in content})

    @classmethod
    def _value(cls, name: str, value: object) -> Any:
        try:
            return _converted(typing.get_type_hints(cls)[name], value)
        except TypeError as error:
            raise WireError(f"field {name!r} of {cls.__name__} {error}") from None

    def as_json(self) -> dict[str, Any]:
        """Return the message as a JSON object."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        defaults = {field.name: field.default for field in fields(self)}
        return {name: _plain(value) for name, value in values.items() if value != defaults[name]}


_NAMES = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    tuple: "a list",
    Mapping: "an object",
    types.NoneType: "null",
}


def _converted(kind: Any, value: Any) -> Any:
    """Return a JSON value as the declared type, or raise TypeError if it is of another type."""
    if kind is Any:
        return value
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return _first_fitting(arguments, value)
    if origin is tuple and isinstance(value, list):
        return tuple(_converted(arguments[0], part) for part in value)
    if origin is Mapping and isinstance(value, dict):
        key_kind, value_kind = arguments
        return {_key(key_kind, key): _converted(value_kind, part) for key, part in value.items()}
    if origin is None and issubclass(kind, WireMessage):
        return kind.read(value)
    if kind is float and type(value) is int:
        return float(value)
    if origin is None and type(value) is kind:  # not isinstance: True is no whole number
        return value
    raise TypeError(f"must be {_NAMES.get(origin or kind, kind)}, not {_shown(value)}")


def _first_fitting(kinds: tuple[Any, ...], value: Any) -> Any:
    reasons = []
    for kind in kinds:
        try:
            return _converted(kind, value)
        except TypeError as error:
            reasons.append(str(error))
    raise TypeError(reasons[0])


def _key(kind: Any, text: str) -> Any:
    """Return an object's key; the numbers of clients are texts in JSON."""
    if kind is str:
        return text
    if not text.isascii() or not text.isdecimal() or len(text) > 18 or str(int(text)) != text:
        raise TypeError(f"must have the numbers of clients as keys, not {text!r:.100}")
    return int(text)


def _shown(value: object) -> str:
    """Return a short text for a value that may be large."""
    return type(value).__name__ if isinstance(value, list | dict) else f"{value!r:.100}"


def _plain(value: Any) -> Any:
    if isinstance(value, WireMessage):
        return value.as_json()
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return list(value) if isinstance(value, tuple) else value


# --- from the server to a node


@dataclass(frozen=True)
class FederationFacts(WireMessage):
    """The facts that a node with its own examples must know about the federation's data."""

    shape: tuple[int, ...]  # of one example; of its first tensor if it has several
    classes: int
    scale: float  # the largest value of a stored pixel


@dataclass(frozen=True)
class NodeRequest(WireMessage):
    """The part that all requests share; alone, it asks a node which clients it has."""

    experiment: Mapping[str, Any]  # the keys of the experiment's TOML file
    facts: FederationFacts


@dataclass(frozen=True)
class KeysRequest(NodeRequest):
    """Asks a client for new public keys for the exchanges of a round."""

    client: int
    session: str  # names one attempt of a round
    round: int


@dataclass(frozen=True)
class PublicKeys(WireMessage):
    """A client's public keys of a round, and the checks of its seeds, all in hexadecimal."""

    channel: str  # for the shares that two clients send each other
    keys: Mapping[str, str]  # by exchange
    checks: Mapping[str, str]  # by exchange; derived from the seed
    signer: str | None = None  # the sha256 of the node's own public key
    signature: str | None = None  # by that key


@dataclass(frozen=True)
class SharesRequest(NodeRequest):
    """Asks a client for shares of its secrets, one for every member of the round."""

    client: int
    session: str
    threshold: int
    public: Mapping[int, PublicKeys]  # by member


@dataclass(frozen=True)
class UnmaskRequest(NodeRequest):
    """Asks a client for its shares that remove the masks from one sum."""

    client: int
    session: str
    exchange: str
    survivors: tuple[int, ...]  # the clients whose uploads are in the sum


@dataclass(frozen=True)
class MaskingOrder(WireMessage):
    """The part of an ExchangeRequest that asks for a masked upload."""

    session: str
    sealed: Mapping[int, str] | None = (
        None  # the other members' shares, in a round's first exchange
    )


@dataclass(frozen=True)
class ExchangeRequest(NodeRequest):
    """Asks a client for its part in one exchange."""

    client: int
    key: Key  # of the exchange: (seed, round, phase, step), or a word for an evaluation
    phase: str
    expects: str  # the tag of the tensors that the client should hold
    before: str  # the tag of the tensors that it held when the round began
    retain: tuple[str, ...] | None  # groups to keep afterwards; null: nothing changes
    secure: MaskingOrder | None = None


# --- from a node to the server


@dataclass(frozen=True)
class ClientInfo(WireMessage):
    """The sizes of a client's data sets, the tags of the tensors that it holds, and its weights."""

    counts: Mapping[str, int]
    held: tuple[str, ...]
    weights: Mapping[str, int] | None = None  # in means; null: the sizes


@dataclass(frozen=True)
class NodeInfo(WireMessage):
    """The clients of a node."""

    clients: Mapping[int, ClientInfo]


@dataclass(frozen=True)
class ExchangeReply(WireMessage):
    """The outcome of an exchange: the tag of the tensors that the client holds now, or `lost`: it
    does not hold the tensors that the server expects, so it has computed nothing; or the clients
    whose shares it cannot open.
    """

    client: int
    held: str | None = None
    lost: bool = False
    bad_shares: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.held is None and not self.lost and not self.bad_shares:
            raise WireError("ExchangeReply has neither field 'held' nor field 'lost'")


@dataclass(frozen=True)
class SealedShares(WireMessage):
    """Shares of a client's secrets, encrypted for each of the other members."""

    sealed: Mapping[int, str]


@dataclass(frozen=True)
class RevealedShares(WireMessage):
    """For each member the client's share of one of its secrets, in hexadecimal."""

    shares: Mapping[int, str]
