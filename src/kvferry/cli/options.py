"""Shared by commands: options, parts of help texts, the origin of bad input."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Annotated

import typer

from kvferry.errors import RequestError, SpecError

TOPOLOGY_KEYS = {
    "tp": "tensor parallel ranks",
    "pp": "pipeline stages (pp=2), or the layers of each (pp=12+20)",
    "cp": "context-parallel ranks, with tokens interleaved",
    "interleave": "context-parallel interleave size, in tokens",
    "block": "tokens per block; default: the model's",
    "block.GROUP": "tokens per block of one group (block.window-1024=32)",
    "kernel": "tokens per kernel block; default: the block size",
    "blocks": "blocks in the pool; default: 4096, or what the request needs",
    "layout": "HND, NHD, HND-halves, NHD-apart, cross-layer, cpu-vec, opaque …, or an order of the letters"
    " LBHNKC (layer block head token K|V channel), outermost first",
    "conv": "convolution states time-major (SD, the default) or channel-major (DS)",
    "dtype": "of attention caches: bf16, fp16, fp8_e4m3 …; default: the model's",
    "alloc": "separate: a region per layer; shared: groups share regions; auto (the default): shared if"
    " layers are of several kinds",
}
"""The keys of a topology (``--src tp=4,block=16``)."""

_COLUMN = 14


def topology_help() -> str:
    """The keys as a block that Click does not wrap, of 78 columns."""
    import textwrap

    lines = ["\b", "A topology is key=value,key=value with these keys, all optional:"]
    for key, meaning in TOPOLOGY_KEYS.items():
        indent = " " * _COLUMN
        text = textwrap.fill(meaning, 78, initial_indent=f"  {key:<{_COLUMN - 2}}", subsequent_indent=indent)
        lines += text.splitlines()
    return "\n".join(lines)


def examples(*lines: str) -> str:
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Model = Annotated[str, typer.Option("--model", metavar="NAME", help="A model of `kvferry models`.")]
Config = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="A model's config.json.")]


@contextmanager
def at(place: str) -> Iterator[None]:
    """Prefix errors with the origin of bad input: a file, or an option with its value."""
    try:
        yield
    except (SpecError, RequestError) as error:
        raise SpecError(f"{place}: {error}") from None
    except OSError as error:
        raise SpecError(f"{place}: {error.strerror or error}") from None


def check_output(option: str, path: Path | None, suffix: str = "") -> None:
    """Raise SpecError, before any work, for a file that ``write_output`` could not write.

    It replaces an existing file: the suffix protects manifests.
    """
    if path is None:
        return
    with at(f"{option} {path}"):
        if not path.name.lower().endswith(suffix):
            raise SpecError(f"the name must end in {suffix}")
        if path.is_dir():
            raise SpecError("Is a directory")
        if path.is_file():
            path.open("ab").close()
        elif not path.exists():
            part = _part(path)
            part.touch(exist_ok=False)
            part.unlink()


IN_PLACE = {errno.EACCES, errno.EBUSY, errno.EPERM, errno.EROFS, errno.EXDEV}
"""Errors of a folder that keeps its entries: the file itself may be writable, or mounted there."""


def write_output(path: Path, data: bytes) -> None:
    """Replace a file, if possible in one step; a device or a pipe is written directly."""
    with at(str(path)):
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        part = _part(path)
        try:
            with part.open("xb") as file:
                file.write(data)
            if path.exists():
                shutil.copymode(path, part)
            part.replace(os.path.realpath(path))
        except OSError as error:
            if error.errno not in IN_PLACE:
                raise
            path.write_bytes(data)
        finally:
            part.unlink(missing_ok=True)


def _part(path: Path) -> Path:
    """A new name beside a file, or beside what it links to."""
    return Path(os.path.realpath(path)).with_name(f".kvferry-{token_hex(8)}.part")
