"""Measure what secure aggregation costs, up to 100 clients: a table of docs/flower.md.

All clients of a round are played here, one after another, by the functions that nodes and server
call; nothing is sent. Seconds are process time of one thread.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

from feddkd.flower import client_masking, opening
from feddkd.flower.masking import from_groups, length, total
from feddkd.flower.messages import ExchangeRequest, FederationFacts, MaskingOrder, PublicKeys
from feddkd.flower.opening import RoundSecrets
from feddkd.flower.wire import NodeMemory, unpack
from feddkd.method import Collect

STEPS = 10  # J
NAMES = ["0-1", *(f"1-{step}" for step in range(1, STEPS + 1))]
Value = TypeVar("Value")


def timed(work: Callable[[], Value]) -> tuple[float, Value]:
    """Return the process time of a computation, and its value."""
    start = time.process_time()
    value = work()
    return time.process_time() - start, value


def row(clients: int, numbers: int, absent: int) -> str:
    """Return a row of the table: a round's start, one masked upload, and one sum that is opened."""
    threshold = -(-2 * clients // 3)
    kept: dict[int, NodeMemory] = {}
    public: dict[int, PublicKeys] = {}
    for client in range(clients):
        public[client], kept[client] = client_masking.begin(client, "s", "digest", 1, NAMES, {})
    size = len(str(public[0].as_json()))
    dealing, (dealt, kept[0]) = timed(
        lambda: client_masking.deal(0, "s", threshold, public, kept[0])
    )
    sealed = {0: dealt.sealed}
    for client in range(1, clients):
        reply, kept[client] = client_masking.deal(client, "s", threshold, public, kept[client])
        sealed[client] = reply.sealed
    up = size + sum(map(len, dealt.sealed.values()))
    down = clients * size + sum(len(sealed[k][0]) for k in range(1, clients))
    upload = {"params": {"w": torch.randn(numbers, generator=torch.Generator().manual_seed(0))}}
    rules, words = {"params": Collect.MEAN_BY_EXAMPLES}, {}
    survivors = list(range(clients - absent))
    for client in survivors:
        parcels = {k: by_receiver[client] for k, by_receiver in sealed.items() if k != client}
        order = MaskingOrder("s", parcels)
        facts = FederationFacts((1,), 2, 1.0)
        request = ExchangeRequest({}, facts, client, (0, 1, 0, 1), "local", "", "", None)

        masked = partial(client_masking.masked, request, order, "digest", rules, 10, upload, {})
        masking, (content, kept[client]) = timed(partial(masked, kept[client]))
        words[client] = from_groups(unpack(content))
    revealed = {}
    for client in survivors[:threshold]:
        told, kept[client] = client_masking.reveal(client, "s", "0-1", survivors, kept[client])
        revealed[client] = {k: bytes.fromhex(share) for k, share in told.shares.items()}
    agreed = RoundSecrets((0, 1), "s", threshold, public, sealed)
    joining, joined = timed(lambda: opening.joined_secrets(agreed, "0-1", survivors, revealed))
    size = length(upload)
    removing, _ = timed(
        lambda: total(words.values(), opening.masks(agreed, "0-1", survivors, joined, size))
    )
    return (
        f"| {clients} | {absent} | {numbers:,} | {dealing:.2f} | {masking:.2f} | {joining:.3f} |"
        f" {removing:.2f} | {up / 1e3:.0f} | {down / 1e3:.0f} |"
    )


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="only show that it works")
    asked = parser.parse_args()
    cases = [(4, 1_000, 0)] if asked.small else [
        (4, 100_000, 0), (10, 100_000, 0), (10, 100_000, 2), (32, 100_000, 0), (32, 100_000, 6),
        (100, 100_000, 0), (100, 100_000, 20),
    ]  # fmt: skip
    for case in cases:
        print(row(*case), flush=True)


if __name__ == "__main__":
    main()
