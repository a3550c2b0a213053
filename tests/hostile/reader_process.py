"""A destination in a process of its own that loads what it is given tickets for, and checks every byte.

For each line, a ticket, it says in JSON how long the load took and what went wrong, if anything.
"""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np

from kvferry import BlockTable, need_of
from kvferry.endpoint import Destination
from kvferry.transport.nixl import NixlTransport
from kvferry.wire.ticket import from_text
from tests.hostile.source_process import (
    BLOCKS,
    NUM_TOKENS,
    TIMING,
    Stalls,
    cache_bytes,
    memory_of,
    trust,
    with_memory,
)

LOAD_SECONDS = 30.0


def main() -> None:
    manifest, buffers = with_memory("decode")
    expected = [cache_bytes(len(buffer), seed) for seed, buffer in enumerate(buffers.values())]
    destination = Destination(manifest, 0, NixlTransport(), trust=trust(), timing=TIMING)
    need = {group.name: need_of(group, NUM_TOKENS) for group in manifest.groups}
    stalls = Stalls()
    print(json.dumps({"pid": os.getpid()}), flush=True)
    for line in sys.stdin:
        for buffer in buffers.values():
            buffer[:] = 0
        began = time.monotonic()
        destination.fetch(from_text(line.strip()), {"full": BlockTable.of(BLOCKS)}, need)
        while not (reports := destination.poll()) and time.monotonic() < began + LOAD_SECONDS:
            time.sleep(0.002)
        seconds, error, num_bytes = time.monotonic() - began, "no report", 0
        if reports:
            error = str(reports[0].failure or "")
            num_bytes = reports[0].record.num_bytes
        if not error:
            pairs = list(zip(buffers.values(), expected, strict=True))
            num_loaded = sum(int(np.count_nonzero(buffer)) for buffer, _ in pairs)
            if any(np.any((buffer != 0) & (buffer != right)) for buffer, right in pairs):
                error = "wrong bytes"
            elif num_loaded != num_bytes or not num_loaded:
                error = f"{num_loaded} bytes in place, {num_bytes} reported"
        said = {"seconds": seconds, "error": error, "rss": memory_of("VmRSS"), "stall": stalls.take()}
        print(json.dumps(said), flush=True)
    destination.close()


if __name__ == "__main__":
    main()
