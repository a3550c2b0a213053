"""Tables of the pages, as cells."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def table(page: str, title: str) -> list[list[str]]:
    """The cells of the table of a page whose first heading begins so, row by row, headings first."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    (start,) = (i for i, line in enumerate(lines) if line.startswith(f"| {title}"))
    stop = next(i for i in range(start, len(lines)) if not lines[i].startswith("|"))
    rows = [[plain(cell) for cell in line.strip("| ").split(" | ")] for line in lines[start:stop]]
    return [rows[0], *rows[2:]]


def plain(cell: str) -> str:
    """A cell without its marks: bold, code, a remark in brackets, the target of a link."""
    return re.sub(r"\s*\(.*\)|[*`]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cell)).strip()


def number(cell: str) -> float | None:
    """The number that a cell begins with; None if it says something else."""
    found = re.match(r"[\d.,]+", cell)
    return float(found[0].replace(",", "")) if found else None
