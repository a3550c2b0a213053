"""Pages of ``--html`` in a real Chromium. ``make browser`` installs what drives it, and runs these."""

import json
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli import main
from tests.browser.chromium import MISSING, chromium

COMMANDS = {
    "gqa": "plan --model llama-3.1-70b --src tp=8 --dst tp=6",
    "kimi": "plan --model kimi-linear-48b --src tp=4,block=128 --dst tp=2,block=64",
    "deepseek": "plan --model deepseek-v3+kimi-k2.5-eagle3 --src tp=16 --dst tp=8",
    "refused": "plan --model deepseek-v3 --src tp=8 --dst tp=4,dtype=fp8",
    "diff": "diff --model qwen3-32b tp=8,block=16 tp=4,block=64,layout=NHD",
}


@dataclass(frozen=True)
class Written:
    """A page, and what ``--json`` said when it was written."""

    path: Path
    answer: Any

    @property
    def address(self) -> str:
        return self.path.as_uri()


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed: make browser")
    if not chromium():
        pytest.skip(MISSING)
    with api.sync_playwright() as playwright:
        # Containers have no room in /dev/shm, and no sandbox as root.
        started = playwright.chromium.launch(
            executable_path=chromium(), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield started
        started.close()


@pytest.fixture(scope="session")
def written(tmp_path_factory) -> Callable[[str], Written]:
    """The page of one of the commands, written once."""
    pytest.importorskip("jinja2")
    folder = tmp_path_factory.mktemp("pages")
    known: dict[str, Written] = {}

    def write(name: str) -> Written:
        if name not in known:
            path, out = folder / f"{name}.html", StringIO()
            with redirect_stdout(out):
                assert main([*COMMANDS[name].split(), "--json", "--html", str(path)]) in (0, 1)
            known[name] = Written(path, json.loads(out.getvalue()))
        return known[name]

    return write


@pytest.fixture
def opened(browser, written) -> Iterator[Callable[..., Any]]:
    """Open a page of one of the commands. What it asks the network for, or says on the console, is wrong."""
    contexts = []
    wrong: list[str] = []

    def open_page(name: str, width: int = 1280, scheme: str = "light", **options: Any) -> Any:
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, **options
        )
        contexts.append(context)
        page = context.new_page()
        address = written(name).address
        page.on("request", lambda request: wrong.extend({request.url} - {address}))
        page.on("console", lambda message: wrong.append(message.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []
