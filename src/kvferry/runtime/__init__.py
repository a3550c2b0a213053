"""State machines for peers, leases and fetches, without clocks, threads or sockets.

``Authority`` keeps the leases of a source engine, ``Offers`` makes its tickets, ``Member`` is one of its
ranks; ``Reader`` is one rank of a destination engine. They take events and ``now``, and return effects for an
edge to carry out.
"""

from kvferry.runtime.authority import Authority
from kvferry.runtime.failure import Failure, FailureCode
from kvferry.runtime.lease import Offers
from kvferry.runtime.member import Member
from kvferry.runtime.reader import Reader
from kvferry.runtime.values import Fetch, Released, Report, Timing

__all__ = [
    "Authority",
    "Failure",
    "FailureCode",
    "Fetch",
    "Member",
    "Offers",
    "Reader",
    "Released",
    "Report",
    "Timing",
]
