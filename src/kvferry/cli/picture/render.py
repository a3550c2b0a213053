"""Templates to text and files; the only file that imports Jinja."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import kvferry
from kvferry.cli.options import check_output, write_output
from kvferry.cli.output import milliseconds, num_bytes
from kvferry.cli.picture.shapes import BAR_HEIGHT, STRIP_HEIGHT, WIDTH, number, tick_words
from kvferry.errors import SpecError, counted

if TYPE_CHECKING:
    from jinja2 import Environment

    from kvferry.cli.manifest_diff import ManifestDiff
    from kvferry.cli.plan_answer import PlanAnswer
    from kvferry.core.manifest import Manifest


COLOURS = {
    "paper": ("#fbfaf8", "#12161d"),
    "card": ("#ffffff", "#1a202a"),
    "ink": ("#1b2330", "#e8eaee"),
    "quiet": ("#565f6e", "#a3acba"),
    "line": ("#dcdad3", "#343c4a"),
    "soft": ("#efede7", "#232a36"),
    "good": ("#1b6e4b", "#6bcf9f"),
    "bad": ("#a8242f", "#ff8c93"),
    "warn": ("#8a4b08", "#f0b060"),
    "link": ("#1d5fa8", "#86b9f5"),
    "direct": ("#0e7c86", "#42b8c2"),
    "mapped": ("#5a4fcf", "#a59cff"),
    "packed": ("#b3590c", "#f0984a"),
    "memory": ("#5b6675", "#9aa5b4"),
    "v0": ("#2f6fb5", "#6ea8e8"),
    "v1": ("#b3590c", "#f0984a"),
    "v2": ("#2d8a57", "#62c08d"),
    "v3": ("#8a56b8", "#c095ea"),
    "v4": ("#a8475e", "#e5889d"),
    "v5": ("#6b6f3a", "#b5ba72"),
}
"""On a light page, and on a dark one."""
LIGHT, DARK = ({name: both[i] for name, both in COLOURS.items()} for i in (0, 1))
TEMPLATES = Path(__file__).parent / "templates"
INSTALL = 'Jinja is not installed: pip install ".[html]" in a clone of kvferry'


def check_installed(option: str) -> None:
    try:
        import jinja2  # noqa: F401
    except ImportError:
        raise SpecError(f"{option}: {INSTALL}") from None


def render(template: str, page: dict[str, object]) -> str:
    """A template with its values, which are escaped."""
    environment = _environment()
    script = environment.get_template("page.js").render()
    # The page allows this script only.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template(template).render(
        page=page, script=script, script_hash=f"sha256-{digest}", version=kvferry.__version__
    )


def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    from kvferry.cli.output import together
    from kvferry.cli.picture.plan_picture import label_lines

    made = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "bytes": num_bytes,
        "seconds": _seconds,
        "number": number,
        "width": _width,
        "name_parts": _name_parts,
        "label_lines": label_lines,
        "tick_words": tick_words,
        "together": together,
    }
    made.globals |= {
        "LIGHT": LIGHT,
        "DARK": DARK,
        "counted": counted,
        "W": WIDTH,
        "H": STRIP_HEIGHT,
        "BAR": BAR_HEIGHT,
    }
    return made


def _printable(value: object) -> object:
    """Without characters that XML forbids."""
    return (
        re.sub(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\ufffe\uffff]", "\ufffd", value)
        if type(value) is str
        else value
    )


def _seconds(value: float) -> str:
    return milliseconds(1e3 * value)


def _name_parts(text: str) -> list[str]:
    """Where a long name may wrap.

    >>> _name_parts("layers.{0-2,4}.attn/k")
    ['layers.', '{0-', '2,', '4}.', 'attn/', 'k']
    """
    return re.findall(r".[^-,./+]*[-,./+]*", text)


def _width(value: float) -> str:
    """At least visible, and with a gap to the next if there is room."""
    return number(value - 0.6 if value > 4 else max(0.6, value))


def check_pictures(asked: Mapping[str, Path | None]) -> None:
    """Raise SpecError, before any work, for unusable files of these options."""
    for option, path in asked.items():
        if path is not None:
            check_output(option, path, f".{option.removeprefix('--')}")
            check_installed(option)


def draw_plan(answer: PlanAnswer, html: Path | None, svg: Path | None) -> None:
    if html is None and svg is None:
        return
    from kvferry.cli.picture.plan_picture import plan_page

    page = plan_page(answer)
    for path, template in ((html, "plan.html.j2"), (svg, "plan.svg.j2")):
        if path is not None:
            write_output(path, render(template, page).encode())


def draw_diff(
    found: ManifestDiff, a: Manifest, b: Manifest, given: tuple[str, str], html: Path | None
) -> None:
    """``given``: the arguments of the two sides."""
    if html is None:
        return
    from kvferry.cli.picture.plan_picture import diff_page

    write_output(html, render("diff.html.j2", diff_page(found, a, b, given)).encode())
