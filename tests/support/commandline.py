"""The command line, called in this process."""

from collections.abc import Callable
from typing import NamedTuple

TINY = """
method = "fedavg(epochs=1, batch_size=32) | dkd(steps=1)"
partition = "classes(per_client=2)"
model = "mlp(hidden='8')"
clients = 5
rounds = 2
"""


class Done(NamedTuple):
    status: int
    out: str
    err: str


Feddkd = Callable[..., Done]
