"""What packed reads take, with and without a secret, beside direct ones and one raw run.

    python -m benchmarks.packed host       one host, host memory
    python -m benchmarks.packed hosts      over a cable between two network namespaces; needs root
    python -m benchmarks.packed cuda:0     one host, memory of a GPU
    python -m benchmarks.packed host 128   128 MiB instead of 16

One source process for each column, one reader, scattered runs of one length. All ways take turns; times are
medians of the turns, and the best. "Packed": no secret. "Sealed": the same with one, so that every frame is
encrypted and authenticated. "Direct": NIXL, run by run (KVFERRY_EXPOSE=fabric); "one run": NIXL, as many
bytes side by side. Between two namespaces NIXL takes no part.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kvferry import Runs
from kvferry.cli.processes import FABRICS, AskingTransport
from kvferry.endpoint.secret_source import SECRET
from kvferry.testing.transport_world import Source
from kvferry.transport.region_memory import RegionMemory
from kvferry.transport.settings import EXPOSE_SETTING, WAY_SETTING, Expose, WayChoice
from tests.support.sources import LISTEN, serving

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


def timed(transport: AskingTransport, runs: Runs) -> float:
    """Seconds of a read, from the call to its end."""
    started = time.perf_counter()
    transport.read(0, "src", runs)
    while not (ends := transport.poll()):
        time.sleep(1e-4)
    assert not ends[0].error, ends[0].error
    return time.perf_counter() - started


def connected(env: Mapping[str, str], holder: RegionMemory, source: Source) -> AskingTransport:
    """A reader with these settings."""
    way, expose = WayChoice.from_environment(env), Expose.from_environment(env)
    transport = AskingTransport(way=way, expose=expose)
    os.environ.pop(SECRET, None)
    os.environ |= {SECRET: env[SECRET]} if SECRET in env else {}
    transport.register(holder.regions)
    transport.connect("src", source.card, source.regions)
    return transport


def columns(over: str) -> dict[str, dict[str, str]]:
    """The settings of both sides, by the name of the column."""
    packed = {WAY_SETTING: "packed", EXPOSE_SETTING: "nothing"}
    ways = {"packed": packed, "sealed": packed | {SECRET: secrets.token_hex(32)}}
    if over != "hosts":
        ways |= {"direct": FABRICS["cma"], "one run": FABRICS["cma"]}
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
    listen = {LISTEN: f"tcp://{host.address}:*"} if host else {}
    whole = Runs(np.array([0]), np.array([0]), np.array([TOTAL_BYTES]))
    holder = RegionMemory(device)
    holder.add("kv", np.zeros(POOL_BYTES, np.uint8))
    with ExitStack() as stack:
        readers: dict[str, AskingTransport] = {}
        for name, env in columns(over).items():
            os.environ |= {key: value for key, value in env.items() if key.startswith("UCX_")}
            os.environ.pop(SECRET, None)
            served = stack.enter_context(
                serving(1, [POOL_BYTES], device, env | listen, enter=host and host.enter)
            )
            readers[name] = connected(env, holder, served.sources[0])
            stack.callback(readers[name].close)
        print(f"{MIB} MiB, {over}: milliseconds, median (best) of {TURNS}")
        for run_bytes in RUN_BYTES:
            runs = scattered(run_bytes)
            times: dict[str, list[float]] = {name: [] for name in readers}
            for _ in range(TURNS):
                for name, reader in readers.items():
                    times[name].append(timed(reader, whole if name == "one run" else runs))
            shown = [f"{name} {median(t) * 1e3:7.1f} ({min(t) * 1e3:6.1f})" for name, t in times.items()]
            print(f"{run_bytes:9,} B: {', '.join(shown)}")
    holder.free()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "host")
