"""A source engine with one rank in a process of its own, to be attacked: ``python source_process.py HOST``.

``KVFERRY_SECRET_FILE`` names its secret, if it has one. It says where it listens, and answers each line that
it reads: ``offer`` with a ticket, ``state`` with what it holds and how it is. ``through ADDRESS`` has readers
call its streams there; ``lie SEED`` has its rank lie to them, and ``lie`` no more; ``cut`` ends all streams,
so that new ones are asked for. ``descriptors`` opens a socket that hands out a descriptor, as a rank with
device memory has, and is answered with its name and token.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
import zlib
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np

from kvferry import BlockTable, Identity, Manifest
from kvferry.endpoint import SourceEngine, SourceRank
from kvferry.endpoint.secret_source import secret_from_environment
from kvferry.models import Topology, describe, model_from_config
from kvferry.runtime import Timing
from kvferry.transport.exports import DescriptorServer
from kvferry.transport.process import ProcessTransport
from kvferry.wire.secret import Trust
from kvferry.wire.ticket import to_text
from tests.fuzz.mutations import mutated

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


class Liar:
    """What a rank that has gone wrong says instead of what it should."""

    def __init__(self, service: Any) -> None:
        self._send = service._channel.send
        self._pick: random.Random | None = None
        service._channel.send = self._say

    def lie(self, seed: str) -> None:
        """From now on; without a seed, no more."""
        self._pick = random.Random(seed) if seed else None

    def _say(self, to: str, data: bytes) -> None:
        if pick := self._pick:
            data = self._lie(pick, data)
        self._send(to, data)

    @staticmethod
    def _lie(pick: random.Random, data: bytes) -> bytes:
        message = msgspec.msgpack.decode(data)
        lies: dict[str, object] = {
            "nonce": pick.getrandbits(63),
            "address": pick.choice(
                ("tcp://127.0.0.1:1", "tcp://127.0.0.1:99999", "no address", "", "tcp://[::1]")
            ),
            "stream_id": pick.randbytes(pick.choice((0, 1, 16, 5000))),
            "key": pick.randbytes(pick.choice((0, 1, 15, 16, 32, 5000))),
            "code": "x" * pick.choice((1, 300)),
        }
        name = pick.choice([*message])
        if name in lies and pick.random() < 0.7:
            return msgspec.msgpack.encode(message | {name: lies[name]})
        return mutated(pick, data)


def cut(sender: Any) -> None:
    for stream in [*sender._streams.values()]:
        sender._drop(stream)


def main() -> None:
    listen = f"tcp://{sys.argv[1]}:*"
    manifest, buffers = with_memory("prefill")
    for seed, buffer in enumerate(buffers.values()):
        buffer[:] = cache_bytes(len(buffer), seed)
    engine = SourceEngine("prefill", 1, listen=listen, trust=trust(), timing=TIMING)
    rank = SourceRank(
        engine.invitation, manifest, ProcessTransport(), listen=listen, trust=trust(), timing=TIMING
    )
    while not (rank.is_joined and engine.is_whole):
        time.sleep(0.01)

    def checksum() -> int:
        return sum(zlib.crc32(buffer.tobytes()) for buffer in buffers.values())

    stalls, before, number = Stalls(), checksum(), 0
    said: dict[str, object] = {"pid": os.getpid(), "authority": engine.address}
    gathering: Any = rank._service
    straight, liar = gathering._stream_address, Liar(gathering)
    said |= {"rank": gathering.address, "streams": straight}
    print(json.dumps(said), flush=True)
    for line in sys.stdin:
        if line.strip() == "offer":
            engine.poll()
            rank.poll()
            number += 1
            ticket = engine.offer(f"request-{number}", {"full": BlockTable.of(BLOCKS)}, NUM_TOKENS)
            print(to_text(ticket), flush=True)
        elif line.startswith("through"):
            gathering._stream_address = line.removeprefix("through").strip() or straight
            print("", flush=True)
        elif line.strip() == "descriptors":
            descriptors = DescriptorServer([os.open(os.devnull, os.O_RDONLY)])
            print(f"{descriptors.name} {descriptors.token}", flush=True)
        elif line.strip() == "cut":
            gathering._streams.put(partial(cut, gathering._streams))
            print("", flush=True)
        elif line.startswith("lie"):
            liar.lie(line.removeprefix("lie").strip())
            print("", flush=True)
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
