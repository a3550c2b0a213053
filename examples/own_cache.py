"""A cache of your own, described by hand and transferred between two hosts.

On the host that has the cache (10.0.0.7), then on the other one:

    kvferry keygen -o kvferry.secret                                  # the same file on both hosts
    python examples/own_cache.py offer --listen 'tcp://10.0.0.7:*' --secret kvferry.secret --ticket ticket.txt
    python examples/own_cache.py fetch --secret kvferry.secret --ticket ticket.txt

The ticket is a line of text. Here it is copied as a file; in production it travels with the request. On one
host, leave out --listen and --secret. The two sides keep the same numbers in arrays of different shape, and
views describe both. The fetching engine may have several ranks, each a process with some of the heads:

    python examples/own_cache.py fetch --rank 0 --num-ranks 2 & python examples/own_cache.py fetch --rank 1 …
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
from kvferry.transport.process import ProcessTransport
from kvferry.wire.secret import Trust
from kvferry.wire.ticket import from_text, to_text

LAYERS, HEADS, CHANNELS, TOKENS = 2, 8, 64, 100

# Names, axes and items, on which both sides must agree; addresses may differ.
STATES = [
    State(
        f"layers.{layer}/{part}", (Axis("head", HEADS), Axis("channel", CHANNELS)), item_bytes=2, dtype="fp16"
    )
    for layer in range(LAYERS)
    for part in "kv"
]
IDENTITY = Identity.of({"weights": "an example, version 1"})  # everything that determines the numbers


def views_of_source(cache: np.ndarray) -> Iterator[View]:
    """One array for everything: [block, layer, K or V, token, head, channel], 16 tokens per block."""
    for i, state in enumerate(STATES):
        part = cache[:, i // 2, i % 2]
        offset = part.ctypes.data - cache.ctypes.data
        axes = "block token head channel"
        yield View.of_strides(state.name, "all", "cache", axes, part.shape, part.strides, offset=offset)


def views_of_reader(cache: np.ndarray, first_head: int) -> Iterator[View]:
    """The same in another order: [layer, K or V, block, head, token, channel], 32 tokens per block.

    A rank has some of the heads, from ``first_head`` on.
    """
    for i, state in enumerate(STATES):
        part = cache[i // 2, i % 2]
        offset = part.ctypes.data - cache.ctypes.data
        yield View.of_strides(
            state.name,
            "all",
            "cache",
            "block head token channel",
            part.shape,
            part.strides,
            offset=offset,
            start={"head": first_head},
        )


def rank(number: int, cache: np.ndarray, views: Iterator[View], *, is_mine: bool = True) -> Rank:
    """A rank whose memory is one array; addresses of other ranks are not needed."""
    region = Region("cache", cache.nbytes, address=cache.ctypes.data if is_mine else 0)
    return Rank(number, (region,), tuple(views))


def manifest(engine: str, ranks: list[Rank], group: Group) -> Manifest:
    """The engine, with all of its ranks."""
    return Manifest(engine, tuple(STATES), (group,), tuple(ranks), identity=IDENTITY)


def numbers() -> np.ndarray:
    """The values that the model would have computed: [layer, K or V, token, head, channel]."""
    shape = (LAYERS, 2, TOKENS, HEADS, CHANNELS)
    return np.random.default_rng(7).integers(1, 1000, shape).astype(np.float16)


def offer(args: argparse.Namespace, trust: Trust) -> None:
    """The engine that has prefilled the request."""
    blocks = [5, 3, 9, 0, 2, 40, 41]
    cache = np.zeros((64, LAYERS, 2, 16, HEADS, CHANNELS), np.float16)
    for token in range(TOKENS):
        cache[blocks[token // 16], :, :, token % 16] = numbers()[:, :, token]

    group = Group("all", num_blocks=64, tokens_per_block=16)
    ours = manifest("prefill", [rank(0, cache, views_of_source(cache))], group)
    engine = SourceEngine("prefill", num_ranks=1, listen=args.listen, trust=trust)
    any_port = args.listen.rpartition(":")[0] + ":*"  # address for packed reads
    readable = SourceRank(engine.invitation, ours, ProcessTransport(), listen=any_port, trust=trust)
    ticket = engine.offer("request-1", {"all": BlockTable.of(blocks)}, TOKENS)
    args.ticket.write_text(to_text(ticket))
    print(f"offered at {engine.address}: {args.ticket}", flush=True)
    while not (released := engine.poll()):
        time.sleep(0.01)
    print(f"{released[0].request_id} is released: {released[0].reason}")
    readable.close()
    engine.close()


def fetch(args: argparse.Namespace, trust: Trust) -> None:
    """The engine that decodes the request, or one of its ranks."""
    blocks = [7, 1, 30, 12]
    num_heads = HEADS // args.num_ranks
    mine = slice(args.rank * num_heads, (args.rank + 1) * num_heads)
    cache = np.zeros((LAYERS, 2, 32, num_heads, 32, CHANNELS), np.float16)
    group = Group("all", num_blocks=32, tokens_per_block=32)
    ranks = [
        rank(each, cache, views_of_reader(cache, each * num_heads), is_mine=each == args.rank)
        for each in range(args.num_ranks)
    ]
    # The manifest has all ranks; the reader's name is the same on all ranks, and new at each start.
    destination = Destination(
        manifest("decode", ranks, group), args.rank, ProcessTransport(), reader=args.reader, trust=trust
    )
    ticket = from_text(args.ticket.read_text(), trust.ticket_key)
    destination.fetch(ticket, {"all": BlockTable.of(blocks)}, {"all": need_of(group, TOKENS)})
    while not (reports := destination.poll()):
        time.sleep(0.01)
    report = reports[0]
    destination.close()
    if report.failure is not None:
        raise SystemExit(f"not loaded: {report.failure}")
    wrong = sum(
        int(np.count_nonzero(cache[:, :, blocks[token // 32], :, token % 32] != numbers()[:, :, token, mine]))
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
        "--listen", default="tcp://127.0.0.1:*", help="address for readers; * is any free port"
    )
    parser.add_argument("--secret", type=Path, help="file with the secret, the same on both hosts")
    parser.add_argument("--ticket", type=Path, default=Path("ticket.txt"))
    parser.add_argument("--rank", type=int, default=0, help="the rank that fetches")
    parser.add_argument(
        "--num-ranks", type=int, default=1, choices=[1, 2, 4, 8], help="ranks of the fetching engine"
    )
    parser.add_argument("--reader", default="decode, first start", help="reader name, the same on all ranks")
    args = parser.parse_args()
    trust = Trust(secret_from_file(args.secret)) if args.secret else Trust()
    {"offer": offer, "fetch": fetch}[args.what](args, trust)


if __name__ == "__main__":
    main()
