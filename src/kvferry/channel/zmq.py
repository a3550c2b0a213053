"""The control channel over ZeroMQ: the only file that imports zmq.

A channel has at most one listening socket, and one calling socket per address. All calls but ``wake`` belong
to one thread. Messages wait in queues with limits in bytes, per peer and in all, so that a slow reader or a
flooding sender costs little. Messages beyond the limits are dropped and counted: the protocol repeats each
message until it is answered. A peer that goes on is disconnected.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from typing import Any

from kvferry.channel.connections import Inbox, TcpConnections
from kvferry.errors import ChannelError, MissingPackage
from kvferry.wire.secret import Purpose, Secret

try:
    import zmq
    from zmq.utils import z85
    from zmq.utils.monitor import parse_monitor_message
except ModuleNotFoundError as error:
    raise MissingPackage.named(error) from None

_MAPPED = re.compile(r"\[::ffff:([0-9.]+)\]")

MAX_CALLS = 512
"""Addresses with a socket; the least recently used one is closed first."""
SCHEME = "tcp://"
"""Addresses come from tickets; ``inproc`` would reach into this process, ``ipc`` to sockets of the host."""
LINGER_MS = 200
"""How long the last messages may still be sent after ``hang_up``."""
HIGH_WATER = 1_000
"""Messages to be sent over a connection; more are dropped."""
NO_BOUND = 0
"""For received messages. A full queue stops ZeroMQ's reading, and if the connection breaks or falls silent
then, libzmq 4.3.5 aborts the *process* (``Assertion failed: _input_stopped``, or ``!_io_error``); also if
a caller takes over the name of another. ``wait`` takes messages much faster than they are handled, and drops
those without room in the ``Inbox``; ``TcpConnections`` stops even faster senders in the kernel."""
SOCKET_BUFFER_BYTES = 512 << 10
"""The kernel's, per connection and direction."""
AGAIN_SECONDS = 0.02
"""Between two attempts to listen."""
TAKE_SECONDS = 0.02
"""How long messages are taken from one socket before others get their turn."""
HANDSHAKE_MS = 5_000
SILENCE_SECONDS = 2.0
"""After so long without an answer to its heartbeats, a caller closes a connection and makes another. The
peer's network thread answers heartbeats."""
LISTENER_HEARTBEAT_MS = 500
"""A listener with many waiting messages does not see heartbeats of callers. Its own show that it is alive."""
LISTENER_SILENCE_MS = 10_000
"""Longer than ``SILENCE_SECONDS``: a caller without a processor for a few seconds keeps its connection."""
MAX_SOCKETS = 8 * MAX_CALLS
"""Of ZeroMQ, in a channel: each call has one, and two for its monitor. Closed ones count for a while."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message."""

    reply_to: str
    data: bytes


class Contact(StrEnum):
    """The state of the connection to an address."""

    CALLING = "calling"
    CONNECTED = "connected"
    """The handshake has succeeded; heartbeats begin."""
    BROKEN = "broken"
    """It was lost or refused; ZeroMQ tries again."""
    CLOSED = "closed"
    """It made room for others."""


@dataclass(frozen=True, slots=True)
class ContactChange:
    address: str
    contact: Contact


_CONTACTS = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED: Contact.CONNECTED,
    zmq.EVENT_DISCONNECTED: Contact.BROKEN,
    zmq.EVENT_CLOSED: Contact.BROKEN,
}
"""An accepted connection is not enough: the kernel accepts for a suspended process, too."""


@dataclass(eq=False, slots=True)
class _Call:
    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    port: int
    server_key: bytes
    """Empty without a secret."""
    is_greeting: bool = False
    """Whether it is connected, but the handshake has not ended."""

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(LINGER_MS)


