"""Data transfers. Importing this room does not load the transport between processes (``process``)."""

from kvferry.transport.base import ReadEnd, Transport
from kvferry.transport.memory import Hub, MemoryTransport

__all__ = ["Hub", "MemoryTransport", "ReadEnd", "Transport"]
