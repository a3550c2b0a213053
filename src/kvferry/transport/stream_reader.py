"""The reader's side of streams: source ranks send the requested bytes, and this rank scatters them.

The first read of a rank requests a stream and connects it. The answer to each later request is a frame on the
stream, or a refusal on the control channel (docs/design.md has a diagram).

Neither process exposes memory to the other; a dead process closes its connection. One thread owns everything
here and never blocks: reads of a silent source fail at a deadline.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from time import monotonic
from typing import NamedTuple, Protocol

from kvferry.core.choices import Way
from kvferry.core.manifest import Region
from kvferry.core.product import Product, Term
from kvferry.errors import TransportError
from kvferry.host.threads import SocketLoop, quietly
from kvferry.log import log_of
from kvferry.transport.base import Connected, DeviceEvent
from kvferry.transport.cards import GatherPoint
from kvferry.transport.pack import ChunkCopier, TermSide, check_term, dst_of, pieces
from kvferry.transport.places import Places
from kvferry.transport.reads import PostRoom, Read, ReadCarrier, ReadQueue, Share, Work
from kvferry.transport.stream_frames import (
    OPENED,
    ArrivedFrame,
    FrameReceiver,
    StreamOffer,
    end_call,
    start_call,
)
from kvferry.transport.transfers import Transfers

log = log_of(__name__)

ANSWER_S = 20.0
"""The deadline of an answer to a request."""
MAX_ASKED = 32
"""Frames requested from one rank at once; requests wait at the source."""
LOOK_S = 1.0
"""How often the thread checks a socket without an event: the kernel wakes it only when many bytes have come
(``ENOUGH_BYTES``), which a slow link or a small window may never reach."""
ENOUGH_AT_ONCE = 8
"""Calls to one socket before others get their turn."""


class GatherLine(Protocol):
    """Sends requests to source ranks. Calls come from any thread, and none blocks."""

    def listen(self, answers: StreamMover) -> None:
        """Start; answers arrive in the line's thread."""
        ...

    def ask(self, to: str, nonce: int, permit: bytes, terms: Sequence[Term], stream_id: bytes) -> None:
        """Request the source side of these terms from the rank at an address."""
        ...

    def open_stream(self, to: str, nonce: int, permit: bytes, regions: Sequence[Region]) -> None:
        """Request a stream from the rank at an address, with its regions in the manifest."""
        ...

    def hang_up(self, address: str) -> None: ...

    def close(self) -> None:
        """Send pending messages, and stop."""
        ...


class _Asks(NamedTuple):
    permit: bytes
    pieces: Iterator[tuple[Term, ...]]


@dataclass(eq=False, slots=True)
class _Ask:
    share: Share
    terms: tuple[Term, ...]
    asked_at: float
    passed_at: float = float("inf")
    """When what was asked for later came: a stream answers in order, so the question is lost, or refused."""

    @property
    def num_bytes(self) -> int:
        return sum(term.total_bytes for term in self.terms)


@dataclass(eq=False, slots=True)
class _Stream:
    """The connection to a rank, from its request on."""

    link: StreamLink
    asked_for: Read
    """The read whose permit was used."""
    nonce: int
    """Of the request; 0 once it is open."""
    since: float
    """Time of the request, or of the last bytes."""
    offer: StreamOffer | None = None
    socket: socket.socket | None = None
    frames: FrameReceiver | None = None

    @property
    def is_open(self) -> bool:
        return not self.nonce


class StreamLink:
    connected, is_ordered = Connected(Way.PACKED), False

    def __init__(self, mover: StreamMover, name: str, point: GatherPoint, src: Places) -> None:
        self._memory, self.name, self.address, self.src = mover.copier.memory, name, point.address, src
        self._chunk_bytes = min(point.chunk_bytes, mover.copier.chunk_bytes)
        """Of one request; both sides have room for it."""
        self.queue = ReadQueue(name, mover, PostRoom(MAX_ASKED), can_drop=True)
        self.queues = [self.queue]
        # Used by the mover's thread only:
        self.asks: dict[int, _Ask] = {}
        """Those under way, by nonce."""
        self.stream: _Stream | None = None
        mover.add(self)

    def prepare(self, product: Product, after: DeviceEvent | None, permit: bytes = b"") -> Work:
        """Raises TransportError if a run leaves its region."""
        for term in product.terms:
            check_term(term, self.src, self._memory)
        return [(self.queue, _Asks(permit, pieces(product, self._chunk_bytes)))]


