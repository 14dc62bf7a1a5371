"""Arrivals of clients at a server that does not wait for a whole cohort.

There is no clock: in a round every client of the cohort arrives once, in an order that is drawn by
key. The delay of a client is the number of arrivals since its last one, its own included. The
ledger is the group of the server's state that notes this.
"""

import torch
from torch import Tensor

from feddkd.method import World
from feddkd.randomness import fold, generator
from feddkd.tensors import Tensors


def open_ledger(world: World) -> dict[str, Tensor]:
    """Return the ledger before the first arrival."""
    none = torch.zeros(world.clients, dtype=torch.int64)
    return {
        "key": torch.tensor(fold(("arrivals", *world.key))),
        "round": torch.tensor(0),
        "now": torch.tensor(0),  # number of arrivals so far
        "received": none,  # its value when a client received its model
        "delays": none,  # sum of a client's delays
        "arrivals": none,  # number of them
        "examples": none.double(),  # of a client; 0: not known yet
    }


def note_arrivals(ledger: Tensors, rates: Tensors) -> tuple[list[int], dict[str, Tensor]]:
    """Return the order in which the answering clients arrive, and the ledger afterwards."""
    key = ("arrivals", int(ledger["key"]), int(ledger["round"]))
    order = generator(key).permutation(len(rates["clients"])).tolist()
    clients = rates["clients"].to(ledger["now"].device)[order]
    examples = rates["examples"].to(ledger["examples"])[order]
    numbers = ledger["now"] + 1 + torch.arange(len(order), device=clients.device)
    delays = numbers - ledger["received"][clients]
    return order, {
        **ledger,
        "round": ledger["round"] + 1,
        "now": numbers[-1],
        "received": ledger["received"].index_copy(0, clients, numbers),
        "delays": ledger["delays"].index_add(0, clients, delays),
        "arrivals": ledger["arrivals"].index_add(0, clients, torch.ones_like(clients)),
        "examples": ledger["examples"].index_copy(0, clients, examples),
    }


def mean_delays(ledger: Tensors) -> Tensor:
    """Return the mean delay of each client, 0 before its first arrival."""
    return ledger["delays"].double() / ledger["arrivals"].clamp(min=1)


def shares(ledger: Tensors) -> Tensor:
    """Return n_k/N of each client; those not heard from count as the mean of the others in N."""
    examples = ledger["examples"]
    return examples / (examples.sum() * len(examples) / (examples > 0).sum())
