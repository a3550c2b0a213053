"""A cache of your own, described by hand and moved between two hosts.

On the host that has the cache (10.0.0.7), then on the other one:

    kvferry keygen -o kvferry.secret                                  # the same file on both hosts
    python examples/own_cache.py offer --listen 'tcp://10.0.0.7:*' --secret kvferry.secret --ticket ticket.txt
    python examples/own_cache.py fetch --secret kvferry.secret --ticket ticket.txt

The ticket is a line of text; here it travels as a file, in real life with the request. On one host leave
--listen and --secret out. The two sides keep the same numbers in arrays of different shape: a view says how.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvferry import Axis, BlockTable, Group, Identity, Manifest, Rank, Region, State, View, need_of
from kvferry.endpoint import Destination, SourceEngine, SourceRank
from kvferry.endpoint.secret_source import secret_from_file
from kvferry.transport.nixl import NixlTransport
from kvferry.wire.ticket import from_text, to_text
from kvferry.wire.trust import Trust

LAYERS, HEADS, CHANNELS, TOKENS = 2, 8, 64, 100

# What both sides must agree on: names, axes, items. Not where anything is.
STATES = [
    State(
        f"layers.{layer}/{part}", (Axis("head", HEADS), Axis("channel", CHANNELS)), item_bytes=2, dtype="fp16"
    )
    for layer in range(LAYERS)
    for part in "kv"
]
IDENTITY = Identity.of({"weights": "an example, version 1"})  # whatever shapes the numbers


def views_of_source(cache: np.ndarray) -> Iterator[View]:
    """One array for everything: [block, layer, K or V, token, head, channel], 16 tokens per block."""
    for i, state in enumerate(STATES):
        part = cache[:, i // 2, i % 2]
        offset = part.ctypes.data - cache.ctypes.data
        axes = "block token head channel"
        yield View.of_strides(state.name, "all", "cache", axes, part.shape, part.strides, offset=offset)


def views_of_reader(cache: np.ndarray) -> Iterator[View]:
    """The same, in another order: [layer, K or V, block, head, token, channel], 32 tokens per block."""
    for i, state in enumerate(STATES):
        part = cache[i // 2, i % 2]
        offset = part.ctypes.data - cache.ctypes.data
        axes = "block head token channel"
        yield View.of_strides(state.name, "all", "cache", axes, part.shape, part.strides, offset=offset)


def manifest(engine: str, cache: np.ndarray, views: Iterator[View], group: Group) -> Manifest:
    """An engine of one rank, whose memory is one array."""
    region = Region("cache", cache.nbytes, address=cache.ctypes.data)
    return Manifest(engine, tuple(STATES), (group,), (Rank(0, (region,), tuple(views)),), identity=IDENTITY)


def numbers() -> np.ndarray:
    """What the model would have computed: [layer, K or V, token, head, channel]."""
    shape = (LAYERS, 2, TOKENS, HEADS, CHANNELS)
    return np.random.default_rng(7).integers(1, 1000, shape).astype(np.float16)


def offer(args: argparse.Namespace, trust: Trust) -> None:
    """The engine that has computed the request."""
    blocks = [5, 3, 9, 0, 2, 40, 41]
    cache = np.zeros((64, LAYERS, 2, 16, HEADS, CHANNELS), np.float16)
    for token in range(TOKENS):
        cache[blocks[token // 16], :, :, token % 16] = numbers()[:, :, token]

    ours = manifest(
        "prefill", cache, views_of_source(cache), Group("all", num_blocks=64, tokens_per_block=16)
    )
    engine = SourceEngine("prefill", num_ranks=1, listen=args.listen, trust=trust)
    rank = SourceRank(engine.invitation, ours, NixlTransport(), trust=trust)
    ticket = engine.offer("request-1", {"all": BlockTable.of(blocks)}, TOKENS)
    args.ticket.write_text(to_text(ticket))
    print(f"offered at {engine.address}: {args.ticket}", flush=True)
    while not (released := engine.poll()):
        time.sleep(0.01)
    print(f"{released[0].request_id} is released: {released[0].reason}")
    rank.close()
    engine.close()


def fetch(args: argparse.Namespace, trust: Trust) -> None:
    """The engine that goes on with it."""
    blocks = [7, 1, 30, 12]
    cache = np.zeros((LAYERS, 2, 32, HEADS, 32, CHANNELS), np.float16)
    group = Group("all", num_blocks=32, tokens_per_block=32)
    ours = manifest("decode", cache, views_of_reader(cache), group)
    destination = Destination(ours, 0, NixlTransport(), trust=trust)
    ticket = from_text(args.ticket.read_text(), trust.ticket_key)
    destination.fetch(ticket, {"all": BlockTable.of(blocks)}, {"all": need_of(group, TOKENS)})
    while not (reports := destination.poll()):
        time.sleep(0.01)
    report = reports[0]
    destination.close()
    if report.failure is not None:
        raise SystemExit(f"not loaded: {report.failure}")
    wrong = sum(
        int(np.count_nonzero(cache[:, :, blocks[token // 32], :, token % 32] != numbers()[:, :, token]))
        for token in range(TOKENS)
    )
    record = report.record
    print(f"loaded: {record.num_bytes} bytes in {record.num_runs} runs, {record.way}; {wrong} numbers wrong")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["offer", "fetch"])
    parser.add_argument(
        "--listen", default="tcp://127.0.0.1:*", help="where readers call; * is any free port"
    )
    parser.add_argument("--secret", type=Path, help="the file that both hosts have")
    parser.add_argument("--ticket", type=Path, default=Path("ticket.txt"))
    args = parser.parse_args()
    trust = Trust(secret_from_file(args.secret)) if args.secret else Trust()
    {"offer": offer, "fetch": fetch}[args.what](args, trust)


if __name__ == "__main__":
    main()
