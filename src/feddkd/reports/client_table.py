"""A table of clients and classes: how a partition divides the examples."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

if TYPE_CHECKING:  # tables need no torch
    from feddkd.data.batches import Indices


def drawing(held: "Indices", classes: Sequence[str], width: int) -> Table:
    """Return a table of clients and classes with the numbers of examples, in shades if the numbers
    are wider than `width`.
    """
    numbers = [[str(count) if count else "·" for count in row] for row in held]
    widths = [max(map(len, column)) for column in zip(classes, *numbers, strict=True)]
    fits = len("client examples ") + sum(widths) + len(widths) <= width
    short_names = max(map(len, classes)) == 1
    headings = classes if fits else ["".join(classes) if short_names else "classes"]
    drawn = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    for heading in ("client", "examples", *headings):
        drawn.add_column(heading, justify="right" if fits else "left", overflow="fold")
    most = held.max()
    for client, row in enumerate(held):
        shades = ["·▁▂▃▄▅▆▇█"[-(-8 * count // most)] for count in row.tolist()]
        cells = numbers[client] if fits else ["".join(shades)]
        drawn.add_row(str(client), str(row.sum()), *cells)
    if not fits:
        drawn.caption = f"one sign for each class, in order; █ is {most} examples, · none"
    return drawn
