"""Run the examples of the docs: every block of every page, in the order of its page.

A block that is not run has a comment above it that says why.
"""

import importlib
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from test_architecture import LEVELS

from draw_layers import PICTURE, draw
from feddkd.cli.app import main
from feddkd.data.partitions.registry import PARTITIONS
from feddkd.data.sources import SOURCES
from feddkd.experiment import load
from feddkd.methods import METHODS
from feddkd.models.registry import MODELS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Blocks of python, bash and toml are run; blocks of the languages in SHOWN are only read. A comment
# above a block may say
#   <!-- not run: WHY -->        it needs something that a test does not have
#   <!-- excerpt: FILE -->       it is a part of that file
#   <!-- file: NAME -->          it is written to that file for the blocks after it
# A TOML block is also written to the file that its first line names: `# NAME.toml`.
SHOWN = {"text", "csv", "ini", "json"}
BLOCK = re.compile(
    r"(?P<notes>(?:<!-- [^>]* -->\s*\n)*)^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)

# Every page finds these in its folder: experiment.toml, runs of it, the repository's experiments
# and papers.
EXPERIMENT = """
partition = "classes(per_client=2)"
model = "mlp(hidden='8')"
clients = 5
rounds = 1

[sweep]
method = ["fedavg(epochs=1)", "fedavg(epochs=1) | dkd(steps=1)"]
"""

# Words added to a command, so that it takes seconds here.
SMALLER = {
    "run": ["--set", "rounds=1", "--set", "sweep.seed=[0]", "--engine", "serial"],
    "bench": ["--small", "--job", "mlp", "--repeats", "1"],
    "watch": ["--port", "0"],
}
# instead of `--data DIR`
NO_FILES = ["--set", "data=digits", "--set", "model=mlp(hidden='8')"]


class Block(NamedTuple):
    page: Path
    line: int
    language: str
    notes: dict[str, str]
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[list[str]]:
        found = [
            shlex.split(line, comments=True) for line in self.text.replace("\\\n", " ").splitlines()
        ]
        return [words for words in found if words]


def blocks(page: Path) -> list[Block]:
    content, found = page.read_text(encoding="utf-8"), []
    for match in BLOCK.finditer(content):
        notes = dict(re.findall(r"<!-- ([a-z ]+): ([^>]*) -->", match["notes"]))
        plain = "bash" if re.search(r"^feddkd ", match["text"], re.M) else "text"
        line = content.count("\n", 0, match.start("language")) + 1
        found.append(Block(page, line, match["language"] or plain, notes, match["text"]))
    return found


ALL = [block for page in PAGES for block in blocks(page)]
RUN = [
    page
    for page in PAGES
    if any(block.language not in SHOWN and "not run" not in block.notes for block in blocks(page))
]


def feddkd(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Call a command in this process; runs/a and runs/b stand for the first two run folders."""
    folders = sorted(str(path) for path in Path("runs").glob("fed*"))
    words = [
        folders["ab".index(word[5:])] if word in ("runs/a", "runs/b") else word for word in words
    ]
    if "DIR" in words:
        words = [word for word in words if word not in ("--data", "DIR")] + NO_FILES
    monkeypatch.setattr(
        sys, "argv", ["feddkd", *words, *SMALLER.get(words[0] if words else "", [])]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code, shlex.join(words)


@pytest.fixture(scope="module")
def granted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what every page finds, made once."""
    folder = tmp_path_factory.mktemp("granted")
    (folder / "experiment.toml").write_text(EXPERIMENT)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        feddkd(["run", "experiment.toml"], patch)
    shutil.copytree(folder / "runs", folder / "more-runs")
    return folder


@pytest.fixture
def reader_folder(granted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter a reader's folder. Nothing opens a browser, serves for ever, or stays registered."""
    shutil.copytree(granted, tmp_path, dirs_exist_ok=True)
    for name in ("examples", "papers", "tools"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDDKD_DATA", raising=False)
    monkeypatch.setattr("webbrowser.open", lambda address: True)
    monkeypatch.setattr("http.server.ThreadingHTTPServer.serve_forever", lambda server: None)
    for registry in (METHODS, MODELS, PARTITIONS, SOURCES):
        monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    return tmp_path


@pytest.mark.parametrize("page", RUN, ids=lambda page: str(page.relative_to(ROOT)))
@pytest.mark.usefixtures("reader_folder")
def test_what_a_page_shows_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: dict[str, Any] = {"__name__": "page"}
    for block in blocks(page):
        named = re.match(r"# (\w+\.toml)\n", block.text)
        file = Path(block.notes.get("file", named[1] if named else "block.toml"))
        if "file" in block.notes or block.language == "toml":
            file.write_text(block.text, encoding="utf-8")
        if {"not run", "excerpt"} & set(block.notes) or block.language in SHOWN:
            continue
        if block.language == "python":
            exec(compile(block.text, str(block), "exec"), names)
        elif block.language == "toml":
            assert load(file), block
        else:
            for program, *words in block.commands:
                assert program == "feddkd", f"{block}: say why {program} is not run"
                feddkd(words, monkeypatch)


@pytest.mark.parametrize("block", ALL, ids=str)
def test_a_block_is_run_or_says_why_not(block: Block) -> None:
    assert block.language in {"python", "bash", "toml"} | SHOWN, "no test runs this language"
    assert set(block.notes) <= {"not run", "excerpt", "file"}
    assert block.language not in SHOWN or not re.search(
        r"^(feddkd|make|pip|python) ", block.text, re.M
    ), "these are commands"
    if "excerpt" in block.notes:
        assert block.text in (ROOT / block.notes["excerpt"]).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_fences_links_and_make_targets_of_a_page_are_whole(page: Path) -> None:
    content = page.read_text(encoding="utf-8")
    assert len(re.findall(r"^\s*```", content, re.M)) == 2 * len(blocks(page))
    for link in re.findall(r"\]\((?![a-z]+:|#)([^)#\s]+)", content):
        assert (page.parent / link).exists(), link
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", content, re.M)) <= targets


def test_the_readme_is_short_and_counts_the_methods() -> None:
    content = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(content.splitlines()) < 120
    assert f"{len(list(METHODS))} methods" in content


def test_the_page_of_the_code_has_the_packages_by_level() -> None:
    content = (ROOT / "docs" / "code.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| ", content, re.M)
    assert sorted((int(level), package) for level, package in rows) == sorted(
        (level, package) for level, packages in enumerate(LEVELS, 1) for package in packages
    )
    assert PICTURE.read_text(encoding="utf-8") == draw(LEVELS), "run tools/draw_layers.py"


@pytest.mark.parametrize("page", ["code.md", "paper-to-code.md"])
def test_paths_and_names_of_the_code_exist(page: str) -> None:
    content = (ROOT / "docs" / page).read_text(encoding="utf-8")
    quoted = re.findall(r"`([\w./]+)`", content)
    paths = [text for text in quoted if "/" in text]
    places = [ROOT / "src" / "feddkd", ROOT]
    missing = [text for text in paths if not any((place / text).exists() for place in places)]
    assert missing == []
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").glob("*.py")]
    names = {file.name for file in files}
    for text in quoted:
        if "/" not in text and text.endswith(".py"):
            assert text in names
        elif re.fullmatch(r"[a-z_]+(\.\w+)+", text) and not text.startswith("feddkd."):
            check_name(text)


def test_every_test_that_the_docs_name_exists() -> None:
    tests = {path.name for path in (ROOT / "tests").rglob("*.py")}
    for page in PAGES:
        named = set(re.findall(r"\btest_\w+\.py\b", page.read_text(encoding="utf-8")))
        assert named <= tests, page


def check_name(text: str) -> None:
    """Fail unless `module.name` (below feddkd) can be imported."""
    parts = ["feddkd", *text.split(".")]
    for length in range(len(parts) - 1, 1, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for name in parts[length:]:
            declared = getattr(found, "__annotations__", {})
            assert hasattr(found, name) or name in declared, f"there is no feddkd.{text}"
            found = getattr(found, name, None)
        return
    pytest.fail(f"there is no module for feddkd.{text}")


def test_the_example_with_cells_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROUNDS", "1")
    names = runpy.run_path(str(ROOT / "examples" / "quickstart.py"))
    assert set(names["results"]) == {"FedAvg", "FedDKD"}
    assert [len(result.history) for result in names["results"].values()] == [1, 1]
    assert (tmp_path / "quickstart.png").stat().st_size > 10_000


def test_the_site_is_built_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="no MkDocs Material here: pip install 'feddkd[docs]'")
    # --quiet would undo --strict
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not re.search(r"^(WARNING|ERROR)", done.stderr, re.M)
    for page in tmp_path.rglob("*.html"):
        assert not re.search(
            r"""<(?:link|script|img|iframe)[^>]*(?:href|src)=["'](?:https?:)?//""",
            page.read_text("utf-8"),
        ), page
    for page in PAGES[2:]:
        place = page.relative_to(ROOT / "docs")
        assert (
            tmp_path
            / place.with_name("index.html" if place.name == "README.md" else f"{place.stem}.html")
        ).exists()
