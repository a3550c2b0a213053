"""A destination in a process of its own that loads what it is given tickets for, and checks every byte.

For each line, a ticket, it says in JSON how long the load took and what went wrong, if anything. ``fresh``
before it has it loaded by a reader that is new, which connects and meets the source first.
"""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np

from kvferry import BlockTable, need_of
from kvferry.endpoint import Destination
from kvferry.runtime import Report
from kvferry.transport import stream_reader
from kvferry.transport.process import ProcessTransport
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
ANSWER_SECONDS = "HOSTILE_ANSWER_SECONDS"
"""A setting: how long a source may say nothing, if that is not to be as long as usual."""


def main() -> None:
    if seconds_to_answer := os.environ.get(ANSWER_SECONDS):
        stream_reader.ANSWER_S = float(seconds_to_answer)
    manifest, buffers = with_memory("decode")
    expected = [cache_bytes(len(buffer), seed) for seed, buffer in enumerate(buffers.values())]

    def new_destination() -> Destination:
        return Destination(manifest, 0, ProcessTransport(), trust=trust(), timing=TIMING)

    usual = new_destination()
    need = {group.name: need_of(group, NUM_TOKENS) for group in manifest.groups}
    stalls, places = Stalls(), [np.ones(len(buffer), bool) for buffer in buffers.values()]
    """Where bytes of the request belong; from the first good load on that is known."""
    print(json.dumps({"pid": os.getpid()}), flush=True)
    for line in sys.stdin:
        for buffer in buffers.values():
            buffer[:] = 0
        began = time.monotonic()
        destination = new_destination() if line.startswith("fresh") else usual
        handle = destination.fetch(from_text(line.split()[-1]), {"full": BlockTable.of(BLOCKS)}, need)
        reports: dict[int, Report] = {}
        while handle not in reports and time.monotonic() < began + LOAD_SECONDS:
            reports |= {report.handle: report for report in destination.poll()}
            time.sleep(0.002)
        seconds, error, num_bytes = time.monotonic() - began, "no report", 0
        if report := reports.get(handle):
            error, num_bytes = str(report.failure or ""), report.record.num_bytes
        if destination is not usual:
            destination.close()
        if not error:
            pairs = list(zip(buffers.values(), expected, strict=True))
            num_loaded = sum(int(np.count_nonzero(buffer)) for buffer, _ in pairs)
            if any(np.any((buffer != 0) & (buffer != right)) for buffer, right in pairs):
                error = "wrong bytes"
            elif num_loaded != num_bytes or not num_loaded:
                error = f"{num_loaded} bytes in place, {num_bytes} reported"
            elif all(map(np.all, places)):
                places = [buffer != 0 for buffer in buffers.values()]
        elsewhere = [buffer[~place] for buffer, place in zip(buffers.values(), places, strict=True)]
        if any(map(np.any, elsewhere)):
            error = "bytes outside of the request were written"
        said = {"seconds": seconds, "error": error, "rss": memory_of("VmRSS"), "stall": stalls.take()}
        print(json.dumps(said), flush=True)
    usual.close()


if __name__ == "__main__":
    main()
