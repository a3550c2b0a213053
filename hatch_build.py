"""What a package index shows: README with links that lead somewhere from there, and the project's addresses.

Links in README name files of the repository. On a package index these would be dead, so each becomes an
address below ``home`` (pyproject.toml), or, while the project has no public home, the words without a link.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+://|#|mailto:)([^)]+)\)")

PAGES = {
    "Documentation": "docs/start.md",
    "Changelog": "CHANGELOG.md",
    "Security": "SECURITY.md",
}


def with_whole_links(text: str, home: str) -> str:
    """A page for readers who have nothing but the page."""

    def whole(found: re.Match[str]) -> str:
        mark, words, target = found.groups()
        if not home:
            return words
        kind = "raw" if mark else "blob"
        return f"{mark}[{words}]({home}/{kind}/main/{target})"

    return LINK.sub(whole, text)


class ReadmeAndAddresses(MetadataHookInterface):
    """Called by hatchling for every build."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in what pyproject.toml calls dynamic."""
        home = self.config.get("home", "").rstrip("/")
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": with_whole_links(text, home)}
        pages = {name: f"{home}/blob/main/{path}" for name, path in PAGES.items()}
        metadata["urls"] = {"Source": home, "Issues": f"{home}/issues", **pages} if home else {}
