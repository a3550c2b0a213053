"""Two engines in two processes: one offers a request, the other fetches it.

    python examples/two_processes.py

An engine needs a manifest of its memory, a transport, an endpoint, and a ``poll`` in its step loop.
The rest (numpy buffers, a pipe for the ticket) stands in for the engine itself.
"""

from __future__ import annotations

import multiprocessing
import time
from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np

from kvferry import BlockTable, Identity, Manifest, need_of
from kvferry.endpoint import Destination, SourceEngine, SourceRank
from kvferry.models import Topology, describe, model_from_config
from kvferry.transport.process import ProcessTransport

MODEL = model_from_config(
    {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 64}
)
IDENTITY = Identity.of({"weights": "random, seed 7"})  # everything that determines the numbers
NUM_TOKENS = 100


def with_memory(manifest: Manifest) -> tuple[Manifest, dict[str, np.ndarray]]:
    """The manifest with the addresses of real buffers; an engine uses its own memory."""
    (rank,) = manifest.ranks
    buffers = {region.name: np.zeros(region.num_bytes, np.uint8) for region in rank.regions}
    regions = tuple(replace(region, address=buffers[region.name].ctypes.data) for region in rank.regions)
    return replace(manifest, ranks=(replace(rank, regions=regions),), identity=IDENTITY), buffers


def prefill(pipe: Connection) -> None:
    """The source engine: head-major blocks of 16 tokens."""
    manifest, buffers = with_memory(describe(MODEL, Topology(block=16, blocks=64), "prefill"))
    engine = SourceEngine("prefill", num_ranks=1)
    rank = SourceRank(engine.invitation, manifest, ProcessTransport())
    for buffer in buffers.values():
        buffer[:] = np.random.default_rng(7).integers(1, 256, len(buffer), dtype=np.uint8)

    ticket = engine.offer("request-1", {"full": BlockTable.of([5, 3, 9, 0, 2, 40, 41])}, NUM_TOKENS)
    pipe.send(ticket)  # in production the router passes it on with the request
    while not (released := engine.poll()):
        time.sleep(0.001)
    pipe.recv()  # wait until the destination has printed its line
    print(f"prefill: the blocks of {released[0].request_id} were released ({released[0].reason})")
    rank.close()
    engine.close()


def decode(pipe: Connection) -> None:
    """The destination engine: token-major blocks of 32 tokens."""
    manifest, buffers = with_memory(describe(MODEL, Topology(block=32, blocks=32, layout="NHD"), "decode"))
    destination = Destination(manifest, 0, ProcessTransport())
    need = {group.name: need_of(group, NUM_TOKENS) for group in manifest.groups}
    destination.fetch(pipe.recv(), {"full": BlockTable.of([7, 1, 30, 12])}, need)
    while not (reports := destination.poll()):
        time.sleep(0.001)  # a real engine decodes other requests meanwhile
    report = reports[0]
    if report.failure is not None:
        raise SystemExit(f"decode: {report.failure}")
    num_loaded = sum(int(np.count_nonzero(buffer)) for buffer in buffers.values())
    print(f"decode: {report.record.num_bytes} bytes in {report.record.num_runs} runs; {num_loaded} in place")
    pipe.send("done")
    destination.close()


def main() -> None:
    ours, theirs = multiprocessing.Pipe()
    source = multiprocessing.Process(target=prefill, args=(theirs,))
    source.start()
    decode(ours)
    source.join()


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    main()
