"""Manifests as files, for ``kvferry plan``: two running deployments can be compared offline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvferry.core.manifest import Manifest
from kvferry.errors import SpecError
from kvferry.host.private_files import own_folder, write_private
from kvferry.log import log_of
from kvferry.wire import manifest_to_json
from kvferry.wire.messages import Join
from kvferry.wire.outline import manifest_of_joins
from kvferry.wire.reading import MAX_WORDS, printable

log = log_of(__name__)

MAX_ENGINE_CHARACTERS = 80
"""Of an engine's name, in the name of its file."""


def dump_engine(folder: str, joins: Sequence[Join]) -> None:
    """Write the manifest of an engine whose workers have all described themselves."""
    try:
        path = dump(folder, manifest_of_joins({join.rank: join for join in joins}), "")
    except (SpecError, OSError) as error:
        log.error("the engine's manifest could not be written: %s", error)
    else:
        log.info("the engine's manifest is in %s", path)


def dump_refusal(folder: str, src: Manifest, dst: Manifest, rank: int, reason: str) -> None:
    """Write both sides of a meeting that failed, and the command that shows why.

    ``folder``: by default one of this user's own. The names in the source's manifest, and so in the reason,
    are the source's: they stay on their line.
    """
    log.error("%s cannot be read by %s: %s", printable(src.engine), dst.engine, printable(reason, MAX_WORDS))
    try:
        home = folder or str(own_folder())
        src_path, dst_path = dump(home, src, "src-of-"), dump(home, dst, "dst-of-")
    except (SpecError, OSError) as error:
        log.error("the two manifests could not be written: %s", error)
    else:
        log.error("to see why, offline: kvferry plan %s %s --dst-rank %d", src_path, dst_path, rank)


def dump(folder: str, manifest: Manifest, prefix: str) -> Path:
    ranks = "-".join(str(rank.rank) for rank in manifest.ranks) if len(manifest.ranks) < 5 else "all"
    engine = manifest.engine[:MAX_ENGINE_CHARACTERS]
    return write_private(folder, f"{prefix}{engine}-rank-{ranks}.json", manifest_to_json(manifest))
