"""Hooks of the docs site (`make docs`): pages that come later, and links to files outside of docs/.

The pages link to the repository's own files (`../CONTRIBUTING.md`, `../bench/results/...`), as they
should for whoever reads them there. In the site such files lie under `repository/`, pages as pages,
the rest as they are; links to whole folders become words.
"""

import re
from pathlib import Path
from posixpath import relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
DOCS = Path(__file__).parent
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> None:
    """Leave out of the navigation what is not there; put in the methods, which are many and come
    and go.
    """
    config.nav = _present(config.nav)
    methods = next(section["Methods"] for section in config.nav if "Methods" in section)
    pages = [
        page
        for page in sorted((DOCS / "methods").glob("*.md"))
        if page.stem not in ("README", "table")
    ]
    methods += [{page.stem: f"methods/{page.name}"} for page in pages]


def _present(entries: list[Any] | None) -> list[Any]:
    found = []
    for entry in entries or []:
        [(title, inside)] = entry.items()
        if isinstance(inside, list):
            found.append({title: _present(inside)})
        elif (DOCS / inside).exists():
            found.append(entry)
    return found


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Every file that the pages link to becomes part of the site, and so on from there."""
    pending = [DOCS / file.src_uri for file in files.documentation_pages()]
    while pending:
        page = pending.pop()
        for target in map(
            Path,
            filter(
                None, (_target(page, link[2]) for link in LINK.finditer(page.read_text("utf-8")))
            ),
        ):
            place = _place(target)
            if DOCS not in target.parents and place not in files.src_uris:
                files.append(
                    File.generated(
                        config, place, abs_src_path=str(target), inclusion=InclusionLevel.NOT_IN_NAV
                    )
                )
                pending += [target] if target.suffix == ".md" else []


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = Path(str(page.file.abs_src_path))

    def moved(link: re.Match[str]) -> str:
        target = _target(source, link[2])
        if target is None:
            return link[1] if _leaves(source, link[2]) else link[0]
        return f"[{link[1]}]({relpath(_place(target), Path(page.file.src_uri).parent.as_posix())}{link[3] or ''})"

    return LINK.sub(moved, markdown)


def _leaves(page: Path, link: str) -> bool:
    return DOCS not in (page.parent / link).resolve().parents and (page.parent / link).exists()


def _target(page: Path, link: str) -> Path | None:
    """The file that a link means, a folder's own page included."""
    target = (page.parent / link).resolve()
    target = target / "README.md" if target.is_dir() else target
    return target if target.is_file() else None


def _place(target: Path) -> str:
    """Where a file lies in the site."""
    return (
        target.relative_to(DOCS).as_posix()
        if DOCS in target.parents
        else f"repository/{target.relative_to(ROOT).as_posix()}"
    )
