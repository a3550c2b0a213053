"""The packed way over TCP: the source's rank sends what it gathers over a stream, and we scatter it.

We ask for a stream, connect, and name it. After that each ask is answered by a frame of bytes on it, or by a
refusal on the control channel (docs/design.md has the picture).

Nothing of either process is open to the other, and no fabric is involved: a death is a closed connection. One
thread owns all this, and waits for nobody: a source from which nothing comes fails its reads by a deadline.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from time import monotonic

from kvferry.core.product import Term
from kvferry.errors import TransportError
from kvferry.log import log_of
from kvferry.transport.chunk_copier import ChunkCopier
from kvferry.transport.event_wait import EventWait
from kvferry.transport.frame_receiver import ArrivedFrame, FrameReceiver
from kvferry.transport.gather_line import GatherLine
from kvferry.transport.gathered_reads import ANSWER_S, GatheredLink, GatheredRead, GatherMover
from kvferry.transport.pack import TermSide, dst_of
from kvferry.transport.places import Places
from kvferry.transport.quietly import quietly
from kvferry.transport.socket_loop import SocketLoop
from kvferry.transport.staging import Staging
from kvferry.transport.stream_call import end_call, start_call
from kvferry.transport.stream_frames import OPENED, StreamOffer

log = log_of(__name__)

MAX_ASKED = 32
"""Frames that one rank is asked for at once. They cost no memory: asks wait at the source."""
LOOK_S = 1.0
"""How long we wait for bytes before we look by ourselves: the kernel wakes us for enough of them only, and
fewer may lie there (a slow link; a window that is full before)."""
ENOUGH_AT_ONCE = 8
"""Calls to one socket before others get their turn."""


class _Read(GatheredRead["StreamLink", "_Ask"]):
    """Of a rank with a stream."""


@dataclass(eq=False, slots=True)
class _Ask:
    read: _Read
    terms: tuple[Term, ...]
    asked_at: float

    @property
    def num_bytes(self) -> int:
        return sum(term.total_bytes for term in self.terms)


class StreamLink(GatheredLink[_Read]):
    """A rank that sends what it gathers."""

    _mover: StreamMover

    def __init__(self, mover: StreamMover, name: str, staging: Staging, src: Places) -> None:
        super().__init__(mover, name, staging, src)
        # The mover's thread's alone:
        self.stream: _Stream | None = None
        self.openers: list[Callable[[str], None]] = []
        """Who waits for it to be open; they get the error, or an empty text."""

    def open(self, timeout_s: float) -> None:
        """Wait for the stream; raises TransportError, or TimeoutError if the rank does not answer."""
        opened: Future[str] = Future()
        self._mover.put(partial(self._mover.open, self, opened.set_result))
        if error := opened.result(timeout_s):
            raise TransportError("no-connection", f"{self.name}: {error}")


@dataclass(eq=False, slots=True)
class _Stream:
    """The connection to a rank, from the first question on."""

    link: StreamLink
    nonce: int
    """Of the question for it."""
    since: float
    """When something came last, or was asked for."""
    offer: StreamOffer | None = None
    socket: socket.socket | None = None
    is_open: bool = False
    frames: FrameReceiver | None = None


class StreamMover(GatherMover[StreamLink, _Read]):
    """Reads the ranks that send what they gather."""

    new_read = _Read

    def __init__(
        self, copier: ChunkCopier, line: GatherLine, nonces: Iterator[int], events: EventWait | None = None
    ) -> None:
        super().__init__(copier, line, nonces, events)
        # The thread's alone:
        self._asks: dict[int, _Ask] = {}
        self._loop = SocketLoop("kvferry-stream-reads", self._turn)
        self._loop.start()

    # ---- from any thread

    def link(self, name: str, staging: Staging, src: Places) -> StreamLink:
        """A rank that gathers; its stream is not open yet."""
        return StreamLink(self, name, staging, src)

    def put(self, event: Callable[[], None]) -> None:
        """Have something done by the thread."""
        self._loop.put(event)

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

    def _look_after(self, link: StreamLink, now: float) -> float:
        """Give up a stream on which nothing comes that should; when to look again."""
        stream, asked = link.stream, [ask.asked_at for ask in self._asks_of(link)]
        if stream is None or not (stream.nonce or asked):
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
                self._call(link)
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
                self._line.ask(link.staging.address, nonce, read.permit, terms, stream.offer.stream_id)
                return True
            read.is_all_asked = True
            link.waiting.popleft()
            self._end_if_over(read)
        return False

    def _stop_asks_of(self, read: _Read) -> None:
        frames = read.link.stream.frames if read.link.stream else None
        if frames and frames.nonce in read.asks:
            frames.ignore()
        for nonce in [*read.asks]:
            self._drop(nonce)

    def _drop(self, nonce: int) -> None:
        if ask := self._asks.pop(nonce, None):
            del ask.read.asks[nonce]

    def _refused(self, sender: str, nonce: int, error: str) -> None:
        ask = self._asks.get(nonce)
        if ask and ask.read.link.staging.address == sender:
            self.give_up(ask.read, f"{ask.read.link.name} does not gather: {error}")
        for link in [*self._links]:
            if link.stream and link.stream.nonce == nonce and link.staging.address == sender:
                self._lose(link, f"{link.name} offers no stream: {error}")

    def _close(self) -> None:
        for link in [*self._links]:
            self._lose(link, "the transport was closed")
        self._loop.stop()

    # ---- in the thread: streams

    def open(self, link: StreamLink, is_open: Callable[[str], None]) -> None:
        """Say when the stream of a rank is open, or why it is not."""
        if self._is_closing:
            is_open("the transport was closed")
        elif link.stream and link.stream.is_open:
            is_open("")
        else:
            link.openers.append(is_open)
            if link.stream is None:
                self._call(link)

    def _call(self, link: StreamLink) -> None:
        """Ask a rank for a stream."""
        nonce = next(self._nonces)
        if link not in self._links:
            self._links.append(link)
        link.stream = _Stream(link, nonce, monotonic())
        self._line.open_stream(link.staging.address, nonce, link.src.regions)

    def _connect(self, sender: str, nonce: int, offer: StreamOffer) -> None:
        for link in [*self._links]:
            stream = link.stream
            if not stream or stream.nonce != nonce or stream.socket or link.staging.address != sender:
                continue
            stream.offer = offer
            try:
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
            end_call(stream.socket, offer)
        except OSError as error:
            self._lose(link, f"the stream of {link.name} at {offer.address} cannot be called: {error}")
            return
        sides_of = partial(self._sides_of, link)
        stream.frames = FrameReceiver(self.copier, offer.key, sides_of)
        self._loop.watch(stream.socket, partial(self._receive, stream))

    def _receive(self, stream: _Stream) -> None:
        """Take what has come."""
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
        """All of a frame is there."""
        if arrived.nonce == OPENED:
            self._opened(stream)
        elif ask := self._asks.get(arrived.nonce):
            if arrived.is_good:
                self._drop(arrived.nonce)
                self._end_if_over(ask.read)
            else:
                self.give_up(ask.read, f"{stream.link.name} does not gather: its lease is over")

    def _opened(self, stream: _Stream) -> None:
        stream.is_open, stream.nonce = True, 0
        _tell(stream.link, "")

    def _lose(self, link: StreamLink, error: str) -> None:
        """A stream is over, and with it all reads that wait for its bytes. The next read asks for another."""
        stream, link.stream = link.stream, None
        if stream and stream.socket:
            self._loop.ignore(stream.socket)
            stream.socket.close()
            frames, stream.socket, stream.frames = stream.frames, None, None
            if frames:
                quietly(frames.close)
        self.give_up_all_of(link, error)
        _tell(link, error)


def _tell(link: StreamLink, error: str) -> None:
    """Who waits for a stream hears of it."""
    openers, link.openers = link.openers, []
    for is_open in openers:
        is_open(error)
