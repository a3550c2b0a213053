"""Counts with their nouns, for messages."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"
