"""The reader's side of streams: source ranks send what we ask for, and we scatter it.

The first read of a rank asks it for a stream, connects, and names it. After that each ask is answered by a
frame of bytes on it, or by a refusal on the control channel (docs/design.md has the picture).

Nothing of either process is open to the other, and no fabric is involved: a death is a closed connection. One
thread owns all this, and waits for nobody: a source from which nothing comes fails its reads by a deadline.
"""

from __future__ import annotations

import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from time import monotonic

from kvferry.core.choices import Way
from kvferry.core.product import Product, Term
from kvferry.errors import TransportError
from kvferry.log import log_of
from kvferry.transport.base import CANCELLED, Connected, DeviceEvent, OnEnd, Start, quietly
from kvferry.transport.cards import GatherPoint
from kvferry.transport.pack import ChunkCopier, TermSide, check_term, dst_of, pieces
from kvferry.transport.places import Places
from kvferry.transport.socket_loop import SocketLoop
from kvferry.transport.stream_frames import (
    OPENED,
    ArrivedFrame,
    FrameReceiver,
    GatherLine,
    StreamOffer,
    end_call,
    start_call,
)

log = log_of(__name__)

ANSWER_S = 20.0
"""How long a rank that was asked for something may say, or send, nothing."""
MAX_ASKED = 32
"""Frames that one rank is asked for at once. They cost no memory: asks wait at the source."""
LOOK_S = 1.0
"""How long we wait for bytes before we look by ourselves: the kernel wakes us for enough of them only, and
fewer may lie there (a slow link; a window that is full before)."""
ENOUGH_AT_ONCE = 8
"""Calls to one socket before others get their turn."""


@dataclass(eq=False, slots=True)
class _Read:
    """A read that has not ended; it is asked for piece by piece."""

    link: StreamLink
    transfer: int
    permit: bytes
    pieces: Iterator[tuple[Term, ...]]
    on_end: OnEnd
    asks: dict[int, _Ask] = field(default_factory=dict)
    """By nonce: those under way."""
    is_all_asked: bool = False
    error: str = ""

    @property
    def has_ended(self) -> bool:
        return not self.asks and (bool(self.error) or self.is_all_asked)


@dataclass(eq=False, slots=True)
class _Ask:
    read: _Read
    terms: tuple[Term, ...]
    asked_at: float

    @property
    def num_bytes(self) -> int:
        return sum(term.total_bytes for term in self.terms)


@dataclass(eq=False, slots=True)
class _Stream:
    """The connection to a rank, from the first question on."""

    link: StreamLink
    asked_for: _Read
    """By whose permit."""
    nonce: int
    """Of the question for it; 0 once it is open."""
    since: float
    """When something came last, or was asked for."""
    offer: StreamOffer | None = None
    socket: socket.socket | None = None
    frames: FrameReceiver | None = None

    @property
    def is_open(self) -> bool:
        return not self.nonce


class StreamLink:
    """A remote rank that sends us what we ask for."""

    def __init__(self, mover: StreamMover, name: str, point: GatherPoint, src: Places) -> None:
        self._mover, self.name, self.address, self.src = mover, name, point.address, src
        self._chunk_bytes = min(point.chunk_bytes, mover.copier.chunk_bytes)
        """What is asked for at once: as much as both sides have room for."""
        # The mover's thread's alone:
        self.waiting: deque[_Read] = deque()
        self.reads: dict[int, _Read] = {}
        self.stream: _Stream | None = None
        self.is_forgotten = False

    @property
    def connected(self) -> Connected:
        return Connected(Way.PACKED)

    is_ordered = False

    def prepare(self, product: Product, after: DeviceEvent | None, permit: bytes = b"") -> Start:
        """Check that all runs are inside of their regions."""
        for term in product.terms:
            check_term(term, self.src, self._mover.copier.memory)
        return partial(self._start, pieces(product, self._chunk_bytes), permit)

    def _start(self, parts: Iterator[tuple[Term, ...]], permit: bytes, transfer: int, on_end: OnEnd) -> None:
        self._mover.submit(_Read(self, transfer, permit, parts, on_end))

    def cancel(self, transfer: int) -> None:
        """Ask for nothing more of a read; nothing of it is written any more when it ends."""
        self._mover.put(lambda: self._mover.give_up(self.reads.get(transfer), CANCELLED))

    def forget(self) -> None:
        self._mover.put(lambda: self._mover.forget(self))


