"""Plans that the site shows as pictures, drawn while it is built by ``kvferry plan --svg`` and ``--html``.

A page says ``<!-- plan: hybrid -->`` where one belongs.
"""

from __future__ import annotations

import contextlib
import html
import io
import shlex
from pathlib import Path

from kvferry.cli import main

PLANS = {
    "heads": "kvferry plan --model llama-3.1-70b --src tp=8 --dst tp=6",
    "hybrid": "kvferry plan --model kimi-linear-48b --src tp=4,block=128 --dst tp=2,block=256",
    "draft": "kvferry plan --model kimi-k2.5+kimi-k2.5-eagle3 --src tp=16 --dst tp=8",
}
"""By the name that pages use: what is to be drawn."""

FRONT_PLAN = "kvferry plan --model qwen3-32b --src tp=2,block=16 --dst tp=4,block=64"
"""The picture of docs/index.md, docs/plan.svg; ``python tools/site_plans.py`` draws it anew."""


def draw(command: str, *pictures: Path) -> None:
    """Run a command, and have its pictures drawn besides."""
    options = [word for path in pictures for word in (f"--{path.suffix[1:]}", str(path))]
    with contextlib.redirect_stdout(io.StringIO()):
        code = main([*shlex.split(command)[1:], *options])
    if code:
        raise RuntimeError(f"{command} ended with {code}")


def draw_all(folder: Path) -> None:
    """Every plan as a drawing and as a page."""
    folder.mkdir(exist_ok=True)
    for name, command in PLANS.items():
        draw(command, folder / f"{name}.svg", folder / f"{name}.html")


def shown(name: str) -> str:
    """What a page of the site has in a plan's place: its drawing, which leads to its page."""
    command = html.escape(PLANS[name])
    page, drawing = f"pictures/{name}.html", f"pictures/{name}.svg"
    return (
        f'<p><a href="{page}"><img src="{drawing}" alt="who sends what: {command}"></a></p>'
        f'<p><code>{command}</code> · <a href="{page}">the same as a page</a>, with blocks and times</p>'
    )


if __name__ == "__main__":
    draw(FRONT_PLAN, Path(__file__).resolve().parents[1] / "docs" / "plan.svg")
