"""Run the examples of all tasks and write their tables: docs/tasks-table.md, from docs/tasks-table.json.

    python tools/measure/tasks.py [--runs build/tasks]

Finished runs in the folder are not run again.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from feddkd import run
from feddkd.experiment import load
from feddkd.reports.tables import caption, grid
from feddkd.runs.record import find

ROOT = Path(__file__).parents[2]
DOCS, EXAMPLES = ROOT / "docs", ROOT / "examples" / "tasks"
TRANSFORMER = "model=examples/tasks/language.py:transformer"
# title -> (TOML file, settings)
TABLES: dict[str, tuple[str, list[str]]] = {
    "Regression: diabetes": ("regression.toml", []),
    "Binary: tumours": ("binary.toml", []),
    "Several labels: pairs of digits": ("multilabel.toml", []),
    "Segmentation: discs and squares": ("segmentation.toml", []),
    "Language: texts of a grammar, LSTM": ("language.toml", []),
    "Language: texts of a grammar, Transformer": ("language.toml", [TRANSFORMER]),
}


def measured(title: str, runs: Path) -> dict[str, Any]:
    """Run an example and return its table."""
    name, settings = TABLES[title]
    folder = runs / title.replace(":", "").replace(",", "").replace(" ", "-").lower()
    run(load(EXAMPLES / name, settings), out=folder)
    records = find(folder)
    heads, lines = grid(records)
    toml = f"examples/tasks/{name}"
    command = " ".join(["feddkd run", toml, *(f'--set "{setting}"' for setting in settings)])
    found = {"title": title, "command": command, "heads": heads, "lines": lines}
    return {**found, "caption": caption(records)}


def page(tables: list[dict[str, Any]]) -> str:
    """Return the page with all tables."""
    parts = [
        "# Every task, side by side\n\nFedDKD, FedAvg, local training alone and centralised training"
        " on one small example of each [task](tasks.md), three seeds, on a CPU. These are examples of"
        " how to run a task, too small to compare methods by. `python tools/measure/tasks.py` writes"
        " this page from docs/tasks-table.json.\n"
    ]
    for table in tables:
        rule = ["---"] * len(table["heads"])
        rows = [
            "| " + " | ".join(cells) + " |" for cells in (table["heads"], rule, *table["lines"])
        ]
        rows = [row.replace("fedavg | dkd", r"fedavg \| dkd") for row in rows]
        command = f"`{table['command']}`:"
        note = [f"* {line}" for line in table["caption"]]
        text = "\n".join([f"## {table['title']}", "", command, "", *rows, "", *note])
        parts.append(text + "\n")
    return "\n".join(parts)


def main() -> None:
    """Run the examples that are not finished, and write the record and the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=Path("build/tasks"))
    runs = parser.parse_args().runs
    tables = [measured(title, runs) for title in TABLES]
    (DOCS / "tasks-table.json").write_text(json.dumps(tables, indent=1, ensure_ascii=False) + "\n")
    (DOCS / "tasks-table.md").write_text(page(tables))


if __name__ == "__main__":
    main()
