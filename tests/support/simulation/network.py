"""The control network of the simulated world: it delays, loses, repeats and reorders, link by link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count
from random import Random
from typing import Protocol

from kvferry.channel import Contact, ContactChange, Received
from kvferry.endpoint.edges import ChannelThread
from kvferry.errors import KVFerryError
from tests.support.simulation.boards import SimulatedBoards
from tests.support.simulation.timeline import Action, Timeline
from tests.support.simulation.trace import Trace

Receive = Callable[[Received | ContactChange], None]

HEARTBEAT_SECONDS = 0.3
SILENCE_SECONDS = 1.4
"""After how long without an answer a connection counts as broken."""


class Place(Protocol):
    """Whoever has a channel: a process of the world, or a stranger."""

    @property
    def name(self) -> str:
        """For the trace."""
        ...

    @property
    def host(self) -> Host:
        """Where it runs."""
        ...

    @property
    def is_running(self) -> bool:
        """Whether it answers heartbeats."""
        ...

    def do(self, action: Action) -> None:
        """Have something done there."""
        ...


class Host(Protocol):
    """An end of a link."""

    name: str
    is_healthy: bool


@dataclass(frozen=True, slots=True)
class LinkQuality:
    """What a link between two hosts does to messages; shares are of 1."""

    loss: float = 0.0
    repeats: float = 0.0
    late: float = 0.0
    """How many take seconds instead of milliseconds."""
    is_ordered: bool = True
    """Whether what was sent first arrives first; a connection of ZeroMQ's does that while it lasts."""


@dataclass(slots=True, eq=False)
class _Call:
    """A connection that a channel has made, or tries to make, to an address."""

    caller: SimulatedChannel
    address: str
    reply_to: str
    answered_by: SimulatedChannel | None = None
    """Who was there last; None if it is not connected."""
    answered_at: float = 0.0


class Network:
    """Carries messages between the channels that are open. Between two healthy hosts it does no harm."""

    def __init__(
        self, timeline: Timeline, chance: Random, trace: Trace, quality: LinkQuality, boards: SimulatedBoards
    ) -> None:
        self._timeline, self._chance, self._trace = timeline, chance, trace
        self.quality, self.boards = quality, boards
        self.cut: set[frozenset[str]] = set()
        """Pairs of hosts that cannot reach each other now."""
        self._channels: dict[str, SimulatedChannel] = {}
        self._last_arrivals: dict[tuple[str, str], float] = {}
        self._numbers = count(1)

    def open(self, place: Place, listen: str) -> SimulatedChannel:
        """A channel; a listener takes the address from whoever had it."""
        channel = SimulatedChannel(self, place, listen)
        if listen:
            self._channels[listen] = channel
        return channel

    def connect(self, channel: SimulatedChannel, address: str) -> str:
        """Where answers go to that come over a new connection of a channel."""
        call = _Call(channel, address, f"@{next(self._numbers)}")
        self._channels[call.reply_to] = channel
        self._tell(call, Contact.CALLING)
        self._timeline.after(self._chance.uniform(0.001, 0.005), partial(self._beat, call))
        return call.reply_to

    def _beat(self, call: _Call) -> None:
        """One heartbeat of a connection; what has become of it, if that has changed."""
        if self._channels.get(call.reply_to) is not call.caller:
            return  # nobody wants it any more
        self._timeline.after(HEARTBEAT_SECONDS, partial(self._beat, call))
        there, now = self._channels.get(call.address), self._timeline.now
        is_another = there is not call.answered_by
        if call.answered_by is not None and (is_another or now >= call.answered_at + SILENCE_SECONDS):
            call.answered_by = None
            self._tell(call, Contact.BROKEN)
        elif there is None:
            self._tell(call, Contact.BROKEN)  # refused
        if there is not None and there.place.is_running and not self._is_cut(call.caller, there):
            if call.answered_by is None:
                self._tell(call, Contact.CONNECTED)
            call.answered_by, call.answered_at = there, now

    def _tell(self, call: _Call, contact: Contact) -> None:
        self._trace.add(call.caller.name, "notices of", call.address, contact.value)
        change = ContactChange(call.address, contact)
        call.caller.place.do(partial(call.caller.take, change))

    def _is_cut(self, one: SimulatedChannel, other: SimulatedChannel) -> bool:
        return frozenset((one.place.host.name, other.place.host.name)) in self.cut

    def forget(self, channel: SimulatedChannel, reply_to: str) -> None:
        """Whatever comes for a channel from now on is lost, unless another one has its address."""
        if self._channels.get(reply_to) is channel:
            del self._channels[reply_to]

    def carry(self, sender: SimulatedChannel, to: str, data: bytes) -> None:
        """Take a message; it arrives once, several times, or never."""
        receiver = self._channels.get(to)
        if receiver is None:
            self._trace.message(sender.name, to, data, "lost: nobody is there")
            return
        ends = (sender.place.host, receiver.place.host)
        is_healthy = ends[0].is_healthy and ends[1].is_healthy
        quality = LinkQuality() if is_healthy else self.quality
        chance = self._chance
        if self._is_cut(sender, receiver) or chance.random() < quality.loss:
            self._trace.message(sender.name, receiver.name, data, "lost on the way")
            return
        reply_to = sender.reply_to(to)
        num_copies = 1 + (chance.random() < quality.repeats)
        for _ in range(num_copies):
            is_late = chance.random() < quality.late
            seconds = chance.uniform(0.2, 10.0) if is_late else chance.uniform(0.0002, 0.003)
            arrival = self._timeline.now + seconds
            if quality.is_ordered:
                link = (reply_to, to)
                arrival = max(arrival, self._last_arrivals.get(link, 0.0))
                self._last_arrivals[link] = arrival
            self._timeline.at(arrival, partial(self._arrive, to, reply_to, data))
        self._trace.message(sender.name, receiver.name, data, "sent twice" if num_copies > 1 else "sent")

    def _arrive(self, to: str, reply_to: str, data: bytes) -> None:
        receiver = self._channels.get(to)
        if receiver is not None:
            receiver.place.do(partial(receiver.take, Received(reply_to, data)))


