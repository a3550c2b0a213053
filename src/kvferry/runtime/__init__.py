"""Who is alive, what is leased, what is in flight: state machines without clocks, threads or sockets.

``Authority`` is the one keeper of leases of a source engine; ``Reader`` is one rank of a destination engine.
Both take events and ``now``, and return effects for an edge to carry out.
"""

from kvferry.runtime.authority import Authority, Released
from kvferry.runtime.reader import Reader
from kvferry.runtime.values import Failure, Fetch, Report, Timing

__all__ = ["Authority", "Failure", "Fetch", "Reader", "Released", "Report", "Timing"]
