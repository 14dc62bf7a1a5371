"""Writes the skeleton of a paper's folder: an experiment, a table, printed cells, a README."""

from pathlib import Path

from feddkd.errors import InputError

EXPERIMENT = """# The experiments of a table: one run for each combination under [sweep].
# docs/experiments.md has all keys.
data = "digits"
partition = "classes(per_client=2)"
clients = 10
cohort = 0.5
rounds = 5
target = 0.8

[sweep]
method = ["fedavg(lr=0.1)", "fedavg(lr=0.1) | dkd()"]
seed = [0, 1, 2]
"""
TABLES = """# Which runs stand behind each printed table, and how a number is read off them.
#
# settings    the columns: a file of experiments, and keys that hold of those meant (`where`)
# methods     the rows: the calls that an experiment's method has, or its `name`;
#             `rounds` takes only that many, from the first
# quantities  the cells: which rounds of a run (`at`: best_validation, target, best, five_best,
#             last), which number of their rows (`column`), times `scale`, with `decimals`;
#             `better` is higher, lower or neither
# lead        the method that the others are tested against in the quantities `tested`

[first]
title = "{name}, table 1: test accuracy in % at the best validation round"
lead = "FedDKD"
tested = ["accuracy"]

[first.settings]
digits = {{ file = "first.toml" }}

[first.methods]
FedAvg = {{ method = "fedavg()" }}
FedDKD = {{ method = "fedavg() | dkd()" }}

[first.quantities.accuracy]
at = "best_validation"
column = "test_accuracy"
scale = 100
decimals = 2
better = "higher"

[first.quantities.rounds_to_target]
at = "target"
column = "round"
decimals = 1
better = "lower"
"""
PRINTED = "table,method,setting,quantity,mean,std,runs,note\n"
README = """# {name}

Where the numbers come from (title, authors, table, page, date of access), and which settings the
paper leaves open: write it here, before anything is run.

| file | what |
|---|---|
| `first.toml` | the experiments behind a table |
| `tables.toml` | its columns, rows and numbers |
| `published.csv` | the printed cells, unchanged; `runs` behind a cell, if known; `note` |
| `results/` | the records, one line of JSON for each run; `feddkd paper collect` writes them |

```
feddkd paper list --papers {folder}
feddkd paper run first --papers {folder} --runs runs/{name}
feddkd paper collect --papers {folder} --runs runs/{name}
feddkd paper table first --papers {folder}
feddkd paper report --papers {folder} --out {folder}/report.md
feddkd paper verify --papers {folder}
```
"""


def write_skeleton(name: str, parent: Path) -> Path:
    """Write the folder of a new paper, and return it; raise InputError if it is there already."""
    if not name.replace("-", "").replace("_", "").isalnum():
        raise InputError(f"a paper's name has letters, digits, - and _, not {name!r}")
    folder = parent / name
    files = {
        "README.md": README.format(name=name, folder=folder.as_posix()),
        "first.toml": EXPERIMENT,
        "tables.toml": TABLES.format(name=name),
        "published.csv": PRINTED,
    }
    try:
        folder.mkdir(parents=True)
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
    except FileExistsError:
        raise InputError(f"there is a {folder} already") from None
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror}") from None
    return folder
