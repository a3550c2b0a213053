"""Engines as real processes, for tests that kill them.

``SourceFleet`` and ``DestinationFleet`` are whole engines: an authority and ranks, each a process of its own
with real memory and a real transport. ``BlockPool`` hands out their blocks. A ``ProcessPool`` is a number of
processes that serve one fleet after another. ``SourceAccount`` and ``DestinationAccount`` keep book of
requests, blocks and reports, as a scheduler would.
"""

from kvferry.cli.demo.engines import BlockPool
from kvferry.cli.processes import until
from tests.support.fleet.accounts import DestinationAccount, SourceAccount, TrackedLoad, Unbalanced
from tests.support.fleet.engines import DestinationFleet, SourceFleet
from tests.support.fleet.process_pool import ProcessPool
from tests.support.fleet.worker import Worker, WorkerDied, call_all

__all__ = [
    "BlockPool",
    "DestinationAccount",
    "DestinationFleet",
    "ProcessPool",
    "SourceAccount",
    "SourceFleet",
    "TrackedLoad",
    "Unbalanced",
    "Worker",
    "WorkerDied",
    "call_all",
    "until",
]
