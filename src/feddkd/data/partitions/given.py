"""Partitions that draw nothing: the division is in a file, or clients bring their examples."""

from pathlib import Path
from typing import Annotated

import numpy as np

from feddkd.data.partitions.pools import Lists
from feddkd.data.partitions.registry import PARTITIONS, Partition, Table
from feddkd.data.partitions.split import Split
from feddkd.randomness import Key
from feddkd.spec.types import LATER


@PARTITIONS.register
def elsewhere(tests: Annotated[bool, LATER] = False) -> Partition:
    """Divide nothing: in a federation of Flower nodes every client has its own examples.

    With `tests`, every client also has its own test examples, and the model is judged on them.
    """

    def draw(table: Table, clients: int, key: Key) -> tuple[Lists, None]:
        return [np.arange(0)] * clients, None

    return Partition(draw, "each client's own", own_tests=tests, elsewhere=True)


@PARTITIONS.register
def saved(path: str) -> Partition:
    """Read the split from a file that `Split.save` wrote.

    In digests it has the name of its lists, and not of its file.
    """
    split = Split.load(Path(path))

    def draw(table: Table, clients: int, key: Key) -> tuple[Lists, Lists | None]:
        return split.train, split.test

    identity, own_tests = f"saved(digest={split.digest!r})", split.test is not None
    summary, validation = "read from a file", split.validation
    return Partition(
        draw,
        summary,
        own_tests=own_tests,
        identity=identity,
        fixed=True,
        validation=validation,
    )
