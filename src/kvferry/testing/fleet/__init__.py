"""Engines as real processes, for demonstrations and for tests that kill them.

``SourceFleet`` and ``DestinationFleet`` are whole engines: an authority and ranks, each a process of its own
with real memory and a real transport. ``BlockPool`` hands out their blocks. A ``Crew`` is a number of
processes that serve one fleet after another. ``SourceAccount`` and ``DestinationAccount`` keep book of
requests, blocks and reports, as a scheduler would.
"""

from kvferry.testing.fleet.accounts import DestinationAccount, Load, SourceAccount, Unbalanced, until
from kvferry.testing.fleet.crew import Crew
from kvferry.testing.fleet.engines import DestinationFleet, SourceFleet
from kvferry.testing.fleet.pool import BlockPool
from kvferry.testing.fleet.worker import Worker, WorkerDied, call_all

__all__ = [
    "BlockPool",
    "Crew",
    "DestinationAccount",
    "DestinationFleet",
    "Load",
    "SourceAccount",
    "SourceFleet",
    "Unbalanced",
    "Worker",
    "WorkerDied",
    "call_all",
    "until",
]