class StreamMover(ReadCarrier):
    """Reads remote ranks over streams, in a thread of its own."""

    def __init__(self, transfers: Transfers, copier: ChunkCopier, line: GatherLine) -> None:
        self._transfers, self.copier, self.line = transfers, copier, line
        # Used by the thread only:
        self._nonces = count(1)
        self._links: dict[ReadQueue, StreamLink] = {}
        self._loop = SocketLoop("kvferry-stream-reads", self._turn)
        self._loop.start()

    # ---- from any thread

    def add(self, link: StreamLink) -> None:
        self._loop.put(partial(self._links.__setitem__, link.queue, link))
        self._transfers.add(link.queue)

    def wake(self) -> None:
        self._loop.put(lambda: None)

    def drop(self, share: Share) -> None:
        self._loop.put(partial(self._drop, share))

    def release(self, queue: ReadQueue) -> None:
        self._loop.put(partial(self._let_go, queue))

    def close(self, timeout_s: float) -> bool:
        """End the thread; returns whether it has ended in time."""
        self._loop.put(self._close)
        return self._loop.join(timeout_s)

    def stream_offered(self, sender: str, nonce: int, offer: StreamOffer) -> None:
        self._loop.put(partial(self._connect, sender, nonce, offer))

    def not_gathered(self, sender: str, nonce: int, error: str) -> None:
        self._loop.put(partial(self._refused, sender, nonce, error))

    def lost(self, sender: str) -> None:
        """The control connection to a rank is lost, perhaps with requests."""
        self._loop.put(partial(self._lost, sender))

    # ---- in the thread: reads

    def _turn(self, now: float) -> float:
        links = [*self._links.values()]
        for link in links:
            self._ask_for_more(link, now)
        return min((self._look_after(link, now) for link in links), default=float("inf"))

    def _drop(self, share: Share) -> None:
        """End a read now: bytes that still arrive are dropped."""
        if link := self._links.get(share.queue):
            nonces = [nonce for nonce, ask in link.asks.items() if ask.share is share]
            if link.stream and link.stream.frames and link.stream.frames.nonce in nonces:
                link.stream.frames.ignore()
            for nonce in nonces:
                del link.asks[nonce]
                self._transfers.ended(share)

    def _lost(self, sender: str) -> None:
        for link in self._at(sender):
            self._lose(link, f"the control connection to {link.name} is lost")

    def _close(self) -> None:
        for link in self._links.values():
            self._hang_up(link)
        self._loop.stop()

    def _at(self, sender: str) -> list[StreamLink]:
        return [link for link in self._links.values() if link.address == sender]

    def _let_go(self, queue: ReadQueue) -> None:
        if link := self._links.pop(queue, None):
            self._hang_up(link)
            if not self._at(link.address):
                self.line.hang_up(link.address)

    def _look_after(self, link: StreamLink, now: float) -> float:
        """Close a stream that misses a deadline; returns when to look again."""
        stream, asked = link.stream, [ask.asked_at for ask in link.asks.values()]
        if stream is None or (stream.is_open and not asked):
            return float("inf")  # nothing is expected
        passed = min(link.asks.values(), key=lambda ask: ask.passed_at, default=None)
        if passed and passed.passed_at + ANSWER_S <= now:
            self._transfers.fail(passed.share.read, f"{link.name} did not answer within {ANSWER_S:g} s")
            return now
        started = max(stream.since, min(asked, default=stream.since))
        if now < (look := started + min(LOOK_S, ANSWER_S)):
            return look
        before = stream.since
        self._receive(stream)
        if stream.since > before or link.stream is not stream:
            return now  # there may be more to request
        if started + ANSWER_S <= now:
            self._lose(link, f"{link.name} sent nothing within {ANSWER_S:g} s")
            return float("inf")
        return min(started + ANSWER_S, now + LOOK_S)

    def _ask_for_more(self, link: StreamLink, now: float) -> None:
        """Send requests while there is room; the first one is for a stream."""
        if link.stream is None and (first := next(iter([*link.queue.waiting]), None)):
            self._call(link, first)
        while link.stream and link.stream.is_open and (share := self._transfers.post(link.queue)):
            permit, parts = share.work
            terms = next(parts, None)
            if terms is None or link.stream.offer is None:
                self._transfers.ended(share, is_last=True)
                continue
            nonce = next(self._nonces)
            link.asks[nonce] = _Ask(share, terms, now)
            self.line.ask(link.address, nonce, permit, terms, link.stream.offer.stream_id)

    def _refused(self, sender: str, nonce: int, error: str) -> None:
        for link in self._at(sender):
            if ask := link.asks.get(nonce):
                self._transfers.fail(ask.share.read, f"{link.name} rejected the read: {error}")
            elif (stream := link.stream) and not stream.is_open and stream.nonce == nonce:
                self._hang_up(link)  # the permit of another read may be valid
                self._transfers.fail(stream.asked_for, f"{link.name} rejected the stream: {error}")

    # ---- in the thread: streams

    def _call(self, link: StreamLink, share: Share) -> None:
        nonce = next(self._nonces)
        link.stream = _Stream(link, share.read, nonce, monotonic())
        self.line.open_stream(link.address, nonce, share.work.permit, link.src.regions)

    def _connect(self, sender: str, nonce: int, offer: StreamOffer) -> None:
        for link in self._at(sender):
            stream = link.stream
            if not stream or stream.nonce != nonce or stream.socket:
                continue
            stream.offer = offer
            try:
                offer.check_host(link.address)
                stream.socket = start_call(offer)
            except (OSError, ValueError) as error:
                self._lose(link, f"the stream of {link.name} at {offer.address} cannot be reached: {error}")
                return
            self._loop.watch(stream.socket, partial(self._say_hello, stream, offer), for_room=True)

    def _say_hello(self, stream: _Stream, offer: StreamOffer) -> None:
        link = stream.link
        if stream.socket is None:
            return
        try:
            frames = FrameReceiver(self.copier, offer.key, partial(self._sides_of, link))
            end_call(stream.socket, offer)
        except (OSError, TransportError) as error:
            self._lose(link, f"the stream of {link.name} at {offer.address} cannot be reached: {error}")
            return
        stream.frames = frames
        self._loop.watch(stream.socket, partial(self._receive, stream))

    def _receive(self, stream: _Stream) -> None:
        link = stream.link
        for _ in range(ENOUGH_AT_ONCE):
            if stream.socket is None or stream.frames is None:
                return
            try:
                arrived = stream.frames.receive(stream.socket)
            except BlockingIOError:
                return
            except Exception as error:
                if not isinstance(error, OSError | TransportError):
                    log.exception("bytes could not be scattered")
                self._lose(link, f"the stream of {link.name} is lost: {error}")
                return
            stream.since = monotonic()
            if arrived:
                self._take(stream, arrived)

    def _sides_of(self, link: StreamLink, nonce: int, num_bytes: int) -> list[TermSide]:
        """The places of a frame's bytes; none if its read has ended."""
        ask = link.asks.get(nonce)
        if ask is None:
            return []
        if ask.num_bytes != num_bytes:
            raise TransportError("bad-frame", f"a frame has {num_bytes} bytes, {ask.num_bytes} requested")
        return [dst_of(term) for term in ask.terms]

    def _take(self, stream: _Stream, arrived: ArrivedFrame) -> None:
        link = stream.link
        if arrived.nonce == OPENED:
            stream.nonce = 0
        elif ask := link.asks.pop(arrived.nonce, None):
            for nonce, earlier in link.asks.items():  # the oldest first
                if nonce > arrived.nonce:
                    break
                earlier.passed_at = min(earlier.passed_at, stream.since)
            error = "" if arrived.is_good else f"{link.name} stopped sending: its lease is over"
            self._transfers.ended(ask.share, error)

    def _lose(self, link: StreamLink, error: str) -> None:
        """Close a stream, and fail all reads of its rank. The next read requests another stream."""
        self._hang_up(link)
        self._transfers.fail_all(link.queue, error)

    def _hang_up(self, link: StreamLink) -> None:
        stream, link.stream = link.stream, None
        if stream and stream.socket:
            self._loop.ignore(stream.socket)
            stream.socket.close()
            frames, stream.socket, stream.frames = stream.frames, None, None
            if frames:
                quietly(frames.close)