class SimulatedChannel(ChannelThread):
    """One end of the network, as an endpoint sees it."""

    def __init__(self, network: Network, place: Place, address: str) -> None:
        self._network, self.place, self.address = network, place, address
        self._calls: dict[str, str] = {}
        """By the address that is called: where answers go to."""
        self.refused: Mapping[str, int] = Counter()
        self.dropped: Mapping[str, int] = {}
        self._receive: Receive = lambda received: None
        self.on_send: Callable[[str, bytes], None] | None = None
        """Sees what is sent, before anybody else does."""
        self.rewrite: Callable[[str, bytes], list[tuple[str, bytes]]] | None = None
        """Makes other messages of what is sent: for those who lie."""

    @property
    def name(self) -> str:
        """Whose it is."""
        return self.place.name

    def start(self, name: str, receive: Receive, is_behind: Callable[[], bool]) -> None:
        """From now on ``receive`` is called with what arrives."""
        self._receive = receive

    def send(self, to: str, data: bytes) -> None:
        """Give a message to the network."""
        if self.on_send is not None:
            self.on_send(to, data)
        for receiver, message in [(to, data)] if self.rewrite is None else self.rewrite(to, data):
            self._network.carry(self, receiver, message)

    def take(self, received: Received | ContactChange) -> None:
        """A message has arrived; what cannot be read is counted and dropped, as the real channel does."""
        try:
            self._receive(received)
        except KVFerryError as error:
            self.refused = Counter(self.refused) + Counter([type(error).__name__])

    def reply_to(self, address: str) -> str:
        """Where whoever is at an address sends its answers; a connection is made if there is none."""
        if self.address:
            return self.address
        if address not in self._calls:
            self._calls[address] = self._network.connect(self, address)
        return self._calls[address]

    def hang_up(self, address: str) -> None:
        """Give a connection up: what is under way on it to here is lost."""
        if reply_to := self._calls.pop(address, ""):
            self._network.forget(self, reply_to)

    def close(self) -> None:
        """Nobody listens here any more."""
        for reply_to in (self.address, *self._calls.values()):
            self._network.forget(self, reply_to)
