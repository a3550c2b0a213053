"""From values to text by templates, and to a file; the only file that imports Jinja."""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import kvferry
from kvferry.cli.options import at
from kvferry.cli.output import milliseconds, num_bytes
from kvferry.cli.picture.shapes import BAR_HEIGHT, STRIP_HEIGHT, WIDTH, number
from kvferry.core.words import counted
from kvferry.errors import SpecError

if TYPE_CHECKING:
    from jinja2 import Environment

    from kvferry.cli.manifest_diff import ManifestDiff
    from kvferry.cli.plan_answer import PlanAnswer
    from kvferry.core.manifest import Manifest


LIGHT = {
    "paper": "#fbfaf8",
    "card": "#ffffff",
    "ink": "#1b2330",
    "quiet": "#565f6e",
    "line": "#dcdad3",
    "soft": "#efede7",
    "good": "#1b6e4b",
    "bad": "#a8242f",
    "warn": "#8a4b08",
    "link": "#1d5fa8",
    "direct": "#0e7c86",
    "mapped": "#5a4fcf",
    "packed": "#b3590c",
    "memory": "#5b6675",
    "v0": "#2f6fb5",
    "v1": "#b3590c",
    "v2": "#2d8a57",
    "v3": "#8a56b8",
    "v4": "#a8475e",
    "v5": "#6b6f3a",
}
DARK = {
    "paper": "#12161d",
    "card": "#1a202a",
    "ink": "#e8eaee",
    "quiet": "#a3acba",
    "line": "#343c4a",
    "soft": "#232a36",
    "good": "#6bcf9f",
    "bad": "#ff8c93",
    "warn": "#f0b060",
    "link": "#86b9f5",
    "direct": "#42b8c2",
    "mapped": "#a59cff",
    "packed": "#f0984a",
    "memory": "#9aa5b4",
    "v0": "#6ea8e8",
    "v1": "#f0984a",
    "v2": "#62c08d",
    "v3": "#c095ea",
    "v4": "#e5889d",
    "v5": "#b5ba72",
}


TEMPLATES = Path(__file__).parent / "templates"
INSTALL = 'Jinja is not installed, which draws pages; install it with: pip install "kvferry[html]"'


def check_installed(option: str) -> None:
    """Raise SpecError if there is nothing to draw with."""
    try:
        import jinja2  # noqa: F401
    except ImportError:
        raise SpecError(f"{option}: {INSTALL}") from None


def render(template: str, **values: object) -> str:
    """A template with its values. Names come from strangers: everything is escaped."""
    environment = _environment()
    script = environment.get_template("page.js").render()
    # The page allows this one script and no other, whatever a name might smuggle in.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template(template).render(
        **values, script=script, script_hash=f"sha256-{digest}", version=kvferry.__version__
    )


def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

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
    """Without what no XML may contain: a name of a stranger must not make a file that nobody can open."""
    return (
        re.sub(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\ufffe\uffff]", "\ufffd", value)
        if type(value) is str
        else value
    )


def _seconds(value: float) -> str:
    return milliseconds(1e3 * value)


def _name_parts(text: str) -> list[str]:
    """Where a long name may be cut.

    >>> _name_parts("layers.{0-2,4}.attn/k")
    ['layers.', '{0-', '2,', '4}.', 'attn/', 'k']
    """
    return re.findall(r".[^-,./+]*[-,./+]*", text)


def _width(value: float) -> str:
    """A width that can be seen, however few bytes it is, with a gap to the next where there is room."""
    return number(value - 0.6 if value > 4 else max(0.6, value))


def check_pictures(asked: Mapping[str, Path | None]) -> None:
    """Raise SpecError, before any work, if one of these options names a file that cannot be drawn into.

    The ending is checked because a picture replaces what is there: an old picture, and never a manifest.
    """
    for option, path in asked.items():
        if path is None:
            continue
        suffix = f".{option.removeprefix('--')}"
        if path.suffix.lower() != suffix:
            raise SpecError(f"{option} {path}: the name must end in {suffix}")
        if not path.parent.is_dir():
            raise SpecError(f"{option} {path}: there is no folder {path.parent}")

        check_installed(option)


def draw_plan(answer: PlanAnswer, html: Path | None, svg: Path | None) -> None:
    if html is None and svg is None:
        return
    from kvferry.cli.picture.plan_picture import plan_picture, sheet

    picture = plan_picture(answer)
    if html is not None:
        _write(html, render("plan.html.j2", page=picture))
    if svg is not None:
        _write(svg, render("plan.svg.j2", page=picture, sheet=sheet(picture)))


def draw_diff(
    found: ManifestDiff, a: Manifest, b: Manifest, given: tuple[str, str], html: Path | None
) -> None:
    """Write the page that was asked for; ``given`` is what the two were called."""
    if html is None:
        return
    from kvferry.cli.picture.plan_picture import diff_picture

    _write(html, render("diff.html.j2", page=diff_picture(found, a, b, given)))


def _write(path: Path, text: str) -> None:
    """Write it whole or not at all: who has the old picture open never sees half of a new one."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with at(str(path)):
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
