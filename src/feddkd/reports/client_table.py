"""A table of clients and classes: how a partition divides the examples."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.table import Table

if TYPE_CHECKING:  # tables need no torch
    from feddkd.data.batches import Indices


def drawing(
    held: "Indices", classes: Sequence[str], width: int, notes: Sequence[str] = ()
) -> Table:
    """Return a table of clients and classes with the numbers of examples, in shades if the numbers
    are wider than `width`. `notes` has a note for each client, or is empty.
    """
    numbers = [[str(count) if count else "·" for count in row] for row in held]
    widths = [max(map(len, column)) for column in zip(classes, *numbers, strict=True)]
    fits = len("client examples ") + sum(widths) + len(widths) <= width and len(classes) > 1
    short_names = max(map(len, classes)) == 1
    headings = classes if fits else ["".join(classes) if short_names else "classes"]
    if len(classes) == 1:
        headings = [""]
    drawn = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    for heading in ("client", "examples", *headings):
        drawn.add_column(heading, justify="right" if fits else "left", overflow="fold")
    if notes:
        drawn.add_column("  what is changed", overflow="fold")
    most = held.max()
    for client, row in enumerate(held):
        cells = numbers[client] if fits else [_picture(row.tolist(), most)]
        note = [f"  {notes[client]}"] if notes else []
        drawn.add_row(str(client), str(row.sum()), *cells, *note)
    if not fits and len(classes) > 1:
        drawn.caption = f"one sign for each class, in order; █ is {most} examples, · none"
    return drawn


def _picture(counts: Sequence[int], most: int) -> str:
    """Return a sign for each number, or a bar if there is only one."""
    if len(counts) == 1:
        return "█" * -(-40 * counts[0] // max(most, 1))
    return "".join("·▁▂▃▄▅▆▇█"[-(-8 * count // most)] for count in counts)
