"""A source engine in a process of its own, for tests that attack it: ``python victim.py CARD_BYTES``.

Says its address, and then, for each line that it reads, what it holds and how long it was deaf.
"""

import json
import sys
import threading
import time

from kvferry.core.manifest import Manifest
from kvferry.endpoint import SourceEngine
from kvferry.models import Topology, describe, model_from_config
from kvferry.runtime import Timing
from kvferry.wire.outline import join_of

MODEL = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64}


def resident(name: str) -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) >> 10 for line in status if line.startswith(f"{name}:"))


class Stalls:
    """How long the process's own Python was held up: what an engine's step loop would feel."""

    def __init__(self) -> None:
        self.longest = 0.0
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while True:
            before = time.monotonic()
            time.sleep(0.01)
            self.longest = max(self.longest, time.monotonic() - before - 0.01)


def main() -> None:
    manifest: Manifest = describe(model_from_config(MODEL), Topology.parse("block=16,blocks=64"), "prefill")
    engine = SourceEngine("prefill", 1, timing=Timing(lease=5, meet=5, read=5, retry=0.2))
    engine.admit(join_of(manifest, "memory", bytes(int(sys.argv[1]))))
    stalls = Stalls()
    print(engine.address, flush=True)
    for _ in sys.stdin:
        status = engine.status()
        said = {"rss": resident("VmRSS"), "peak": resident("VmHWM"), "stall": stalls.longest, **status}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
