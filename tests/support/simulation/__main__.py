"""Many simulated runs, on every core; or one again, with what led to its end.

python -m tests.support.simulation --runs 1000 --requests 50
python -m tests.support.simulation --seed 7 --requests 50
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from tests.support.simulation.many import run_many, say
from tests.support.simulation.run import run
from tests.support.simulation.troubles import Trouble


def _troubles(text: str) -> frozenset[Trouble]:
    return frozenset(Trouble(name) for name in text.split(",") if name and name != "none")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 if a law was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="play this one run, and tell what happened")
    parser.add_argument("--first", type=int, default=0, help="the first of many seeds")
    parser.add_argument("--runs", type=int, default=100, help="how many seeds")
    parser.add_argument("--requests", type=int, default=50, help="how many requests in each run")
    parser.add_argument(
        "--troubles", default="", help="what goes wrong, by name; drawn from the seed if left out"
    )
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--trace", action="store_true", help="with --seed: every event")
    args = parser.parse_args(arguments)
    troubles = _troubles(args.troubles) if args.troubles else None
    if args.seed is None:
        seeds = range(args.first, args.first + args.runs)
        return bool(run_many(seeds, args.requests, troubles, num_processes=args.processes))
    found = run(args.seed, args.requests, troubles)
    if args.trace:
        say("\n".join(found.trace.lines()))
    say(found.story())
    return 0 if found.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
