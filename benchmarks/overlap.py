"""How long a decode engine waits after the prefill's end, with overlap and without.

    python -m benchmarks.overlap                    16,384 and 32,768 tokens, 16 chunks, prefill of 2 s
    python -m benchmarks.overlap 4096 8 0.5         other tokens, chunks, seconds

Two processes of one host, packed reads over TCP on loopback, without a secret; the cache of Llama-3.1-8B in
bf16 (128 KiB per token), blocks of 16 tokens on both sides, in no order. The prefill is a clock: a chunk is
complete each time its share of the seconds has passed. Both modes take turns. Times are from the end of the
prefill until the load is reported: the median, and all of them.
"""

from __future__ import annotations

import multiprocessing
import sys
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from statistics import median

import numpy as np

from kvferry import BlockTable, Identity, Manifest, need_of
from kvferry.endpoint import Destination, SourceEngine, SourceRank
from kvferry.models import Topology, describe, model_named
from kvferry.transport.process import ProcessTransport
from kvferry.transport.settings import WayChoice

MODEL, BLOCK, TURNS = model_named("llama-3.1-8b"), 16, 3
IDENTITY = Identity.of({"weights": "none: a benchmark"})


def with_memory(num_tokens: int, engine: str) -> tuple[Manifest, list[np.ndarray]]:
    """A manifest of so many tokens' blocks, in memory whose pages are there before the clock runs."""
    manifest = describe(MODEL, Topology(block=BLOCK, blocks=num_tokens // BLOCK), engine)
    (rank,) = manifest.ranks
    buffers = [np.ones(region.num_bytes, np.uint8) for region in rank.regions]
    regions = tuple(
        replace(region, address=buffer.ctypes.data)
        for region, buffer in zip(rank.regions, buffers, strict=True)
    )
    return replace(manifest, ranks=(replace(rank, regions=regions),), identity=IDENTITY), buffers


def blocks(num_tokens: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).permutation(num_tokens // BLOCK)


def prefill(pipe: Connection, num_tokens: int, num_chunks: int, seconds: float) -> None:
    manifest, _memory = with_memory(num_tokens, "prefill")
    engine = SourceEngine("prefill", num_ranks=1)
    rank = SourceRank(engine.invitation, manifest, ProcessTransport(way=WayChoice.PACKED))
    (group,), ids = manifest.groups, blocks(num_tokens, 1)
    while not engine.is_whole:
        time.sleep(0.01)
    while (asked := pipe.recv()) is not None:
        number, has_overlap = asked
        table = {group.name: BlockTable.of(ids)}
        started = time.monotonic()
        if has_overlap:
            growing = engine.open(f"request {number}", {}, num_tokens, transfer=f"transfer {number}")
            pipe.send(growing.ticket)
        for chunk in range(1, num_chunks + 1):
            time.sleep(max(0.0, started + seconds * chunk / num_chunks - time.monotonic()))
            if has_overlap and chunk < num_chunks:
                growing.grow(table, num_tokens * chunk // num_chunks)
        ended = time.monotonic()
        ticket = growing.close(table) if has_overlap else engine.offer(f"request {number}", table, num_tokens)
        pipe.send((ended, ticket))
        while not engine.poll():
            time.sleep(0.001)
    rank.close()
    engine.close()


def measure(num_tokens: int, num_chunks: int, seconds: float) -> None:
    ours, theirs = multiprocessing.Pipe()
    source = multiprocessing.Process(target=prefill, args=(theirs, num_tokens, num_chunks, seconds))
    source.start()
    manifest, _memory = with_memory(num_tokens, "decode")
    destination = Destination(manifest, 0, ProcessTransport(way=WayChoice.PACKED))
    (group,) = manifest.groups
    tables = {group.name: BlockTable.of(blocks(num_tokens, 2))}
    need = {group.name: need_of(group, num_tokens)}
    waits: dict[bool, list[float]] = {True: [], False: []}
    late_bytes = num_bytes = 0
    for number in range(2 * TURNS + 2):
        has_overlap = bool(number % 2)
        ours.send((number, has_overlap))
        if has_overlap:
            destination.fetch(ours.recv(), tables, need, early=frozenset({group.name}))
        ended, ticket = ours.recv()
        if not has_overlap:
            destination.fetch(ticket, tables, need)
        while not (reports := destination.poll()):
            time.sleep(0.0005)
        wait, record = time.monotonic() - ended, reports[0].record
        if reports[0].failure is not None:
            raise SystemExit(f"the load failed: {reports[0].failure}")
        if number >= 2:  # the first of each meets, and warms up
            waits[has_overlap].append(wait)
        if has_overlap:
            num_bytes, late_bytes = record.num_bytes, record.num_bytes - record.early_bytes
    ours.send(None)
    source.join()
    destination.close()
    shown = {
        name: f"{median(times) * 1e3:8.0f} ms  ({', '.join(f'{each * 1e3:.0f}' for each in sorted(times))})"
        for name, times in (("without overlap", waits[False]), ("with overlap", waits[True]))
    }
    print(f"{num_tokens} tokens, {num_bytes / (1 << 30):.2f} GiB, {num_chunks} chunks in {seconds:g} s")
    for name, text in shown.items():
        print(f"    {name:16} {text}")
    print(
        f"    read after the end: {late_bytes / num_bytes:.1%} of the bytes; last chunk: {1 / num_chunks:.1%}"
    )


def main() -> None:
    asked = sys.argv[1:]
    sizes = [int(asked[0])] if asked else [16_384, 32_768]
    num_chunks = int(asked[1]) if len(asked) > 1 else 16
    seconds = float(asked[2]) if len(asked) > 2 else 2.0
    for num_tokens in sizes:
        measure(num_tokens, num_chunks, seconds)


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    main()
