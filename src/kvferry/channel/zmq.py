"""The control channel over ZeroMQ: the only file that imports zmq.

One channel has at most one listening socket, and one calling socket per address that it wrote to. All but
``wake`` belong to one thread. Whatever arrives is bytes and where to reply to. A peer that does not read
costs nobody anything: what is sent waits in queues with bounds, and what does not fit is dropped and counted,
since every message of the protocol is repeated until it is answered. What arrives is taken at once (see
``NO_BOUND``).
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import count

from kvferry.errors import ChannelError, MissingPackage
from kvferry.wire.secret import Secret

try:
    import zmq
    from zmq.utils import z85
    from zmq.utils.monitor import parse_monitor_message
except ModuleNotFoundError as error:
    raise MissingPackage.named(error) from None

_MAPPED = re.compile(r"\[::ffff:([0-9.]+)\]")

MAX_CALLS = 512
"""Addresses that a channel keeps a socket for; the least recently used goes first."""
SCHEMES = ("tcp://", "ipc://")
"""What may be called: an address comes from a ticket, and ``inproc`` would reach into this process."""
LINGER_MS = 200
"""How long what was said last may still be sent after hanging up."""
HIGH_WATER = 1_000
"""Messages that wait to be sent over a connection; more are dropped."""
NO_BOUND = 0
"""For what arrives. A queue that is full stops ZeroMQ's reading, and a connection that breaks or falls silent
while it is stopped ends the *process*, as of libzmq 4.3.5 (``Assertion failed: _input_stopped``, or
``!_io_error``). So does a caller that takes over the name of another. Whoever drives a channel takes what is
there, and drops what is too much."""
HANDSHAKE_MS = 5_000
"""How long a caller may take to say who it is."""
SILENCE_SECONDS = 2.0
"""After how long without an answer to its heartbeats a caller gives a connection up, and tries another one.
The peer's network thread answers them, whatever else that process does."""
LISTENER_HEARTBEAT_MS = 500
"""Where nobody takes messages, and enough of them wait, a caller's heartbeats are not seen either. The
listener's own tell it that there is life."""
LISTENER_SILENCE_MS = 10_000
"""Nobody waits for news of a caller: one that got no processor for a few seconds keeps its connection."""
MAX_SOCKETS = 8 * MAX_CALLS
"""Of ZeroMQ's, in a channel: each call has one, and two that tell of its connection. A closed one counts for
a while."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message, and where to send an answer so that it finds the sender."""

    reply_to: str
    data: bytes


class Contact(StrEnum):
    """What becomes of the connection to an address that is called."""

    CALLING = "calling"
    CONNECTED = "connected"
    """Somebody who speaks this language is there, and answers heartbeats from now on."""
    BROKEN = "broken"
    """It was lost, or refused, or not understood. It is tried again."""
    CLOSED = "closed"
    """It is not tried any more: others need the place."""


@dataclass(frozen=True, slots=True)
class ContactChange:
    """News of the connection to an address."""

    address: str
    contact: Contact


_CONTACTS = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: Contact.CONNECTED,
    zmq.EVENT_DISCONNECTED: Contact.BROKEN,
    zmq.EVENT_CLOSED: Contact.BROKEN,
}
"""ZeroMQ's own news. That a host accepts a connection says little: it does so for a stopped process, too."""


@dataclass(eq=False, slots=True)
class _Call:
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]

    def close(self, linger_ms: int) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(linger_ms)


