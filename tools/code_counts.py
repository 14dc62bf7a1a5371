"""Count what makes the code hard to read.

`python tools/code_counts.py [FOLDER]` prints one line for each count.

FOLDER is the package, src/feddkd unless given; so that an older version can be counted beside it.
"""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

OPENINGS = ("What", "How", "Whether", "Of", "Where", "Who", "Whoever", "Which", "As", "By", "If")
WIDEST = 100  # columns
MANY = 10  # parameters or fields


def modules(package: Path) -> dict[str, Path]:
    """Return the package's modules by their dotted names."""
    found = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """Return the modules of the package that a module imports, in functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            while name and name not in known:
                name = name.rpartition(".")[0]
            found.add(name)
    return found - {""}


def package_levels(known: dict[str, Path], root: str) -> int:
    """Return the longest chain of imports between the folders and loose modules at the top."""
    edges: dict[str, set[str]] = {}
    for name, path in known.items():
        own = top(name, root)
        others = {top(other, root) for other in imports(path, known)}
        edges.setdefault(own, set()).update(others - {own, ""})
    levels: dict[str, int] = {}

    def level(name: str, above: tuple[str, ...] = ()) -> int:
        if name in above:
            raise SystemExit(f"the imports run in a circle: {' -> '.join([*above, name])}")
        if name not in levels:
            below = [level(other, (*above, name)) for other in edges.get(name, ())]
            levels[name] = 1 + max(below, default=0)
        return levels[name]

    return max(level(name) for name in edges)


def top(name: str, root: str) -> str:
    """Return the folder or loose module at the top of a module; empty for the package.

    `__main__` counts to the command line, which it starts.
    """
    first = name.removeprefix(root).removeprefix(".").partition(".")[0]
    return "cli" if first == "__main__" else first


def documented(tree: ast.AST) -> list[str]:
    """Return all docstrings of a module."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    texts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    return [text for text in texts if text]


def fields(node: ast.ClassDef) -> int:
    """Return how many annotated fields a class declares."""
    return sum(isinstance(part, ast.AnnAssign) for part in node.body)


def parameters(node: ast.FunctionDef) -> int:
    """Return how many parameters a function takes."""
    return len(node.args.args) + len(node.args.kwonlyargs)


def counts(package: Path) -> dict[str, object]:
    """Return all counts by what they count."""
    known = modules(package)
    texts = {path: path.read_text(encoding="utf-8") for path in known.values()}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    classes = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    docstrings = [text for tree in trees.values() for text in documented(tree)]
    lines = [line for text in texts.values() for line in text.splitlines()]
    loose = [path for path in package.glob("*.py") if path.stem not in ("__init__", "__main__")]
    return {
        "modules": len(known),
        "modules loose at the top": len(loose),
        "levels of imports between packages": package_levels(known, package.name),
        "class names with two or more meanings": sum(count > 1 for count in classes.values()),
        "docstrings": len(docstrings),
        "docstrings that open with a clause": sum(t.split()[0] in OPENINGS for t in docstrings),
        "lines": len(lines),
        f"lines longer than {WIDEST} characters": sum(len(line) > WIDEST for line in lines),
        "fmt: skip": sum("# fmt: skip" in line for line in lines),
        f"classes with more than {MANY} fields": sum(
            fields(node) > MANY for node in nodes if isinstance(node, ast.ClassDef)
        ),
        f"functions with more than {MANY} parameters": sum(
            parameters(node) > MANY for node in nodes if isinstance(node, ast.FunctionDef)
        ),
        "commit subjects longer than 72 characters, of the last 100": long_subjects(package),
    }


def long_subjects(package: Path) -> int:
    """Return how many of the last hundred commits have a long subject."""
    command = ["git", "log", "-100", "--format=%s"]
    done = subprocess.run(command, cwd=package, capture_output=True, text=True, check=False)
    return sum(len(line) > 72 for line in done.stdout.splitlines())


if __name__ == "__main__":
    default = Path(__file__).parents[1] / "src" / "feddkd"
    for what, count in counts(Path(sys.argv[1]) if sys.argv[1:] else default).items():
        print(f"{count!s:>7}  {what}")
