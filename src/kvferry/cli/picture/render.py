"""From values to text, by templates; the only file that imports Jinja."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import TYPE_CHECKING

import kvferry
from kvferry.cli.output import milliseconds, num_bytes
from kvferry.cli.picture.colours import DARK, LIGHT
from kvferry.cli.picture.shapes import BAR_HEIGHT, STRIP_HEIGHT, WIDTH, number
from kvferry.core.words import counted
from kvferry.errors import SpecError

if TYPE_CHECKING:
    from jinja2 import Environment

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
