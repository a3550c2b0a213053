"""The edge at which bytes move: one small protocol, and what stands behind it."""

from kvferry.transport.base import Memory, Transport
from kvferry.transport.memory import MemoryTransport

__all__ = ["Memory", "MemoryTransport", "Transport"]
