"""How long a ticket that the decode engine does not need pins the prefill engine's blocks.

    .venv-vllm/bin/python -m benchmarks.vllm_give_back [turns]      needs the environment of `make e2e`

Real vLLM engines on a CPU (llama, tiny), kvferry and vLLM's own NixlConnector. Seconds from the moment at
which the decode engine has done what it does until all blocks of the prefill engine are free, the slowest
turn. The last rows: a prefill that has no room beside the one on offer.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.e2e.give_back import CONNECTORS, OURS_ONLY, WAYS, Yard, is_in_the_prefix_cache, next_prefill
from tests.e2e.harness import Nursery


def measure(yard: Yard, turns: int) -> dict[str, str]:
    took: dict[str, str] = {}
    for name, way in WAYS.items():
        if way in OURS_ONLY and not yard.is_ours:
            took[name] = "–"
            continue
        seconds = []
        for _ in range(turns):
            way(yard)
            seconds.append(yard.wait())
        took[name] = f"{max(seconds):.2f} s"
    took["the next prefill takes, nothing on offer"] = f"{next_prefill(yard, None):.2f} s"
    took["the next prefill takes, after a prefix hit"] = f"{next_prefill(yard, is_in_the_prefix_cache):.2f} s"
    return took


def main() -> None:
    turns, columns = int(sys.argv[1]) if len(sys.argv) > 1 else 3, {}
    with tempfile.TemporaryDirectory() as logs, Nursery(Path(logs)) as nursery:
        for name, connector in CONNECTORS.items():
            yard = Yard(nursery, connector)
            columns[name] = measure(yard, turns)
            yard.close()
    print(f"| | {' | '.join(columns)} |\n| --- |{' --- |' * len(columns)}")
    for row in next(iter(columns.values())):
        print(f"| {row} | {' | '.join(column[row] for column in columns.values())} |")


if __name__ == "__main__":
    main()