class Channel:
    """Sends and receives messages; listens if told to.

    With a ``secret``, everything is encrypted, and only who knows the secret can talk to the listener at all.
    """

    def __init__(
        self,
        *,
        listen: str = "",
        secret: Secret | None = None,
        max_bytes: int = 8 << 20,
        silence_seconds: float = SILENCE_SECONDS,
    ) -> None:
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._silence_seconds = silence_seconds
        self._changes: list[ContactChange] = []
        """What happened to connections, until the next ``wait``."""
        self._server_keys = _server_keys(secret) if secret is not None else None
        self._max_bytes = max_bytes
        self._poller = zmq.Poller()
        self._monitor_numbers = count(1)
        self._calls: OrderedDict[str, _Call] = OrderedDict()
        self._listener: zmq.Socket[bytes] | None = None
        # Not a pair of sockets: one that is full a moment too long loses a call, and a message waits for it.
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._woken, zmq.POLLIN)
        self.dropped: Counter[str] = Counter()
        self.address = ""
        if listen:
            try:
                self._listen(listen)
            except ChannelError:
                self.close()
                raise

    def _listen(self, listen: str) -> None:
        socket = self._socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.HEARTBEAT_IVL, LISTENER_HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, LISTENER_SILENCE_MS)
        if self._server_keys is not None:
            socket.curve_secretkey, socket.curve_server = self._server_keys[0], True
        try:
            socket.bind(listen)
        except zmq.ZMQError as error:
            socket.close(0)
            raise ChannelError(f"cannot listen at {listen}: {error}") from error
        _number_callers(socket)
        self._poller.register(socket, zmq.POLLIN)
        self._listener = socket
        # An IPv4 address, where it is one: a socket for both kinds writes it in the other's clothes.
        self.address = _MAPPED.sub(r"\1", socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, self._max_bytes),
            (zmq.SNDHWM, HIGH_WATER),
            (zmq.RCVHWM, NO_BOUND),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
            (zmq.RECONNECT_IVL_MAX, 2_000),
            (zmq.IPV6, 1),
        ):
            socket.setsockopt(option, value)
        return socket

    @staticmethod
    def is_answer(to: str) -> bool:
        """Whether what is sent there goes to somebody who called."""
        return to.startswith("@")

    def send(self, to: str, data: bytes) -> None:
        """Send to an address, or to a ``reply_to``; never blocks, never raises for what a peer did."""
        try:
            if self.is_answer(to):
                if self._listener is not None:
                    self._listener.send_multipart([bytes.fromhex(to[1:]), data], zmq.NOBLOCK)
            elif to.startswith(SCHEMES):
                self._call(to).socket.send(data, zmq.NOBLOCK)
            else:
                self.dropped["address"] += 1
        except zmq.ZMQError:
            self.dropped["unsent"] += 1

    def _call(self, address: str) -> _Call:
        if address in self._calls:
            self._calls.move_to_end(address)
            return self._calls[address]
        if len(self._calls) >= MAX_CALLS:
            oldest = next(iter(self._calls))
            self.hang_up(oldest)
            self._changes.append(ContactChange(oldest, Contact.CLOSED))
        socket = self._socket(zmq.DEALER)
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(self._silence_seconds * 1000 / 3))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(self._silence_seconds * 2000 / 3))
        if self._server_keys is not None:
            socket.curve_serverkey = self._server_keys[1]
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        monitor: zmq.Socket[bytes] | None = None
        try:
            monitor = self._monitor(socket)
            socket.connect(address)
        except zmq.ZMQError:  # an address that makes no sense would else cost sockets per message
            for one in (monitor, socket):
                if one is not None:
                    one.close(0)
            raise
        call = _Call(socket, monitor)
        self._poller.register(call.socket, zmq.POLLIN)
        self._poller.register(call.monitor, zmq.POLLIN)
        self._calls[address] = call
        self._changes.append(ContactChange(address, Contact.CALLING))
        return call

    def _monitor(self, socket: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        """Where ZeroMQ tells of a socket's connection. It has no bound: a full one would stop everything."""
        name = f"inproc://monitor-{next(self._monitor_numbers)}"
        socket.monitor(name, sum(_CONTACTS))
        monitor = self._context.socket(zmq.PAIR)
        try:
            monitor.setsockopt(zmq.LINGER, 0)
            monitor.setsockopt(zmq.RCVHWM, NO_BOUND)
            monitor.connect(name)
        except zmq.ZMQError:
            monitor.close(0)
            raise
        return monitor

    def hang_up(self, address: str) -> None:
        """Call an address no more, until something is sent there again."""
        call = self._calls.pop(address, None)
        if call is not None:
            self._poller.unregister(call.socket)
            self._poller.unregister(call.monitor)
            call.close(LINGER_MS)

    def wait(self, seconds: float) -> list[Received | ContactChange]:
        """Everything that arrived or happened, after at most ``seconds``; at once when woken."""
        ready = dict(self._poller.poll(0 if self._changes else max(0, int(seconds * 1000))))
        received: list[Received | ContactChange] = list(self._changes)
        self._changes.clear()
        if self._woken in ready:
            os.eventfd_read(self._woken)
        if self._listener in ready and self._listener is not None:
            received += self._heard(self._listener)
        for address, call in list(self._calls.items()):
            if call.monitor in ready:
                received += self._news(address, call)
            if call.socket in ready:
                received += self._answers(address, call)
        return received

    def _news(self, address: str, call: _Call) -> list[ContactChange]:
        events = (parse_monitor_message(frames)["event"] for frames in self._taken(call.monitor))
        return [ContactChange(address, _CONTACTS[zmq.Event(event)]) for event in events]

    MAX_AT_ONCE = 1000
    """Messages taken from one socket before others get their turn."""

    def _taken(self, socket: zmq.Socket[bytes]) -> Iterator[list[bytes]]:
        with contextlib.suppress(zmq.Again):
            for _ in range(self.MAX_AT_ONCE):
                yield socket.recv_multipart(zmq.NOBLOCK)

    def _heard(self, socket: zmq.Socket[bytes]) -> list[Received]:
        received = []
        for whom, *frames in self._taken(socket):
            match frames:
                case [data]:
                    received.append(Received("@" + whom.hex(), data))
                case _:
                    self.dropped["frames"] += 1
        return received

    def _answers(self, address: str, call: _Call) -> list[Received]:
        received = []
        for frames in self._taken(call.socket):
            match frames:
                case [data]:
                    received.append(Received(address, data))
                case _:
                    self.dropped["frames"] += 1
        return received

    def wake(self) -> None:
        """End a ``wait``, or the next one. From any thread, but not while it is being closed."""
        if self._woken >= 0:
            os.eventfd_write(self._woken, 1)

    def close(self) -> None:
        """Close every socket; nothing lingers."""
        for address in list(self._calls):
            self.hang_up(address)
        if self._listener is not None:
            self._listener.close(0)
        if self._woken >= 0:
            os.close(self._woken)
            self._woken = -1
        self._context.term()


def _number_callers(listener: zmq.Socket[bytes]) -> None:
    """Have a bound ROUTER count its callers, whatever routing ids they claim.

    Where some callers bring an id and others get the next number, an id that equals that number ends the
    *process* (libzmq 4.3.5 asserts that it is new). ROUTER_RAW makes the socket number all of them. It is set
    after ``bind``: the listening side has copied the options by then, and still speaks ZMTP. Reset at once,
    it leaves the numbering on, and an empty message an ordinary one.
    """
    listener.setsockopt(zmq.ROUTER_RAW, 1)
    listener.setsockopt(zmq.ROUTER_RAW, 0)


def _server_keys(secret: Secret) -> tuple[bytes, bytes]:
    """The key pair of every listener of the fleet: private, public.

    Both halves come from the secret, and neither travels. CURVE lets nobody talk to a listener whose public
    key they do not know, so knowing it is the caller's proof; answering is the listener's.
    """
    private = z85.encode(secret.key("control channel"))
    return private, zmq.curve_public(private)
