"""Who calls the address of a source's streams: each caller names its stream, or is cut off."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import monotonic

from kvferry.errors import TransportError
from kvferry.log import log_of
from kvferry.transport.socket_loop import SocketLoop
from kvferry.transport.stream_frames import HELLO, MAGIC

log = log_of(__name__)

HELLO_S = 10.0
"""How long a caller may take to name its stream, and a stream that was offered waits to be named."""
MAX_CALLERS = 64
"""Connections that have not named a stream yet; one more, and the oldest of them is cut off. A reader names
its stream at once."""
BACKLOG = 1024
"""Connections that wait to be accepted. Beyond it the kernel drops first packets: readers lose a second."""
ENOUGH_AT_ONCE = 16
"""Callers that are accepted before others get their turn: too few to cut off one that has just come."""
PAUSE_S = 0.2
"""How long nobody is let in after one could not be: it stays in the queue, and would be tried for ever."""


def listen_at(host: str) -> socket.socket:
    """A socket that waits for callers, at a port of its own."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family, backlog=BACKLOG)
    except OSError as error:
        raise TransportError("no-connection", f"cannot listen at {host}: {error}") from error
    listener.setblocking(False)
    return listener


@dataclass(eq=False, slots=True)
class _Caller:
    until: float
    """When it must have named its stream."""
    said: bytes = b""


class StreamCallers:
    """Lets callers in until they have named a stream. All of it happens in the thread of ``loop``."""

    def __init__(
        self, listener: socket.socket, loop: SocketLoop, take: Callable[[bytes, socket.socket], bool]
    ) -> None:
        """``take`` gets the name of a stream and its socket, or says that there is no such stream."""
        self._listener, self._loop, self._take = listener, loop, take
        self._callers: dict[socket.socket, _Caller] = {}
        self._listens_again = float("inf")
        """When callers are let in again, where they are not."""
        self._has_warned = False
        loop.watch(listener, self._accept)

    @property
    def num_waiting(self) -> int:
        """Those who have not named a stream yet."""
        return len(self._callers)

    def turn(self, now: float) -> float:
        """Cut off whoever took too long; when to come again."""
        for caller in [caller for caller, each in self._callers.items() if each.until <= now]:
            self._hang_up(caller)
        if self._listens_again <= now:
            self._listens_again = float("inf")
            self._loop.watch(self._listener, self._accept)
        return min(self._listens_again, *(each.until for each in self._callers.values()), float("inf"))

    def close(self) -> None:
        """Let nobody in any more."""
        for caller in [*self._callers]:
            self._hang_up(caller)
        self._listens_again = float("inf")
        self._loop.ignore(self._listener)
        self._listener.close()

    def _accept(self) -> None:
        for _ in range(ENOUGH_AT_ONCE):
            try:
                caller, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return  # it has gone by itself
            except OSError as error:
                self._pause(error)
                return
            self._let_in(caller)

    def _let_in(self, caller: socket.socket) -> None:
        self._has_warned = False
        if len(self._callers) >= MAX_CALLERS:
            self._hang_up(next(iter(self._callers)))
        caller.setblocking(False)
        caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._callers[caller] = _Caller(monotonic() + HELLO_S)
        self._loop.watch(caller, partial(self._hear, caller))

    def _pause(self, error: OSError) -> None:
        """No room for another file, perhaps: that may pass."""
        if not self._has_warned:
            log.warning("a reader of a stream could not be let in, which is tried again: %s", error)
        self._has_warned = True
        self._loop.ignore(self._listener)
        self._listens_again = monotonic() + PAUSE_S

    def _hear(self, socket_of: socket.socket) -> None:
        """The name of a stream, in as many pieces as it comes; one byte more, and it is none."""
        caller = self._callers[socket_of]
        try:
            more = socket_of.recv(HELLO.size + 1 - len(caller.said))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        caller.said += more
        is_ours = caller.said.startswith(MAGIC[: len(caller.said)])
        if more and is_ours and len(caller.said) < HELLO.size:
            return
        if not more or not is_ours or len(caller.said) > HELLO.size:
            self._hang_up(socket_of)
            return
        _, stream_id = HELLO.unpack(caller.said)
        if self._take(stream_id, socket_of):
            del self._callers[socket_of]
        else:
            self._hang_up(socket_of)

    def _hang_up(self, caller: socket.socket) -> None:
        self._callers.pop(caller, None)
        self._loop.ignore(caller)
        caller.close()
