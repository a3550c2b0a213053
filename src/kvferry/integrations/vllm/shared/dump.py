"""Manifests as files, for ``kvferry plan``: two running deployments can be compared offline."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path

from kvferry.core.manifest import Manifest
from kvferry.wire import manifest_to_json
from kvferry.wire.messages import Join
from kvferry.wire.outline import manifest_of_joins

log = logging.getLogger("kvferry")


def dump_engine(folder: str, joins: Sequence[Join]) -> None:
    """Write the manifest of an engine whose workers have all described themselves."""
    path = dump(folder, manifest_of_joins({join.rank: join for join in joins}), "")
    log.info("the engine's manifest is in %s", path)


def dump_refusal(folder: str, src: Manifest, dst: Manifest, rank: int, reason: str) -> None:
    """Write both sides of a meeting that failed, and the command that shows why."""
    src_path = dump(folder, src, "src-of-")
    dst_path = dump(folder, dst, "dst-of-")
    log.error(
        "%s cannot be read by %s: %s\nto see why, offline: kvferry plan %s %s --dst-rank %d",
        src.engine,
        dst.engine,
        reason,
        src_path,
        dst_path,
        rank,
    )


def dump(folder: str, manifest: Manifest, prefix: str) -> Path:
    """Write a manifest under the name of its engine and ranks."""
    ranks = "-".join(str(rank.rank) for rank in manifest.ranks) if len(manifest.ranks) < 5 else "all"
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", f"{prefix}{manifest.engine}-rank-{ranks}.json")
    path = Path(folder) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(manifest_to_json(manifest))
    return path
