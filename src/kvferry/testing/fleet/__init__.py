"""Engines as real processes, for demonstrations and for tests that kill them.

``SourceFleet`` and ``DestinationFleet`` are whole engines: an authority and ranks, each a process of its own
with real memory and a real transport. ``BlockPool`` hands out their blocks. A ``ProcessPool`` is a number of
processes that serve one fleet after another. ``SourceAccount`` and ``DestinationAccount`` keep book of
requests, blocks and reports, as a scheduler would.
"""

from kvferry.testing.fleet.accounts import DestinationAccount, SourceAccount, TrackedLoad, Unbalanced, until
from kvferry.testing.fleet.engines import DestinationFleet, SourceFleet
from kvferry.testing.fleet.pool import BlockPool
from kvferry.testing.fleet.process_pool import ProcessPool
from kvferry.testing.fleet.worker import Worker, WorkerDied, call_all

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
