"""What it gains that the source gathers: packed reads beside direct ones, and beside one raw run.

    python benchmarks/packed.py cma        one host, host memory
    python benchmarks/packed.py tcp        the same over loopback TCP, where reads are emulated
    python benchmarks/packed.py hosts      the same over a cable between two network namespaces; needs root
    python benchmarks/packed.py cuda:0     one host, memory of a GPU; "direct" is NIXL, run by run
    python benchmarks/packed.py cma 128    128 MiB instead of 16

One source process, one reader, scattered runs of one length. All ways take turns; times are medians of the
turns, and the best. "One run": as many bytes side by side, as fast as UCX likes. Over TCP, "direct" is
careful, and not measured for short runs (it takes seconds); "fast" is the same runs at UCX's own full pace.
Over CMA, "packed" looks at the source's ring in memory that both share; "fabric" reads it as if it could not.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kvferry import Runs
from kvferry.core.manifest import Region
from kvferry.testing.packed import AskingTransport
from kvferry.testing.sources import LISTEN, Holder, Source, serving
from kvferry.transport.emulation import EmulatedReads
from kvferry.transport.nixl import NixlTransport
from kvferry.transport.ring_options import RingOptions
from kvferry.transport.ring_window import SharedRings
from kvferry.transport.staging import PackedReads
from kvferry.transport.ucx import FABRICS, UcxSettings

POOL_BYTES = 256 << 20
RUN_BYTES = (256, 512, 2 << 10, 16 << 10, 128 << 10, 1 << 20)
MIB = int(sys.argv[2]) if len(sys.argv) > 2 else 16
TOTAL_BYTES = MIB << 20
TURNS = 9


def scattered(run_bytes: int) -> Runs:
    """Runs in no order, no two of which touch."""
    num_runs, step = TOTAL_BYTES // run_bytes, 2 * run_bytes
    rng = np.random.default_rng(run_bytes)
    src, dst = (rng.permutation(POOL_BYTES // step)[:num_runs] * step for _ in range(2))
    return Runs(src, dst, np.full(num_runs, run_bytes))


def timed(transport: NixlTransport, runs: Runs) -> float:
    """Seconds of a read, from the call to its end."""
    started = time.perf_counter()
    transport.read(0, "src", runs)
    while not (ends := transport.poll()):
        time.sleep(1e-4)
    assert not ends[0].error, ends[0].error
    return time.perf_counter() - started


def connected(transport: NixlTransport, regions: tuple[Region, ...], source: Source) -> NixlTransport:
    transport.register(regions)
    transport.connect("src", source.card, source.regions)
    return transport


def ways_over(over: str) -> dict[str, Callable[[], NixlTransport]]:
    """How the runs are read, by the name of the column."""
    fast = UcxSettings(emulated_reads=EmulatedReads.FAST)
    ways: dict[str, Callable[[], NixlTransport]] = {
        "direct": lambda: NixlTransport(packed_reads=PackedReads.NEVER),
        "packed": lambda: AskingTransport(packed_reads=PackedReads.REQUIRE),
        "one run": lambda: NixlTransport(packed_reads=PackedReads.NEVER, settings=fast),
    }
    if over == "cma":
        ways |= {
            "fabric": lambda: AskingTransport(
                packed_reads=PackedReads.REQUIRE, rings=RingOptions(shared=SharedRings.OFF)
            )
        }
    if over in ("tcp", "hosts"):
        ways |= {"fast": lambda: NixlTransport(packed_reads=PackedReads.NEVER, settings=fast)}
    return ways


def main(over: str) -> None:
    if over != "hosts":
        compare(over)
        return
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.two_hosts import two_hosts  # needs pytest

    with two_hosts() as (source_host, reader_host):
        if not (reader := os.fork()):
            reader_host.enter()
            compare(over, source_host)
            sys.stdout.flush()
            os._exit(0)
        _, status = os.waitpid(reader, 0)
    sys.exit(os.waitstatus_to_exitcode(status))


def compare(over: str, host: Any = None) -> None:
    """Every way at every length; ``host``: where the source is, if that is another one."""
    device = over if over.startswith("cuda") else "cpu"
    env = {"KVFERRY_PACKED_READS": "require"}
    if over in ("tcp", "hosts"):
        env |= FABRICS["tcp"]
    if device != "cpu":
        env["KVFERRY_MAPPED_READS"] = "off"
    os.environ |= env
    if host:
        env |= {LISTEN: f"tcp://{host.address}:*"}
    with serving(1, [POOL_BYTES], device, env, enter=host and host.enter) as served:
        holder = Holder(device)
        holder.add("kv", np.zeros(POOL_BYTES, np.uint8))
        source, ways = served.sources[0], ways_over(over)
        readers = {name: connected(make(), holder.regions, source) for name, make in ways.items()}
        whole = Runs(np.array([0]), np.array([0]), np.array([TOTAL_BYTES]))
        print(f"{TOTAL_BYTES >> 20} MiB over {over}: milliseconds, median (best) of {TURNS}")
        for run_bytes in RUN_BYTES:
            runs = scattered(run_bytes)
            names = [
                name
                for name in ways
                if over not in ("tcp", "hosts") or run_bytes >= 16 << 10 or name != "direct"
            ]
            times: dict[str, list[float]] = {name: [] for name in names}
            for _ in range(TURNS):
                for name in names:
                    times[name].append(timed(readers[name], whole if name == "one run" else runs))
            shown = [f"{name} {median(t) * 1e3:7.1f} ({min(t) * 1e3:6.1f})" for name, t in times.items()]
            gains = [
                f"{median(times[name]) / median(times['packed']):5.2f} x {name}"
                for name in names
                if name != "packed"
            ]
            print(f"{run_bytes:9,} B: {', '.join(shown)}; packed: {', '.join(gains)}")
        for reader in readers.values():
            reader.close()
        holder.free()


if __name__ == "__main__":
    main(sys.argv[1])
