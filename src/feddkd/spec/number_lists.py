"""Lists of whole numbers as text: "0-4, 7"."""

import re

from feddkd.errors import InputError

PART = re.compile(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?")


def numbers_in(text: str, where: str) -> list[int]:
    """Return the numbers that a text lists; raise InputError if it is no list."""
    numbers: list[int] = []
    for part in text.split(","):
        match = PART.fullmatch(part)
        if match is None or (match[2] and int(match[2]) < int(match[1])):
            raise InputError(f"{where} must be numbers and ranges, as in '0-4, 7', not {text!r}")
        numbers += range(int(match[1]), int(match[2] or match[1]) + 1)
    if len(set(numbers)) < len(numbers):
        raise InputError(f"{where} names a number twice in {text!r}")
    return numbers
