"""Headings and lines of texts -> a grid: plain, Markdown, LaTeX."""

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
    widths = [max(map(len, column)) for column in zip(headings, *lines, strict=True)]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "  ".join(map(str.ljust, line, widths)).rstrip() for line in [headings, rule, *lines]
    )


def piped(headings: Sequence[str], lines: Lines) -> str:
    every = [
        [cell.replace("|", r"\|") for cell in line]
        for line in [headings, ["---"] * len(headings), *lines]
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in every)


def tabular(headings: Sequence[str], lines: Lines) -> str:
    head, *rows = (" & ".join(map(_escaped, line)) + r" \\" for line in [headings, *lines])
    return "\n".join(
        [
            rf"\begin{{tabular}}{{{'l' * len(headings)}}}",
            r"\hline",
            head,
            r"\hline",
            *rows,
            r"\hline",
            r"\end{tabular}",
        ]
    )


def _escaped(cell: str) -> str:
    return "".join(LATEX.get(sign, sign) for sign in cell)


GRIDS: Mapping[str, Grid] = {"md": piped, "tex": tabular}  # by the ending of a file's name