class Channel:
    """Sends and receives messages. With a ``secret``, all are encrypted, and all callers must know it."""

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
        """Until the next ``wait``."""
        self._secret, self._server_keys = secret, _server_keys(secret)
        self._must_listen = False
        """Whether to listen again, with another key."""
        self._listener_number = 0
        self._max_bytes = max_bytes
        self._poller = zmq.Poller()
        self._monitor_numbers = count(1)
        self._calls: OrderedDict[str, _Call] = OrderedDict()
        self._listener: zmq.Socket[bytes] | None = None
        self._accepting: zmq.Socket[bytes] | None = None
        """ZeroMQ's monitor of the listener."""
        self._inbox = Inbox()
        self._is_drained = True
        """Whether the last ``wait`` took all messages."""
        self.dropped: Counter[str] = Counter()
        """Dropped messages, and muted and closed connections, by reason."""
        self._callers, self._called = TcpConnections(self.dropped), TcpConnections(self.dropped)
        # A pair of sockets could be full and lose a call.
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller.register(self._woken, zmq.POLLIN)
        self.address = ""
        if listen:
            try:
                self._listen(listen)
            except ChannelError:
                self.close()
                raise

    def _listen(self, listen: str) -> None:
        if not listen.startswith(SCHEME):
            raise ChannelError(f"cannot listen at {listen}: use {SCHEME}HOST:PORT")
        socket = self._socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.HEARTBEAT_IVL, LISTENER_HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, LISTENER_SILENCE_MS)
        if self._server_keys:
            socket.curve_secretkey, socket.curve_server = self._server_keys[0].private, True
        accepting = self._monitor(socket, zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        try:
            socket.bind(listen)
        except zmq.ZMQError as error:
            for one in (accepting, socket):
                one.close(0)
            raise ChannelError(f"cannot listen at {listen}: {error}") from error
        _number_callers(socket)
        endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        # A socket for both kinds writes an IPv4 address as an IPv6 one.
        self.address = _MAPPED.sub(r"\1", endpoint)
        for one in (socket, accepting):
            self._poller.register(one, zmq.POLLIN)
        self._listener, self._accepting = socket, accepting
        self._listener_number += 1

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.MAXMSGSIZE, self._max_bytes),
            (zmq.SNDHWM, HIGH_WATER),
            (zmq.RCVHWM, NO_BOUND),
            (zmq.SNDBUF, SOCKET_BUFFER_BYTES),
            (zmq.RCVBUF, SOCKET_BUFFER_BYTES),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
            (zmq.RECONNECT_IVL_MAX, 2_000),
            (zmq.IPV6, 1),
        ):
            socket.setsockopt(option, value)
        return socket

    @staticmethod
    def is_answer(to: str) -> bool:
        """Whether it is a ``reply_to``."""
        return to.startswith("@")

    def send(self, to: str, data: bytes) -> None:
        """Send to an address, or to a ``reply_to``; never blocks, never raises because of a peer."""
        try:
            if self.is_answer(to):
                self._answer(to, data)
            elif to.startswith(SCHEME):
                self._call(to).socket.send(data, zmq.NOBLOCK)
            else:
                self.dropped["address"] += 1
        except zmq.ZMQError:
            self.dropped["unsent"] += 1

    def _answer(self, to: str, data: bytes) -> None:
        if self._listener is None:
            return
        number, _, whom = to[1:].partition(".")
        if number != str(self._listener_number):
            self.dropped["unsent"] += 1  # its connection is gone
        elif self._callers.may_send(to, len(data), time.monotonic()):
            self._listener.send_multipart([bytes.fromhex(whom), data], zmq.NOBLOCK)
        else:
            self.dropped["unread"] += 1

    def _call(self, address: str) -> _Call:
        if address in self._calls:
            self._calls.move_to_end(address)
            return self._calls[address]
        if len(self._calls) >= MAX_CALLS:
            oldest = next(iter(self._calls))
            self.hang_up(oldest)
            self._changes.append(ContactChange(oldest, Contact.CLOSED))
        return self._open_call(address, self._server_keys[0].public if self._server_keys else b"")

    def _open_call(self, address: str, server_key: bytes) -> _Call:
        socket = self._socket(zmq.DEALER)
        socket.setsockopt(zmq.HEARTBEAT_IVL, int(self._silence_seconds * 1000 / 3))
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(self._silence_seconds * 2000 / 3))
        if server_key:
            socket.curve_serverkey = server_key
            socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
        monitor: zmq.Socket[bytes] | None = None
        try:
            monitor = self._monitor(socket, sum(_CONTACTS) | zmq.EVENT_CONNECTED)
            socket.connect(address)
        except zmq.ZMQError:  # an invalid address must not cost sockets
            for one in (monitor, socket):
                if one is not None:
                    one.close(0)
            raise
        call = _Call(socket, monitor, int(address.rpartition(":")[2]), server_key)
        self._poller.register(call.socket, zmq.POLLIN)
        self._poller.register(call.monitor, zmq.POLLIN)
        self._calls[address] = call
        self._changes.append(ContactChange(address, Contact.CALLING))
        return call

    def _monitor(self, socket: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
        """Reports a socket's connections. It has no bound: a full one would block ZeroMQ."""
        name = f"inproc://monitor-{next(self._monitor_numbers)}"
        socket.monitor(name, events)
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
        """Close the connection to an address, until the next ``send``."""
        call = self._calls.pop(address, None)
        if call is not None:
            self._inbox.forget(address)
            self._called.forget(address)
            self._poller.unregister(call.socket)
            self._poller.unregister(call.monitor)
            call.close()

    def wait(self, seconds: float, *, is_behind: bool = False) -> list[Received | ContactChange]:
        """Changes of connections and some of the messages, after at most ``seconds`` or ``wake``.

        Messages stay in the inbox while the caller ``is_behind``.
        """
        is_ready = self._changes or (self._inbox and not is_behind)
        most = 0.0 if is_ready else max(0.0, min(seconds, self._seconds_to_look()))
        ready = dict(self._poller.poll(math.ceil(most * 1000)))
        if self._woken in ready:
            os.eventfd_read(self._woken)
        self._is_drained = True
        if self._accepting is not None and self._accepting in ready:
            self._meet_callers(self._accepting)
        if self._listener is not None and self._listener in ready:
            self._hear(self._listener)
        for address, call in list(self._calls.items()):
            if call.monitor in ready:
                self._changes += self._news(address, call)
            if call.socket in ready and self._calls.get(address) is call:
                self._take_answers(address, call)
        self._look()
        self._follow_secret()
        received: list[Received | ContactChange] = list(self._changes)
        self._changes.clear()
        if not is_behind:
            received += [Received(peer, data) for peer, data in self._inbox.take()]
        return received

    def _follow_secret(self) -> None:
        """Listen with another key if the secret has changed. Calls change theirs when they are refused."""
        if self._secret is None:
            return
        self._secret.refresh()
        first = self._server_keys[0]
        if self._secret.keys(Purpose.CHANNEL) != tuple(keys.seed for keys in self._server_keys):
            self._server_keys = _server_keys(self._secret)
        if self._listener is not None and self._server_keys[0] != first:
            self._stop_listening()
            self._must_listen = True
        if self._must_listen:
            with contextlib.suppress(ChannelError):  # ZeroMQ may still be closing the old listener
                self._listen(self.address)
                self._must_listen = False

    def _seconds_to_look(self) -> float:
        now = time.monotonic()
        if self._must_listen:
            return AGAIN_SECONDS
        return min(self._callers.seconds_to_look(now), self._called.seconds_to_look(now))

    def _look(self) -> None:
        now = time.monotonic()
        for connections in (self._callers, self._called):
            connections.is_drained |= self._is_drained
            if not connections.seconds_to_look(now):
                connections.look(now)

    @staticmethod
    def _told(monitor: zmq.Socket[bytes]) -> Iterator[Mapping[str, Any]]:
        with contextlib.suppress(zmq.Again):
            for _ in range(1000):
                yield parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))

    def _news(self, address: str, call: _Call) -> list[ContactChange]:
        changes: list[ContactChange] = []
        for told in self._told(call.monitor):
            event = zmq.Event(told["event"])
            if event is zmq.EVENT_DISCONNECTED and call.is_greeting:
                self._changes += changes
                return self._call_with_another_key(address, call)
            call.is_greeting = event is zmq.EVENT_CONNECTED
            if event is zmq.EVENT_CONNECTED:
                self._called.begin(told["value"], call.port)
                self._called.introduce(address, told["value"])
            else:
                changes.append(ContactChange(address, _CONTACTS[event]))
            if event is zmq.EVENT_DISCONNECTED:
                self._called.end(told["value"])
        return changes

    def _call_with_another_key(self, address: str, call: _Call) -> list[ContactChange]:
        """While a fleet changes its secret, a peer may know only the other one."""
        call.is_greeting = False
        others = [keys.public for keys in self._server_keys if keys.public != call.server_key]
        if others:
            self.hang_up(address)
            self._open_call(address, others[0])
        return [ContactChange(address, Contact.BROKEN)]

    def _meet_callers(self, accepting: zmq.Socket[bytes]) -> None:
        port = int(self.address.rpartition(":")[2])
        for told in self._told(accepting):
            match told["event"]:
                case zmq.EVENT_LISTENING:
                    self._callers.listen(told["value"])
                case zmq.EVENT_ACCEPTED:
                    self._callers.begin(told["value"], port)
                case _:
                    self._callers.end(told["value"])

    def _hear(self, listener: zmq.Socket[bytes]) -> None:
        for whom, *frames in self._taken(listener):
            route = f"@{self._listener_number}.{whom.bytes.hex()}"
            if not self._callers.is_known(route):
                self._callers.introduce(route, _fd_of(frames[0]))
            if not self._callers.is_heard(route):
                self.dropped["gone"] += 1
            elif not self._keep(route, frames):
                self._callers.hang_up(route, "flood")
                self._inbox.forget(route)

    def _take_answers(self, address: str, call: _Call) -> None:
        for frames in self._taken(call.socket):
            self._called.is_heard(address)
            if not self._keep(address, frames):
                self.hang_up(address)
                self._changes.append(ContactChange(address, Contact.CLOSED))
                return

    def _taken(self, socket: zmq.Socket[bytes]) -> Iterator[list[zmq.Frame]]:
        until = time.monotonic() + TAKE_SECONDS
        with contextlib.suppress(zmq.Again):
            while time.monotonic() < until:
                yield socket.recv_multipart(zmq.NOBLOCK, copy=False)
            self._is_drained = False

    def _keep(self, peer: str, frames: list[zmq.Frame]) -> bool:
        """Queue a message, or drop it; returns whether to keep the peer."""
        num_bytes = sum(len(frame.buffer) for frame in frames)
        if len(frames) == 1 and self._inbox.has_room(peer, num_bytes):
            self._inbox.put(peer, frames[0].bytes)
            return True
        self.dropped["behind" if len(frames) == 1 else "frames"] += 1
        return not self._inbox.refuse(peer, num_bytes, len(frames))

    def wake(self) -> None:
        """End the current or next ``wait``. From any thread, but not during ``close``."""
        if self._woken >= 0:
            os.eventfd_write(self._woken, 1)

    def _stop_listening(self) -> None:
        """Close the listener after its connections: ZeroMQ aborts if data arrives meanwhile."""
        if self._listener is None or self._accepting is None:
            return
        self._meet_callers(self._accepting)
        self._callers.hang_up_on_all()
        until = time.monotonic() + LINGER_MS / 1000
        while len(self._callers) and time.monotonic() < until:
            self._accepting.poll(10)
            self._meet_callers(self._accepting)
            self._callers.hang_up_on_all()
        self._callers.close()
        for one in (self._listener, self._accepting):
            self._poller.unregister(one)
        self._listener.disable_monitor()
        self._accepting.close(0)
        self._listener.close(0)
        self._listener = self._accepting = None

    def close(self) -> None:
        for address in list(self._calls):
            self.hang_up(address)
        self._stop_listening()
        self._callers.close()
        self._called.close()
        if self._woken >= 0:
            os.close(self._woken)
            self._woken = -1
        self._context.term()


