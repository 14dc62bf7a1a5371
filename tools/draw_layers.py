"""Draw docs/pictures/layers.svg, the packages by level, from LEVELS in tests/test_architecture.py.

Run `PYTHONPATH=tests:tests/support:tools python tools/draw_layers.py` after a change of LEVELS.
"""

from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "pictures" / "layers.svg"
WIDTH, LEFT, ROW, BOX = 860, 96, 44, 30
COLOURS = ("#e3f2ef", "#00897b"), ("#fff3e0", "#ef6c00")


def draw(levels: Sequence[Sequence[str]]) -> str:
    """Return the picture as SVG; the highest level is the first line."""
    height = 64 + ROW * len(levels)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img"'
        ' aria-label="The packages of feddkd by level: each imports only from levels below its own"'
        ' font-family="sans-serif" font-size="14" fill="#223">',
        f'  <rect width="{WIDTH}" height="{height}" rx="10" fill="#fbfcfd"/>',
        '  <text x="20" y="30" font-size="17" font-weight="bold">Imports go down only</text>',
    ]
    for number in range(len(levels), 0, -1):
        top = 50 + ROW * (len(levels) - number)
        lines.append(f'  <text x="20" y="{top + 20}" fill="#567">level {number}</text>')
        lines += _boxes(levels[number - 1], top)
    return "\n".join([*lines, "</svg>", ""])


def _boxes(packages: Sequence[str], top: int) -> list[str]:
    """Return the boxes of one level, side by side."""
    width = (WIDTH - 20 - LEFT) // 5
    lines = []
    for place, package in enumerate(packages):
        left = LEFT + place * width
        fill, stroke = COLOURS[_is_folder(package)]
        lines.append(
            f'  <rect x="{left}" y="{top}" width="{width - 10}" height="{BOX}" rx="6"'
            f' fill="{fill}" stroke="{stroke}"/>'
        )
        lines.append(
            f'  <text x="{left + (width - 10) // 2}" y="{top + 20}" text-anchor="middle"'
            f' font-family="monospace">{package}</text>'
        )
    return lines


def _is_folder(package: str) -> bool:
    return (ROOT / "src" / "feddkd" / package).is_dir()


if __name__ == "__main__":
    from test_architecture import LEVELS

    PICTURE.write_text(draw(LEVELS), encoding="utf-8")
