"""Time from the end of a prefill to the end of the load: with overlap, without, and vLLM's own connector.

    python -m benchmarks.overlap                        16,384 and 32,768 tokens, 16 chunks, prefill of 2 s
    python -m benchmarks.overlap 4096 --chunks 8 --seconds 0.5
    python -m benchmarks.overlap 16384 --gbps 4         two network namespaces, joined at 4 Gb/s (needs root)

Two processes, packed reads over TCP; the cache of Llama-3.1-8B in bf16 (128 KiB per token), blocks of 32
tokens on both sides, in random order. The prefill is simulated: each chunk completes after its share of the
seconds. Without --gbps, the processes use loopback and no secret; with it, each has a network namespace of
its own, and the streams are encrypted. In an environment with vLLM, the worker of vLLM's own connector
moves the same blocks over UCX's TCP, from the prefill's end on: NixlConnector's reads; with --push,
NixlPushConnector's writes to a reader that has registered before. The modes take turns. Reported: the median,
and all times.
"""

from __future__ import annotations

import argparse
import importlib.util
import multiprocessing
import os
import subprocess
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import StrEnum
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import numpy as np

from benchmarks.nixl_worker import LOOPBACK, NixlPushEnd, NixlReader, NixlSource, WorkerCaches
from kvferry import BlockTable, Identity, Manifest, need_of
from kvferry.endpoint import Destination, SourceEngine, SourceRank
from kvferry.models import Topology, describe, model_named
from kvferry.transport.process import ProcessTransport
from kvferry.transport.settings import WayChoice
from kvferry.wire.secret import Secret, Trust
from tests.two_hosts import Host, two_hosts

MODEL, BLOCK = model_named("llama-3.1-8b"), 32
IDENTITY = Identity.of({"weights": "none: a benchmark"})
SECRET = Secret(bytes(range(32)))
WARM_UPS = 1
READ_SECONDS = 600.0


class Mode(StrEnum):
    AFTER = "without overlap"
    OVERLAP = "with overlap"
    NIXL = "NixlConnector"
    PUSH = "NixlPushConnector"