def _fd_of(frame: zmq.Frame) -> int:
    """The connection of a message; -1 for a peer whose ZMTP is older than version 3."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1


def _number_callers(listener: zmq.Socket[bytes]) -> None:
    """Have a bound ROUTER number its callers, and ignore the routing ids that they claim.

    Otherwise, a claimed id that equals the next number aborts the *process* (libzmq 4.3.5 asserts that it is
    new). ROUTER_RAW turns the numbering on. The listening side has copied the options in ``bind``, and still
    speaks ZMTP. The reset leaves the numbering on, and keeps empty messages ordinary.
    """
    listener.setsockopt(zmq.ROUTER_RAW, 1)
    listener.setsockopt(zmq.ROUTER_RAW, 0)


@dataclass(frozen=True, slots=True)
class _ServerKeys:
    """The key pair of every listener of the fleet.

    Both keys come from the secret, and neither is sent. A CURVE caller must know the listener's public key,
    which proves that it knows the secret; the listener proves it by its answer.
    """

    seed: bytes
    private: bytes
    public: bytes

    def __repr__(self) -> str:
        return "_ServerKeys(…)"


def _server_keys(secret: Secret | None) -> tuple[_ServerKeys, ...]:
    """The listener uses the first."""
    seeds = secret.keys(Purpose.CHANNEL) if secret is not None else ()
    privates = [z85.encode(seed) for seed in seeds]
    return tuple(
        _ServerKeys(seed, private, zmq.curve_public(private))
        for seed, private in zip(seeds, privates, strict=True)
    )
