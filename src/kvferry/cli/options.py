"""Shared by commands: options, parts of help texts, the origin of bad input."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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
        if not _is_device(path):
            _part(path).touch()
            _part(path).unlink()


def write_output(path: Path, data: bytes) -> None:
    """Replace a file atomically; a device or a pipe is written directly."""
    with at(str(path)):
        if _is_device(path):
            path.write_bytes(data)
            return
        part = _part(path)
        try:
            part.write_bytes(data)
            part.replace(path.resolve())
        finally:
            part.unlink(missing_ok=True)


def _part(path: Path) -> Path:
    return path.resolve().with_name(f".kvferry-{os.getpid()}.part")


def _is_device(path: Path) -> bool:
    return path.exists() and not path.is_file()
