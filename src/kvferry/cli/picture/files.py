"""Pictures as files: whether one can be written, and writing it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from kvferry.cli.bad_input import at
from kvferry.errors import SpecError

if TYPE_CHECKING:
    from kvferry.cli.manifest_diff import ManifestDiff
    from kvferry.cli.plan_answer import PlanAnswer
    from kvferry.core.manifest import Manifest


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
        from kvferry.cli.picture.render import check_installed

        check_installed(option)


def draw_plan(answer: PlanAnswer, html: Path | None, svg: Path | None) -> None:
    """Write the pictures that were asked for."""
    if html is None and svg is None:
        return
    from kvferry.cli.picture.plan_picture import plan_picture
    from kvferry.cli.picture.render import render
    from kvferry.cli.picture.sheet import sheet

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
    from kvferry.cli.picture.diff_picture import diff_picture
    from kvferry.cli.picture.render import render

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