@dataclass(frozen=True)
class Case:
    num_tokens: int
    num_chunks: int
    seconds: float
    modes: tuple[Mode, ...]
    folder: str
    """vLLM's worker needs a model folder."""

    @property
    def worker(self) -> WorkerCaches:
        return WorkerCaches(self.folder, 32, self.num_tokens // BLOCK, 8, 128, BLOCK)

    def blocks(self, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).permutation(self.num_tokens // BLOCK)


@dataclass(frozen=True)
class Side:
    """One end of the link."""

    host: Host | None = None
    """None: this one, over loopback."""

    def enter(self) -> None:
        if self.host is None:
            return
        self.host.enter()
        os.environ |= {"UCX_NET_DEVICES": "cable"}

    @property
    def address(self) -> str:
        return self.host.address if self.host else LOOPBACK

    @property
    def trust(self) -> Trust:
        return Trust(SECRET) if self.host else Trust()


def with_memory(case: Case, engine: str) -> tuple[Manifest, np.ndarray]:
    """A manifest, and its memory in one piece; its pages are touched before any time is taken."""
    manifest = describe(MODEL, Topology(block=BLOCK, blocks=case.num_tokens // BLOCK), engine)
    (rank,) = manifest.ranks
    buffer = np.ones(sum(region.num_bytes for region in rank.regions), np.uint8)
    regions, address = [], buffer.ctypes.data
    for region in rank.regions:
        regions.append(replace(region, address=address))
        address += region.num_bytes
    rank = replace(rank, regions=tuple(regions))
    return replace(manifest, ranks=(rank,), identity=IDENTITY), buffer


def whole(manifest: Manifest, buffer: np.ndarray) -> Any:
    """The memory as one region."""
    region = manifest.ranks[0].regions[0]
    return replace(region, num_bytes=buffer.nbytes)


class Prefill:
    """The source's process."""

    def __init__(self, case: Case, side: Side) -> None:
        side.enter()
        self._case = case
        manifest, memory = with_memory(case, "prefill")
        listen = f"tcp://{side.address}:*"
        self._engine = SourceEngine("prefill", num_ranks=1, listen=listen, trust=side.trust)
        transport = ProcessTransport(way=WayChoice.PACKED)
        self._rank = SourceRank(self._engine.invitation, manifest, transport, listen=listen, trust=side.trust)
        self._group, self._ids = manifest.groups[0].name, case.blocks(1)
        self._nixl = None
        if Mode.NIXL in case.modes:
            self._nixl = NixlSource(case.worker, whole(manifest, memory), memory, host=side.address)
        self._push = None
        if Mode.PUSH in case.modes:
            region = whole(manifest, memory)
            self._push = NixlPushEnd("kv_producer", case.worker, region, memory, host=side.address)
        while not self._engine.is_whole:
            time.sleep(0.01)

    def serve(self, pipe: Connection) -> None:
        while (asked := pipe.recv()) is not None:
            self._turn(pipe, *asked)
        self._rank.close()
        self._engine.close()

    def _turn(self, pipe: Connection, number: int, mode: Mode) -> None:
        case, name = self._case, f"request {number}"
        table, started = {self._group: BlockTable.of(self._ids)}, time.monotonic()
        if mode is Mode.OVERLAP:
            growing = self._engine.open(name, {}, case.num_tokens, transfer=f"transfer {number}")
            pipe.send(growing.ticket)
        if mode is Mode.PUSH:
            assert self._push is not None
            pipe.send(self._push.at(name))
        for chunk in range(1, case.num_chunks + 1):
            time.sleep(max(0.0, started + case.seconds * chunk / case.num_chunks - time.monotonic()))
            if mode is Mode.OVERLAP and chunk < case.num_chunks:
                growing.grow(table, case.num_tokens * chunk // case.num_chunks)
        ended = time.monotonic()
        if mode is Mode.NIXL:
            assert self._nixl is not None
            pipe.send((ended, self._nixl.offer(name, self._ids.tolist())))
            return
        if mode is Mode.PUSH:
            assert self._push is not None
            pipe.send((ended, None))
            self._push.push(name, self._ids.tolist(), READ_SECONDS)
            return
        is_growing = mode is Mode.OVERLAP
        offer = growing.close(table) if is_growing else self._engine.offer(name, table, case.num_tokens)
        pipe.send((ended, offer))
        while not self._engine.poll():
            time.sleep(0.001)


def prefill(pipe: Connection, case: Case, side: Side) -> None:
    Prefill(case, side).serve(pipe)


class Decode:
    """The destination's process."""

    def __init__(self, case: Case, side: Side) -> None:
        side.enter()
        self._case = case
        manifest, memory = with_memory(case, "decode")
        self._destination = Destination(manifest, 0, ProcessTransport(way=WayChoice.PACKED), trust=side.trust)
        (group,), self._ids = manifest.groups, case.blocks(2)
        self._early = frozenset({group.name})
        self._tables = {group.name: BlockTable.of(self._ids)}
        self._need = {group.name: need_of(group, case.num_tokens)}
        self._nixl = None
        if Mode.NIXL in case.modes:
            self._nixl = NixlReader(case.worker, whole(manifest, memory), memory, host=side.address)
        self._push = None
        if Mode.PUSH in case.modes:
            region = whole(manifest, memory)
            self._push = NixlPushEnd("kv_consumer", case.worker, region, memory, host=side.address)

    def turn(self, prefill: Connection, number: int, mode: Mode) -> tuple[float, int, int]:
        """Seconds from the prefill's end to the report; bytes, and bytes read after that end."""
        prefill.send((number, mode))
        if mode is Mode.OVERLAP:
            self._destination.fetch(prefill.recv(), self._tables, self._need, early=self._early)
        if mode is Mode.PUSH:
            assert self._push is not None
            source = prefill.recv()
            self._push.register(source, self._ids.tolist())
            ended, _ = prefill.recv()
            self._push.wait(source.request_id, READ_SECONDS)
            return time.monotonic() - ended, 0, 0
        ended, offer = prefill.recv()
        if mode is Mode.NIXL:
            assert self._nixl is not None
            self._nixl.load(offer, self._ids.tolist(), READ_SECONDS)
            return time.monotonic() - ended, 0, 0
        if mode is Mode.AFTER:
            self._destination.fetch(offer, self._tables, self._need)
        while not (reports := self._destination.poll()):
            time.sleep(0.0005)
        wait, record = time.monotonic() - ended, reports[0].record
        if reports[0].failure is not None:
            raise SystemExit(f"the load failed: {reports[0].failure}")
        return wait, record.num_bytes, record.num_bytes - record.early_bytes

    def close(self) -> None:
        self._destination.close()


def decode(pipe: Connection, prefill: Connection, case: Case, side: Side) -> None:
    reader = Decode(case, side)
    while (asked := pipe.recv()) is not None:
        pipe.send(reader.turn(prefill, *asked))
    reader.close()
    prefill.send(None)


def measure(case: Case, sides: tuple[Side, Side], turns: int) -> None:
    (asking, asked), (left, right) = multiprocessing.Pipe(), multiprocessing.Pipe()
    processes = (
        multiprocessing.Process(target=prefill, args=(right, case, sides[0]), daemon=True),
        multiprocessing.Process(target=decode, args=(asked, left, case, sides[1]), daemon=True),
    )
    for process in processes:
        process.start()
    for end in (asked, left, right):
        end.close()  # so that the death of one process ends the others
    waits: dict[Mode, list[float]] = {mode: [] for mode in case.modes}
    late_share = 0.0
    for number in range((WARM_UPS + turns) * len(case.modes)):
        mode = case.modes[number % len(case.modes)]
        asking.send((number, mode))
        wait, num_bytes, late_bytes = asking.recv()
        if number >= WARM_UPS * len(case.modes):
            waits[mode].append(wait)
        if mode is Mode.OVERLAP:
            late_share = late_bytes / num_bytes
    asking.send(None)
    for process in processes:
        process.join()
    gib = case.num_tokens * (128 << 10) / (1 << 30)
    print(f"{case.num_tokens} tokens, {gib:.2f} GiB, {case.num_chunks} chunks in {case.seconds:g} s")
    for mode, times in waits.items():
        each = ", ".join(f"{one * 1e3:.0f}" for one in sorted(times))
        print(f"    {mode:16} {median(times) * 1e3:8.0f} ms  ({each})")
    last = 1 / case.num_chunks
    print(f"    read after the end: {late_share:.1%} of the bytes; last chunk: {last:.1%}", flush=True)


def limit(host: Host, gbps: float) -> None:
    """Limit what a host sends."""
    shape = ["tbf", "rate", f"{gbps}gbit", "burst", "4mb", "latency", "50ms"]
    command = ["tc", "-n", host.name, "qdisc", "add", "dev", "cable", "root", *shape]
    subprocess.run(command, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap")
    parser.add_argument("tokens", type=int, nargs="*", default=[16_384, 32_768])
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=2.0, help="duration of the prefill")
    parser.add_argument("--gbps", type=float, help="join two network namespaces by a link of this speed")
    parser.add_argument("--push", action="store_true", help="beside vLLM's push, not its pull")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    has_vllm = importlib.util.find_spec("vllm") is not None
    rival = (Mode.PUSH if args.push else Mode.NIXL,) if has_vllm else ()
    modes = (Mode.AFTER, Mode.OVERLAP, *rival)  # one rival: its threads take a part of the cores all the time
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        sides = Side(), Side()
        if args.gbps:
            hosts = stack.enter_context(two_hosts())
            for host in hosts:
                limit(host, args.gbps)
            sides = Side(hosts[0]), Side(hosts[1])
        for num_tokens in args.tokens:
            measure(Case(num_tokens, args.chunks, args.seconds, modes, folder), sides, args.turns)


if __name__ == "__main__":
    os.environ.setdefault("UCX_TLS", "tcp,self")  # of vLLM's worker
    multiprocessing.set_start_method("spawn")
    main()
