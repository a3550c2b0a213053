"""Numbers of things, in sentences."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """So many of something."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