class StreamMover:
    """Reads the ranks that send us what we ask for, in a thread of its own."""

    def __init__(self, copier: ChunkCopier, line: GatherLine) -> None:
        self.copier, self._line = copier, line
        self._lock = threading.Lock()
        """Guards ``_is_closing``: what is submitted before that is ended by the thread."""
        self._is_closing = False
        # The thread's alone:
        self._nonces = count(1)
        self._links: deque[StreamLink] = deque()
        self._asks: dict[int, _Ask] = {}
        self._loop = SocketLoop("kvferry-stream-reads", self._turn)
        self._loop.start()

    # ---- from any thread

    def put(self, event: Callable[[], None]) -> None:
        self._loop.put(event)

    def submit(self, read: _Read) -> None:
        with self._lock:
            if self._is_closing:
                raise TransportError("closed", "this transport was closed")
            self.put(partial(self._begin, read))

    def close(self, timeout_s: float) -> bool:
        """Ask for nothing more; whether all has ended in time."""
        with self._lock:
            is_first, self._is_closing = not self._is_closing, True
        if is_first:
            self.put(self._close)
        return self._loop.join(timeout_s)

    def stream_offered(self, sender: str, nonce: int, offer: StreamOffer) -> None:
        self.put(partial(self._connect, sender, nonce, offer))

    def not_gathered(self, sender: str, nonce: int, error: str) -> None:
        self.put(partial(self._refused, sender, nonce, error))

    def lost(self, sender: str) -> None:
        """What was asked for may not have been heard."""
        self.put(partial(self._lost, sender))

    # ---- in the thread: reads

    def _turn(self, now: float) -> float:
        self._ask_for_more(now)
        return min((self._look_after(link, now) for link in [*self._links]), default=float("inf"))

    def _begin(self, read: _Read) -> None:
        link = read.link
        link.reads[read.transfer] = read
        if link not in self._links:
            self._links.append(link)
        if link.is_forgotten:
            self.give_up(read, f"peer {link.name!r} was forgotten")
        else:
            link.waiting.append(read)

    def give_up(self, read: _Read | None, error: str) -> None:
        """Ask for nothing more of a read, which ends: bytes of it that still come are written nowhere."""
        if read is None:
            return
        read.error = read.error or error
        frames = read.link.stream.frames if read.link.stream else None
        if frames and frames.nonce in read.asks:
            frames.ignore()
        for nonce in [*read.asks]:
            self._drop(nonce)
        if read in read.link.waiting:
            read.link.waiting.remove(read)
        self._end_if_over(read)

    def forget(self, link: StreamLink) -> None:
        link.is_forgotten = True
        self._lose(link, f"peer {link.name!r} was forgotten")
        self._let_go(link)

    def _lost(self, sender: str) -> None:
        for link in [*self._links]:
            if link.address == sender:
                self._lose(link, f"the connection to the rank of {link.name} that sends is lost")

    def _end_if_over(self, read: _Read) -> None:
        if read.has_ended and read.link.reads.get(read.transfer) is read:
            del read.link.reads[read.transfer]
            quietly(read.on_end, read.error)
            self._let_go(read.link)

    def _let_go(self, link: StreamLink) -> None:
        """A forgotten rank, once nothing is under way with it."""
        if not link.is_forgotten or link.reads:
            return
        if link in self._links:
            self._links.remove(link)
        if all(other.address != link.address for other in self._links):
            self._line.hang_up(link.address)

    def _look_after(self, link: StreamLink, now: float) -> float:
        """Give up a stream on which nothing comes that should; when to look again."""
        stream, asked = link.stream, [ask.asked_at for ask in self._asks_of(link)]
        if stream is None or (stream.is_open and not asked):
            return float("inf")  # nothing is to come
        started = max([stream.since, *asked])
        if now < (look := started + min(LOOK_S, ANSWER_S)):
            return look
        before = stream.since
        self._receive(stream)
        if stream.since > before or link.stream is not stream:
            return now  # there may be more to ask for
        if started + ANSWER_S <= now:
            self._lose(link, f"{link.name} sent nothing within {ANSWER_S:g} s")
            return float("inf")
        return min(started + ANSWER_S, now + LOOK_S)

    def _asks_of(self, link: StreamLink) -> Iterator[_Ask]:
        return (ask for read in link.reads.values() for ask in read.asks.values())

    def _ask_for_more(self, now: float) -> None:
        """Every rank as much as it may be asked for at once; a stream that is gone is asked for, too."""
        for link in [*self._links]:
            if link.waiting and link.stream is None:
                self._call(link, link.waiting[0])
            while link.stream and link.stream.is_open and sum(1 for _ in self._asks_of(link)) < MAX_ASKED:
                if not self._ask_one(link, link.stream, now):
                    break

    def _ask_one(self, link: StreamLink, stream: _Stream, now: float) -> bool:
        while link.waiting:
            read = link.waiting[0]
            terms = next(read.pieces, None)
            if terms is not None and stream.offer:
                nonce = next(self._nonces)
                read.asks[nonce] = self._asks[nonce] = _Ask(read, terms, now)
                self._line.ask(link.address, nonce, read.permit, terms, stream.offer.stream_id)
                return True
            read.is_all_asked = True
            link.waiting.popleft()
            self._end_if_over(read)
        return False

    def _drop(self, nonce: int) -> None:
        if ask := self._asks.pop(nonce, None):
            del ask.read.asks[nonce]

    def _refused(self, sender: str, nonce: int, error: str) -> None:
        ask = self._asks.get(nonce)
        if ask and ask.read.link.address == sender:
            self.give_up(ask.read, f"{ask.read.link.name} sends nothing: {error}")
        for link in [*self._links]:
            stream = link.stream
            if stream and stream.nonce == nonce and link.address == sender:
                link.stream = None  # another read may have a better permit
                self.give_up(stream.asked_for, f"{link.name} offers no stream: {error}")

    def _close(self) -> None:
        for link in [*self._links]:
            self._lose(link, "the transport was closed")
        self._loop.stop()

    # ---- in the thread: streams

    def _call(self, link: StreamLink, read: _Read) -> None:
        nonce = next(self._nonces)
        link.stream = _Stream(link, read, nonce, monotonic())
        self._line.open_stream(link.address, nonce, read.permit, link.src.regions)

    def _connect(self, sender: str, nonce: int, offer: StreamOffer) -> None:
        for link in [*self._links]:
            stream = link.stream
            if not stream or stream.nonce != nonce or stream.socket or link.address != sender:
                continue
            stream.offer = offer
            try:
                offer.check_host(link.address)
                stream.socket = start_call(offer)
            except (OSError, ValueError) as error:
                self._lose(link, f"the stream of {link.name} at {offer.address} cannot be called: {error}")
                return
            self._loop.watch(stream.socket, partial(self._say_hello, stream, offer), for_room=True)

    def _say_hello(self, stream: _Stream, offer: StreamOffer) -> None:
        """The connection is there, or refused."""
        link = stream.link
        if stream.socket is None:
            return
        try:
            frames = FrameReceiver(self.copier, offer.key, partial(self._sides_of, link))
            end_call(stream.socket, offer)
        except (OSError, TransportError) as error:
            self._lose(link, f"the stream of {link.name} at {offer.address} cannot be called: {error}")
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
        """Where the bytes of a frame belong; nowhere if nobody wants them any more."""
        ask = self._asks.get(nonce)
        if ask is None:
            return []
        if ask.read.link is not link or ask.num_bytes != num_bytes:
            raise TransportError("bad-frame", f"{num_bytes} bytes for an ask of {ask.num_bytes}")
        return [dst_of(term) for term in ask.terms]

    def _take(self, stream: _Stream, arrived: ArrivedFrame) -> None:
        if arrived.nonce == OPENED:
            stream.nonce = 0
        elif ask := self._asks.get(arrived.nonce):
            if arrived.is_good:
                self._drop(arrived.nonce)
                self._end_if_over(ask.read)
            else:
                self.give_up(ask.read, f"{stream.link.name} sends nothing: its lease is over")

    def _lose(self, link: StreamLink, error: str) -> None:
        """A stream is over, and with it all reads of its rank. The next read asks for another."""
        stream, link.stream = link.stream, None
        if stream and stream.socket:
            self._loop.ignore(stream.socket)
            stream.socket.close()
            frames, stream.socket, stream.frames = stream.frames, None, None
            if frames:
                quietly(frames.close)
        for read in [*link.reads.values()]:
            self.give_up(read, error)
