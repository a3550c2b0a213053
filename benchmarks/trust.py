"""What a secret costs: loads of 64 MiB over NIXL with and without one, in turns; and each proof by itself.

python -m benchmarks.trust [--loads 30]
"""

from __future__ import annotations

import argparse
import time
from statistics import median

from kvferry.core.request import BlockTable, need_of
from kvferry.models import Topology, describe, model_from_config
from kvferry.runtime import Offers, Timing
from kvferry.runtime.failure import refusal
from kvferry.wire.secret import Secret, Trust
from kvferry.wire.ticket import from_text, to_text
from tests.support.fleet import DestinationFleet, SourceFleet

SECRET = b"of this benchmark, 128 bit"
NUM_TOKENS, BLOCK = 4096, 16
MODEL = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "torch_dtype": "bfloat16",
}
TABLES = {"full": BlockTable.of(list(range(NUM_TOKENS // BLOCK)))}


class Pair:
    """Two engines of two processes each, which know a secret or do not."""

    def __init__(self, name: str, secret: bytes) -> None:
        topology = Topology.parse(f"tp=1,block={BLOCK},blocks={NUM_TOKENS // BLOCK}")
        src, dst = (describe(model_from_config(MODEL), topology, f"{name}-{side}") for side in ("src", "dst"))
        timing = Timing()
        self.source = SourceFleet(src, timing=timing, secret=secret)
        self.destination = DestinationFleet(dst, timing=timing, secret=secret)
        self.source.wait_whole()
        self.destination.wait_ready()
        self.need = {group.name: need_of(group, NUM_TOKENS) for group in dst.groups}
        self.num = 0

    def load(self) -> float:
        """Seconds of one load, from the fetch to its report."""
        self.num += 1
        ticket = self.source.offer(f"request-{self.num}", TABLES, NUM_TOKENS)
        (report,) = self.destination.wait(self.destination.fetch(ticket, TABLES, self.need))
        if report.failure is not None:
            raise SystemExit(str(report.failure))
        self.source.poll()
        return report.record.total_seconds

    def close(self) -> None:
        self.source.close()
        self.destination.close()


def loads(num: int) -> None:
    pairs = {"without": Pair("without", b""), "with a secret": Pair("with", SECRET)}
    seconds: dict[str, list[float]] = {name: [] for name in pairs}
    for pair in pairs.values():
        pair.load()
    for turn in range(num):
        for name in list(pairs)[:: 1 if turn % 2 else -1]:
            seconds[name].append(pairs[name].load())
    for name, each in seconds.items():
        print(f"a load of 64 MiB {name}: median {median(each) * 1e3:.2f} ms, best {min(each) * 1e3:.2f} ms")
    for pair in pairs.values():
        pair.close()


def proofs() -> None:
    fleet = Trust(Secret(SECRET))
    for trust in (Trust(), fleet):
        key = trust.ticket_key
        made = Offers("prefill", 7, b"key", "tcp://127.0.0.1:5555", 30_000, host="here", fleet_key=key)
        ticket = made.make("request", TABLES, NUM_TOKENS)
        text = to_text(ticket)
        each = {
            "make": lambda made=made: (made.forget("r"), made.make("r", TABLES, NUM_TOKENS)),
            "read the text": lambda text=text, key=key: from_text(text, key),
            "admit": lambda ticket=ticket, trust=trust: refusal(ticket, trust, "here"),
        }
        for name, work in each.items():
            print(f"{'with a secret' if key else 'without':>13}, {name}: {best_of(work) * 1e6:.1f} µs")


def best_of(work) -> float:  # type: ignore[no-untyped-def]
    best = float("inf")
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(50):
            work()
        best = min(best, (time.perf_counter() - started) / 50)
    return best


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--loads", type=int, default=30)
    arguments = parser.parse_args()
    proofs()
    loads(arguments.loads)
