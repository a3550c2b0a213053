"""What MkDocs calls while it builds the site (``make docs``).

README.md, CONTRIBUTING.md and their like stay where people look for them, and appear on the site as pages. A
link from a page to another file of the repository (an example, a file for Kubernetes) leads to a page that
shows the file. Whatever a browser would fetch from elsewhere is a warning, which ends a strict build; links
to other sites are listed, not called.
"""

from __future__ import annotations

import re
from logging import getLogger
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from site_pages import (
    FRONT_PAGES,
    ROOT,
    Addresses,
    file_page,
    linked_files,
    not_understood,
    place_of,
    reference,
    with_links_of_the_site,
)
from site_pictures import picture
from site_plans import draw_all, shown

LOG = getLogger("mkdocs.kvferry")

SEARCHED_FIRST = {"errors.md": 4, "troubleshooting.md": 2}
SEARCHED_LAST = {"reference.md": 0.02, "changelog.md": 0.02}
"""What somebody with a question is looking for, and what not."""


def on_files(files: Files, config: MkDocsConfig) -> None:
    """Add the pages that do not stand in docs/."""
    shown = {
        path for page in files.documentation_pages() for path in linked_files(page.content_string, "docs")
    }
    for path, name in FRONT_PAGES.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        shown |= linked_files(text, "")
        files.append(File.generated(config, name, content=with_links_of_the_site(text, "")))
    files.append(File.generated(config, "reference.md", content=reference()))
    for path in sorted(shown):
        files.append(File.generated(config, place_of(path), content=file_page(path)))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links out of docs/ lead to pages of the site, and searches to the pages that answer."""
    boost = (SEARCHED_FIRST | SEARCHED_LAST).get(page.file.src_uri, 1)
    page.meta["search"] = {"boost": boost}
    return markdown if page.file.generated_by else with_links_of_the_site(markdown, "docs")


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Warn of Markdown that GitHub understands and this site does not; draw the pictures."""
    if not page.file.src_uri.startswith(("files/", "reference")):
        for problem in not_understood(page.markdown or "", html):
            LOG.warning("%s: %s", page.file.src_uri, problem)
    html = re.sub(r'<img [^>]*src="plots/([\w-]+)\.svg"[^>]*>', lambda wanted: picture(wanted[1]), html)
    return re.sub(r"<!-- plan: (\w+) -->", lambda wanted: shown(wanted[1]), html)


def on_post_build(config: MkDocsConfig) -> None:
    """Draw plans; let files be searched, too; list links to other sites, warn of what comes from there."""
    site = Path(config.site_dir)
    draw_all(site / "pictures")
    index = (site / "search" / "search_index.json").read_text(encoding="utf-8")
    (site / "search" / "search_index.js").write_text(f"var __index = {index}", encoding="utf-8")
    outside: dict[str, set[str]] = {}
    for path in sorted(site.rglob("*.html")):
        found = Addresses(path.read_text(encoding="utf-8"))
        for url in sorted(found.fetched):
            LOG.warning("%s fetches %s: the site has to work without a network", path.name, url)
        for url in found.linked:
            outside.setdefault(url, set()).add(path.relative_to(site).as_posix())
    lines = [f"{url}  {' '.join(sorted(outside[url]))}\n" for url in sorted(outside)]
    (site / "external-links.txt").write_text("".join(lines), encoding="utf-8")
    LOG.info("%d links to other sites, listed in external-links.txt and not called", len(outside))
