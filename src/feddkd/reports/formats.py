"""Headings and lines of texts -> a table in plain text, Markdown or LaTeX."""

from collections.abc import Callable, Mapping, Sequence

Lines = Sequence[Sequence[str]]
Grid = Callable[[Sequence[str], Lines], str]

LATEX = {
    "\\": r"\textbackslash{}",
    "_": r"\_",
    "%": r"\%",
    "&": r"\&",
    "#": r"\#",
    "$": r"\$",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "|": r"\textbar{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "±": r"$\pm$",
}


def aligned(headings: Sequence[str], lines: Lines) -> str:
    """Return a table in plain text, its columns aligned by spaces."""
    widths = [max(map(len, column)) for column in zip(headings, *lines, strict=True)]
    rule = ["-" * width for width in widths]
    rows = [map(str.ljust, line, widths) for line in [headings, rule, *lines]]
    return "\n".join("  ".join(row).rstrip() for row in rows)


def piped(headings: Sequence[str], lines: Lines) -> str:
    """Return a table in Markdown."""
    rows = []
    for line in [headings, ["---"] * len(headings), *lines]:
        cells = [cell.replace("|", r"\|") for cell in line]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def tabular(headings: Sequence[str], lines: Lines) -> str:
    """Return a table in LaTeX."""
    head, *rows = (" & ".join(map(_escaped, line)) + r" \\" for line in [headings, *lines])
    begin, end = rf"\begin{{tabular}}{{{'l' * len(headings)}}}", r"\end{tabular}"
    return "\n".join([begin, r"\hline", head, r"\hline", *rows, r"\hline", end])


def _escaped(cell: str) -> str:
    return "".join(LATEX.get(sign, sign) for sign in cell)


GRIDS: Mapping[str, Grid] = {"md": piped, "tex": tabular}  # by the suffix of a file's name
