"""Every snippet of the docs that could be run, and who runs it: ``python tools/snippets.py``.

A fenced block of Python, or of commands, is run by a test, or says above it why not::

    <!-- not run: it needs a GPU -->

Most are run by tests/cli/test_snippets.py, page by page and from top to bottom; a few pages have a test of
their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md")),
)
LANGUAGES = ("python", "pycon", "console", "bash")

BLOCK = re.compile(
    r"(?:^ *<!-- not run: (?P<reason>[^\n]+) -->\n+)?"
    r"^(?P<indent> *)```(?P<language>\w+)\n(?P<text>.*?)^(?P=indent)```",
    re.MULTILINE | re.DOTALL,
)

OWN_TESTS = {
    ("docs/cli.md", "console"): "tests/cli/test_docs.py",
    ("docs/engine.md", "python"): "tests/test_examples.py",
    ("docs/manifest.md", "python"): "tests/wire/test_docs.py",
    ("docs/tour.md", "pycon"): "tests/test_tour.py",
    ("docs/tour.md", "console"): "tests/test_tour.py",
}
"""Pages whose snippets have a test of their own, by language."""


@dataclass(frozen=True)
class Snippet:
    """A fenced block that could be run."""

    page: str
    line: int
    language: str
    text: str
    reason: str
    """Why it is not run; empty if it is."""

    @property
    def own_test(self) -> str:
        """The test that runs it, if its page has one of its own."""
        return OWN_TESTS.get((self.page, self.language), "")

    def commands(self) -> Iterator[tuple[str, str]]:
        """Each command of a session, and what the page shows as its output."""
        session = self.text.replace("\\\n", " ")
        yield from re.findall(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", session, re.MULTILINE)


def snippets(page: str) -> list[Snippet]:
    """The snippets of a page, from top to bottom."""
    return snippets_of(page, (ROOT / page).read_text(encoding="utf-8"))


def snippets_of(page: str, markdown: str) -> list[Snippet]:
    """The snippets of a text."""
    found = []
    for block in BLOCK.finditer(markdown):
        if block["language"] in LANGUAGES:
            indent = len(block["indent"])
            text = "".join(line[indent:] for line in block["text"].splitlines(keepends=True))
            line = markdown[: block.start("language")].count("\n") + 1
            found.append(Snippet(page, line, block["language"], text, block["reason"] or ""))
    return found


def count() -> str:
    """How many there are, in a sentence, and each that is not run with its reason."""
    every = [one for page in PAGES for one in snippets(page)]
    left_out = [one for one in every if one.reason]
    lines = [
        f"{len(every)} snippets: {len(every) - len(left_out)} are run by tests, {len(left_out)} are not:"
    ]
    lines += [f"  {one.page}:{one.line}  {one.reason}" for one in left_out]
    return "\n".join(lines)


if __name__ == "__main__":
    print(count())
