"""Manifests as files for ``kvferry plan``, which compares running deployments offline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvferry.core.manifest import Manifest
from kvferry.errors import SpecError
from kvferry.host.this_user import own_folder, write_private
from kvferry.log import log_of
from kvferry.wire import manifest_to_json
from kvferry.wire.messages import Join
from kvferry.wire.outline import manifest_of_joins
from kvferry.wire.reading import MAX_WORDS, printable

log = log_of(__name__)

MAX_ENGINE_CHARACTERS = 80
"""Maximum length of the engine's name in a file name."""


def dump_engine(folder: str, joins: Sequence[Join]) -> None:
    """Write the manifest of an engine, given the registrations of all its workers."""
    try:
        path = dump(folder, manifest_of_joins({join.rank: join for join in joins}), "")
    except (SpecError, OSError) as error:
        log.error("cannot write the engine's manifest: %s", error)
    else:
        log.info("engine manifest written to %s", path)


def dump_refusal(folder: str, src: Manifest, dst: Manifest, rank: int, reason: str) -> None:
    """Write both manifests of a rejected pair, and log the command that explains the rejection.

    ``folder`` defaults to a private one. The source's texts are escaped.
    """
    log.error("%s cannot be read by %s: %s", printable(src.engine), dst.engine, printable(reason, MAX_WORDS))
    try:
        home = folder or str(own_folder())
        src_path, dst_path = dump(home, src, "src-of-"), dump(home, dst, "dst-of-")
    except (SpecError, OSError) as error:
        log.error("cannot write the two manifests: %s", error)
    else:
        log.error("to diagnose offline: kvferry plan %s %s --dst-rank %d", src_path, dst_path, rank)


def dump(folder: str, manifest: Manifest, prefix: str) -> Path:
    ranks = "-".join(str(rank.rank) for rank in manifest.ranks) if len(manifest.ranks) < 5 else "all"
    engine = manifest.engine[:MAX_ENGINE_CHARACTERS]
    return write_private(folder, f"{prefix}{engine}-rank-{ranks}.json", manifest_to_json(manifest))
