"""Ranks to read from, in a process of their own: what the laws of a transport and its benchmark need.

    python -m tests.support.sources cpu 3 1048576 64

serves three ranks, each with two regions of so many bytes, until its input ends. It prints one
line: the cards and the addresses. Both sides know the contents: ``contents(source_index, region_index, …)``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from kvferry.cli.processes import gather_openly
from kvferry.core.manifest import Region
from kvferry.testing.transport_world import Source, contents
from kvferry.transport.process import ProcessTransport
from kvferry.transport.region_memory import RegionMemory

LISTEN = "SOURCES_LISTEN"
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Sources:
    """Ranks that another process serves."""

    sources: tuple[Source, ...]
    pid: int


@contextmanager
def serving(
    num_sources: int,
    region_bytes: Sequence[int],
    device: str = "cpu",
    env: Mapping[str, str] | None = None,
    *,
    enter: Callable[[], None] | None = None,
) -> Iterator[Sources]:
    """A process that serves ranks, until the end of the block.

    ``enter`` is called in it before anything else: it may move it to another network namespace. Where its
    ranks are asked to gather then is said by the variable ``SOURCES_LISTEN``.
    """
    command = [sys.executable, "-m", "tests.support.sources", device, str(num_sources)]
    process = subprocess.Popen(
        [*command, *map(str, region_bytes)],
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=enter,  # noqa: PLW1509  (UCX must find the network that it enters)
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        yield Sources(tuple(_told(process.stdout)), process.pid)
        process.stdin.close()
        process.wait(20)
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def _told(stdout: IO[str]) -> Iterator[Source]:
    for i, source in enumerate(json.loads(stdout.readline())):
        regions = tuple(Region(**region) for region in source["regions"])
        held = tuple(contents(i, j, region.num_bytes) for j, region in enumerate(regions))
        yield Source(bytes.fromhex(source["card"]), regions, held)


def _serve(device: str, num_sources: int, region_bytes: Sequence[int]) -> None:
    holders, transports, services, told = [], [], [], []
    for i in range(num_sources):
        holder, transport = RegionMemory(device), ProcessTransport()
        for j, num_bytes in enumerate(region_bytes):
            holder.add(f"region{j}", contents(i, j, num_bytes))
        transport.register(holder.regions)
        if transport.packed:
            listen = os.environ.get(LISTEN, "tcp://127.0.0.1:*")
            services.append(gather_openly(transport, listen))
        names = ("name", "num_bytes", "address", "device")
        regions = [{name: getattr(region, name) for name in names} for region in holder.regions]
        told.append({"card": transport.card().hex(), "regions": regions})
        holders.append(holder)
        transports.append(transport)
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    sys.stdin.read()
    for service in services:
        service.close()
    for transport in transports:
        transport.close()
    for holder in holders:
        holder.free()


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), [int(text) for text in sys.argv[3:]])
