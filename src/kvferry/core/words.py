"""Numbers of things, in sentences."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """So many of something.

    >>> counted(1, "rank"), counted(0, "rank"), counted(2_048, "run")
    ('1 rank', '0 ranks', '2,048 runs')
    """
    return f"{number:,} {noun}{'s' * (number != 1)}"
