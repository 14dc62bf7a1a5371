"""A table compared with the printed one: cells, the order of the methods, statistical tests."""

from dataclasses import dataclass
from functools import cached_property

from feddkd.papers.cells import Cell, MethodOrder, cells, orders
from feddkd.papers.definitions import Definition, Paper
from feddkd.papers.results import Runs
from feddkd.reports.statistics import Paired, Spread, paired, spread


@dataclass(frozen=True)
class Comparison:
    """A table compared with print: its cells, the order of the methods, and statistical tests."""

    table: Definition
    cells: list[Cell]
    begun: bool = False  # show only cells that have runs

    @property
    def shown(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.readings or not self.begun]

    @cached_property
    def orders(self) -> list[MethodOrder]:
        return orders(self.table, self.cells)

    @cached_property
    def spreads(self) -> list[tuple[Cell, Spread]]:
        return [
            (cell, spread(list(cell.by_seed.values()))) for cell in self._tested if cell.by_seed
        ]

    @cached_property
    def tests(self) -> list[tuple[Cell, Paired]]:
        """The lead method against each other method of its columns.

        Methods that are only the first rounds of longer runs are left out.
        """
        leads = {
            self._column(cell): cell
            for cell in self._tested
            if cell.place.method == self.table.lead
        }
        names = set(self.table.whole) - {self.table.lead}
        others = [
            cell
            for cell in self._tested
            if cell.place.method in names and self._column(cell) in leads
        ]
        made = [(cell, paired(leads[self._column(cell)].by_seed, cell.by_seed)) for cell in others]
        return [(cell, test) for cell, test in made if test is not None]

    def behind(self, cell: Cell) -> list[str]:
        """Return the methods that the lead is better than in print, but not in our runs.

        The list is empty for the cells of other methods.
        """
        behind = []
        for order in self.orders:
            if (order.setting, order.quantity) == self._column(cell):
                for first, second in order.swapped:
                    if first == cell.place.method == self.table.lead:
                        behind.append(second)
        return behind

    @property
    def _tested(self) -> list[Cell]:
        return [cell for cell in self.cells if cell.place.quantity in self.table.tested]

    @staticmethod
    def _column(cell: Cell) -> tuple[str, str]:
        return cell.place.setting, cell.place.quantity


def compare(paper: Paper, name: str, runs: Runs, *, begun: bool = False) -> Comparison:
    """Return the comparison of a table with print."""
    table = paper.table(name)
    return Comparison(table, cells(paper, table, runs), begun)
