"""Which sockets processes and their children listen on."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kvferry.host.listening import Listener, listeners


def listeners_of(pids: Iterable[int]) -> set[Listener]:
    """All sockets that these processes listen on; one that has ended has none."""
    found: set[Listener] = set()
    for pid in pids:
        try:
            found |= listeners(pid)
        except OSError:
            continue
    return found


def family_of(pid: int) -> list[int]:
    """A process and all that descend from it."""
    pids = [pid]
    for each in pids:
        for path in Path(f"/proc/{each}/task").glob("*/children"):
            try:
                pids += map(int, path.read_text(encoding="ascii").split())
            except OSError:
                continue  # it has ended
    return pids
