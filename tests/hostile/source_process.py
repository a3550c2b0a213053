"""A source engine with one rank in a process of its own, to be attacked: ``python source_process.py HOST``.

``KVFERRY_SECRET_FILE`` names its secret, if it has one. It says where it listens, and answers each line that
it reads: ``offer`` with a ticket, ``state`` with what it holds and how it is.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import zlib
from contextlib import suppress
from dataclasses import replace

import numpy as np

from kvferry import BlockTable, Identity, Manifest
from kvferry.endpoint import SourceEngine, SourceRank
from kvferry.endpoint.secret_source import secret_from_environment
from kvferry.models import Topology, describe, model_from_config
from kvferry.runtime import Timing
from kvferry.transport.nixl import NixlTransport
from kvferry.wire.ticket import to_text
from kvferry.wire.trust import Trust

MODEL = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 64}
BLOCKS, NUM_TOKENS = [5, 3, 9, 0, 2, 40, 41], 100
CANARY = b"\xc5KVcache\xc5"[:8]
"""Every second eight bytes of the cache. Nobody who has no ticket may see them."""
TIMING = Timing(lease=10, meet=10, read=20, retry=0.2)


def cache_bytes(num_bytes: int, seed: int) -> np.ndarray:
    """The canary, a number, the canary, a number; no byte is 0."""
    words = np.random.default_rng(seed).integers(1, 256, (num_bytes // 16 + 1, 16), dtype=np.uint8)
    words[:, :8] = np.frombuffer(CANARY, np.uint8)
    return words.ravel()[:num_bytes]


def with_memory(name: str) -> tuple[Manifest, dict[str, np.ndarray]]:
    manifest = describe(model_from_config(MODEL), Topology(block=16, blocks=64), name)
    (rank,) = manifest.ranks
    buffers = {region.name: np.zeros(region.num_bytes, np.uint8) for region in rank.regions}
    regions = tuple(replace(region, address=buffers[region.name].ctypes.data) for region in rank.regions)
    identity = Identity.of({"weights": "random, seed 7"})
    return replace(manifest, ranks=(replace(rank, regions=regions),), identity=identity), buffers


def trust() -> Trust:
    return Trust(secret_from_environment())


def memory_of(name: str) -> int:
    """MiB of this process, by the kernel's name for it."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) >> 10 for line in status if line.startswith(f"{name}:"))


class Stalls:
    """How long this process's own Python was held up: an engine's step loop would feel it."""

    def __init__(self) -> None:
        self._longest = 0.0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            before = time.monotonic()
            time.sleep(0.01)
            self._longest = max(self._longest, time.monotonic() - before - 0.01)

    def take(self) -> float:
        """The longest since the last time."""
        longest, self._longest = self._longest, 0.0
        return longest


def main() -> None:
    listen = f"tcp://{sys.argv[1]}:*"
    manifest, buffers = with_memory("prefill")
    for seed, buffer in enumerate(buffers.values()):
        buffer[:] = cache_bytes(len(buffer), seed)
    engine = SourceEngine("prefill", 1, listen=listen, trust=trust(), timing=TIMING)
    rank = SourceRank(
        engine.invitation, manifest, NixlTransport(), listen=listen, trust=trust(), timing=TIMING
    )
    while not (rank.is_joined and engine.is_whole):
        time.sleep(0.01)

    def checksum() -> int:
        return sum(zlib.crc32(buffer) for buffer in buffers.values())

    stalls, before, number = Stalls(), checksum(), 0
    said: dict[str, object] = {"pid": os.getpid(), "authority": engine.address}
    if gathering := getattr(rank, "_service", None):
        said |= {"rank": gathering.address, "streams": gathering._stream_address}
    print(json.dumps(said), flush=True)
    for line in sys.stdin:
        if line.strip() == "offer":
            engine.poll()
            rank.poll()
            number += 1
            ticket = engine.offer(f"request-{number}", {"full": BlockTable.of(BLOCKS)}, NUM_TOKENS)
            print(to_text(ticket), flush=True)
        else:
            said = {
                "rss": memory_of("VmRSS"),
                "peak": memory_of("VmHWM"),
                "stall": stalls.take(),
                "files": len(os.listdir("/proc/self/fd")),
                "is_written": checksum() != before,
                "engine": engine.status(),
                "rank": rank.status(),
            }
            print(json.dumps(said, default=str), flush=True)
            with suppress(OSError), open("/proc/self/clear_refs", "w", encoding="ascii") as peak:
                peak.write("5")  # from here on it is that of the time until the next answer
    rank.close()
    engine.close()


if __name__ == "__main__":
    main()
