"""The page of ``kvferry status --http`` in a real Chromium: all its tables, and every kind of warning."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.status.page import StatusServer, served
from kvferry.cli.status.reported import ENDED, SeenSource
from kvferry.cli.status.watched import Look, Watched
from tests.browser.axe import broken_rules
from tests.cli.reported_engines import DESTINATION, SOURCE

pytestmark = pytest.mark.slow

SCREENS = [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")]
TOLD = replace(
    DESTINATION,
    num_quarantined=1,
    sources=(
        SeenSource(SOURCE.name, SOURCE.address, "met", "direct", "packed reads are off: no secret"),
        SeenSource("another", "tcp://10.0.0.8:5", "lost", "", "it does not answer"),
    ),
)
EXPIRED = replace(SOURCE, up_seconds=101.0, counts={"offered": 100.0, f"{ENDED}expired": 2.0})
BUSY = replace(TOLD, up_seconds=51.0, counts={"read direct": 99.0, "read packed": 7.0})
KNOWN = (
    Watched()
    .then(0.0, {"s": Look(SOURCE), "d": Look(TOLD)})
    .then(1.0, {"s": Look(EXPIRED), "d": Look(BUSY), "silent": Look(error="it does not answer")})
)


@pytest.fixture
def server():
    server = StatusServer("127.0.0.1", 0, 0.1)
    with served(server) as show:
        show(KNOWN, 1.0)
        yield server


@pytest.fixture
def opened(browser, server):
    """Open the page. What it asks another server for, or says on the console, is wrong."""
    contexts: list[Any] = []
    wrong: list[str] = []
    ours = {server.url, f"{server.url}board.json"}

    def open_page(width=1280, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: wrong.extend({request.url} - ours))
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(server.url)
        page.wait_for_selector("section table")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


def test_every_table_and_warning_is_there(opened):
    page = opened()
    words = page.locator("#warnings b").all_inner_texts()
    assert set(words) == {"QUARANTINE", "NO ANSWER", "EXPIRED", "NOTE", "LOST"}
    assert page.locator("section").count() == 6


def test_axe_would_find_something(opened):
    page = opened(390)
    page.evaluate("document.querySelectorAll('.scroll').forEach((each) => each.removeAttribute('tabindex'))")
    assert "scrollable-region-focusable" in {rule for rule, _, _ in broken_rules(page)}


@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_it_fits_and_axe_finds_nothing(opened, width, scheme):
    page = opened(width, scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    if folder := os.environ.get("KVFERRY_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"status-{width}-{scheme}.png", full_page=True)
    assert broken_rules(page) == []


def test_a_table_is_scrolled_by_keyboard_and_stays_where_it_is_when_numbers_change(opened, server):
    """The page is drawn anew each second: whoever reads a wide table on a phone is not thrown back."""
    page = opened(390)
    page.locator(".scroll").first.focus()
    deadline = time.monotonic() + 60.0
    while not page.evaluate("document.querySelector('.scroll').scrollLeft"):
        assert time.monotonic() < deadline
        page.keyboard.press("ArrowRight")
    page.evaluate("document.querySelector('.scroll').dataset.old = 'yes'")
    more = replace(BUSY, up_seconds=52.0, num_reads=77, counts={"read direct": 300.0})
    server.show(KNOWN.then(2.0, {"s": Look(EXPIRED), "d": Look(more)}), 2.0)
    # Not by a function: the page's own rules forbid texts that become code.
    page.locator(".scroll[data-old]").wait_for(state="detached", timeout=60_000)
    assert page.evaluate("document.activeElement === document.querySelector('.scroll')")
    assert page.evaluate("document.querySelector('.scroll').scrollLeft") > 0
