"""The edge at which bytes move: one small protocol, and what stands behind it.

The transport between processes is ``kvferry.transport.process.ProcessTransport``; importing this room does
not load it.
"""

from kvferry.transport.base import ReadEnd, Transport
from kvferry.transport.memory import Hub, MemoryTransport

__all__ = ["Hub", "MemoryTransport", "ReadEnd", "Transport"]
