"""Text of the site's pages: where a link of the repository leads there, and pages that are not in docs/."""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

import kvferry

ROOT = Path(__file__).resolve().parents[1]

FRONT_PAGES = {
    "README.md": "readme.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security-policy.md",
}
"""Files of the repository that are pages of the site, and their names there."""

LANGUAGES = {".py": "python", ".sh": "bash", ".yaml": "yaml", ".json": "json", ".toml": "toml"}
"""How a file that is shown is coloured."""

FENCED = re.compile(r"^( *)(```+).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^]]*)\]\(([^)\s#]+)((?:#[^)\s]*)?)\)")
NOT_RENDERED = re.compile(r"\s*(\* |- |\d+\. |\||```|~~~)")
HALF_INDENTED = re.compile(r"^\n {1,3}(?:[^\s|].*)$", re.MULTILINE)


def outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """Change a text, but for its fenced blocks."""
    parts, at = [], 0
    for block in FENCED.finditer(markdown):
        parts += [change(markdown[at : block.start()]), block[0]]
        at = block.end()
    return "".join([*parts, change(markdown[at:])])


def within(target: str, folder: str) -> str | None:
    """A link's target as a path of the repository; None if it leads to another site."""
    return None if ":" in target else posixpath.normpath(posixpath.join(folder, target))


LAB = "docs/lab/"
"""Notes for contributors: they are read in the repository, and are not on the site."""


def place_of(path: str) -> str:
    """Where on the site a file of the repository is."""
    if path.startswith("docs/") and not path.startswith(LAB):
        return path.removeprefix("docs/")
    return FRONT_PAGES.get(path, f"files/{path}.md")


def with_links_of_the_site(markdown: str, folder: str) -> str:
    """The text of a page that lies in a folder of the repository, with links that work on the site.

    A link that shows the name of a page's file shows the page's title: files are the repository's affair.
    A link to lab notes becomes their path.
    """

    def moved(link: re.Match[str]) -> str:
        path = within(link[2], folder)
        if path is None:
            return link[0]
        if path.startswith(LAB):
            return f"`{path}`" if link[1] in (path, posixpath.basename(path)) else f"{link[1]} (`{path}`)"
        words = title_of(path) if link[1] == posixpath.basename(path) and path.endswith(".md") else link[1]
        return f"[{words}]({place_of(path)}{link[3]})"

    return outside_code(markdown, lambda text: LINK.sub(moved, text))


def title_of(path: str) -> str:
    """The first heading of a page."""
    found = re.search(r"^# (.+)$", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else path


def linked_files(markdown: str, folder: str) -> set[str]:
    """The files that a page links to and that are no pages yet, as paths of the repository."""
    targets = [link[1] for link in LINK.findall(FENCED.sub("", markdown))]
    paths = {path for target in targets if (path := within(target, folder)) is not None}
    shown = {path for path in paths if place_of(path).startswith("files/") and not path.startswith(LAB)}
    return {path for path in shown if (ROOT / path).is_file()}


def file_page(path: str) -> str:
    """A page that shows a file of the repository."""
    text = (ROOT / path).read_text(encoding="utf-8").rstrip("\n")
    fence = "`" * (3 + max((len(ticks) for ticks in re.findall(r"^`+", text, re.MULTILINE)), default=0))
    language = LANGUAGES.get(Path(path).suffix, "text")
    return f"# {path}\n\nA file of the repository, unchanged.\n\n{fence}{language}\n{text}\n{fence}\n"


def not_understood(markdown: str, html: str) -> Iterator[str]:
    """Lines that GitHub shows as a list, a table or code, and this site would show as plain text."""
    for line in HALF_INDENTED.findall(FENCED.sub("", markdown)):
        yield f"below a list's item, indent by 4 blanks: {line.strip()}"
    for block in FENCED.finditer(markdown):
        if len(block[1]) % 4:
            yield f"indent code by 4 blanks, or not at all: {block[0].splitlines()[1].strip()}"
    for paragraph in re.findall(r"<p>(.*?)</p>", html, re.DOTALL):
        for line in re.sub(r"<code>.*?</code>", "", paragraph, flags=re.DOTALL).splitlines():
            if NOT_RENDERED.match(line):
                yield f"not understood as a list, a table or code: {line.strip()}"


REFERENCE_ROOMS = {
    "endpoint": "For engines: offer requests, fetch them ([how](engine.md))",
    "models": "Descriptions made offline, from a model's config and a topology",
    "wire": "Manifests, requests and runs as files ([their fields](manifest.md))",
}
"""Rooms with public names of their own that other programs need, and what for."""
REFERENCE_NAMES = (
    "transport.process.ProcessTransport",
    "wire.secret.Trust",
    "endpoint.secret_source.secret_from_file",
    "endpoint.metrics.EngineMetrics",
    "endpoint.source.GrowingOffer",
    "runtime.values.Timing",
    "runtime.values.Report",
    "runtime.values.Record",
    "runtime.values.Released",
    "runtime.values.Wanted",
    "runtime.claims.ClaimEnd",
    "runtime.failure.Failure",
    "runtime.failure.FailureCode",
    "wire.ticket.Ticket",
    "wire.ticket.to_text",
    "wire.ticket.from_text",
    "wire.ticket.digest_parts",
    "wire.ticket.num_common_tokens",
)
"""Arguments and results of the names in ``endpoint``."""


def reference() -> str:
    """The page of public names, by where they live; their docstrings say the rest."""
    lines = [
        "# API reference",
        "",
        "Every public name, with its docstring; the examples in them are run as tests.",
        "What is not here may change without notice.",
        "",
        "## kvferry",
        "",
        "Two descriptions in, a proved plan and byte runs out. `import kvferry` has all of these.",
        "",
    ]
    for home, names in kvferry._HOMES.items():
        lines += [f"::: {home}.{name}\n" for name in names.split()]
    for room, purpose in REFERENCE_ROOMS.items():
        lines += [f"## kvferry.{room}", "", f"{purpose}.", ""]
        lines += [f"::: {home}\n" for home in names_of(room)]
    lines += ["## Arguments and results", ""]
    lines += [f"::: kvferry.{name}\n" for name in REFERENCE_NAMES]
    return "\n".join(lines)


def names_of(room: str) -> list[str]:
    """Where the public names of a room are made, in the order of its ``__init__``."""
    tree = ast.parse((ROOT / "src" / "kvferry" / room / "__init__.py").read_bytes())
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    return [f"{node.module}.{alias.name}" for node in imports for alias in node.names]


class Addresses(HTMLParser):
    """The addresses of other sites that a page links to, and those that a browser would fetch to show it."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.linked: set[str] = set()
        self.fetched: set[str] = set()
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Sort each address by what a browser does with it."""
        for name, value in attrs:
            if name in ("href", "src", "srcset", "data", "poster") and re.match(r"(https?:)?//", value or ""):
                (self.linked if tag == "a" else self.fetched).add(value or "")
