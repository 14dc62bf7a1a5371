"""Hooks of the docs site (`make docs`): pages of the methods, and links to files outside docs/.

Pages link to files of the repository (`../CONTRIBUTING.md`, `../bench/results/...`). The site has
copies of these files under `repository/`, Markdown as pages; a link to a folder becomes plain text.
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
    """Remove missing pages from the navigation; add a page for each method."""
    config.nav = _present(config.nav)
    reference = next(section["Reference"] for section in config.nav if "Reference" in section)
    methods = next(section["Methods"] for section in reference if "Methods" in section)
    pages = [
        page
        for page in sorted((DOCS / "methods").glob("*.md"))
        if page.stem not in ("README", "table")
    ]
    methods += [{page.stem: f"methods/{page.name}"} for page in pages]


def _present(entries: list[Any] | None) -> list[Any]:
    """Return the entries of the navigation whose pages exist."""
    present = []
    for entry in entries or []:
        [(title, content)] = entry.items()
        if isinstance(content, list):
            present.append({title: _present(content)})
        elif (DOCS / content).exists():
            present.append(entry)
    return present


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add every file that a page links to, and the files that these link to."""
    pending = [DOCS / file.src_uri for file in files.documentation_pages()]
    while pending:
        page = pending.pop()
        for link in LINK.finditer(page.read_text("utf-8")):
            target = _target(page, link[2])
            if target is None or DOCS in target.parents or _place(target) in files.src_uris:
                continue
            files.append(_outside_nav(config, target))
            if target.suffix == ".md":
                pending.append(target)


def _outside_nav(config: MkDocsConfig, target: Path) -> File:
    """Return a file of the site that is not in the navigation."""
    inclusion = InclusionLevel.NOT_IN_NAV
    return File.generated(config, _place(target), abs_src_path=str(target), inclusion=inclusion)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return a page's Markdown with links to the site's copies of files."""
    source = Path(str(page.file.abs_src_path))
    folder = Path(page.file.src_uri).parent.as_posix()

    def moved(link: re.Match[str]) -> str:
        target = _target(source, link[2])
        if target is None:
            return link[1] if _leaves(source, link[2]) else link[0]
        return f"[{link[1]}]({relpath(_place(target), folder)}{link[3] or ''})"

    return LINK.sub(moved, markdown)


def _leaves(page: Path, link: str) -> bool:
    """Return whether a link goes to a folder or file outside docs/."""
    return DOCS not in (page.parent / link).resolve().parents and (page.parent / link).exists()


def _target(page: Path, link: str) -> Path | None:
    """Return the file that a link goes to, for a folder its README.md; None if there is none."""
    target = (page.parent / link).resolve()
    target = target / "README.md" if target.is_dir() else target
    return target if target.is_file() else None


def _place(target: Path) -> str:
    """Return the path of a file in the site."""
    if DOCS in target.parents:
        return target.relative_to(DOCS).as_posix()
    return f"repository/{target.relative_to(ROOT).as_posix()}"
