"""The packed way: the source's rank gathers short runs into its ring, we read it in bulk, and scatter.

::

    this rank                                         the source's rank
      reserves a chunk of its own ring
      asks: gather these bytes        ────────────▶   checks the permit, gathers into a chunk of its ring
                                      ◀────────────   they are in this chunk, of this generation
      reads the chunk by the fabric into its own
      gives the chunk back            ────────────▶   if it is asked: was it still of that generation?
      scatters                        ◀────────────   yes: what was read counts. No: it is asked for again

Where it can see the source's ring (``ring_window``), it scatters from there, and gives the chunk back then.
There it asks only if it took long: a source takes no chunk away before its patience is over, while the lease
stands; and whether that stood, every load asks after its last byte. Two hosts have two clocks, either of
which may stand still for a while (a machine that is moved): between them it always asks.

One thread owns all this, that of the line to the source's ranks; callers and the fabric leave events in its
inbox. It never waits for anybody: a read whose source does not answer fails by a deadline, and others go on
meanwhile.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic

import numpy as np

from kvferry.core.product import Product, Term
from kvferry.core.runs import Runs
from kvferry.errors import TransportError
from kvferry.log import log_of
from kvferry.transport.chunk_copier import ChunkCopier
from kvferry.transport.event_wait import EventWait
from kvferry.transport.gather_line import GatheredChunk, GatherLine
from kvferry.transport.gathered_reads import ANSWER_S, GatheredLink, GatheredRead, GatherMover
from kvferry.transport.link import Link
from kvferry.transport.pack import dst_of
from kvferry.transport.places import Places
from kvferry.transport.quietly import quietly
from kvferry.transport.ring_window import RingWindow
from kvferry.transport.staging import Staging
from kvferry.transport.staging_ring import StagingRing

log = log_of(__name__)

SURE_ASKED, MAX_ASKED = 4, 16
"""Chunks that one rank may be asked for at once in any case; and while at least half of our ring is free. A
rank that does not answer leaves chunks for others, and the first answers need not be waited for."""
SURE_SHARE = 0.5
"""Of the time for which a chunk is lent: whoever has read it by then need not ask whether it still was."""
MAX_ATTEMPTS = 4
"""How often the same bytes are asked for, if the source needs its chunk before we have read it."""


@dataclass(eq=False, slots=True)
class _Read(GatheredRead["PackedLink", "_Ask"]):
    again: deque[_Ask] = field(default_factory=deque)
    """What must be asked for again."""

    def next_ask(self) -> _Ask | None:
        if self.again:
            return self.again.popleft()
        terms = next(self.pieces, None)
        self.is_all_asked = terms is None
        return None if terms is None else _Ask(self, terms)

    @property
    def has_ended(self) -> bool:
        return not self.asks and (bool(self.error) or (self.is_all_asked and not self.again))


@dataclass(eq=False, slots=True)
class _Ask:
    """Bytes that fit into a chunk, from the asking until they count."""

    read: _Read
    terms: tuple[Term, ...]
    chunk: int = -1
    """Of our own ring, while one is reserved."""
    is_reading: bool = False
    """Whether the fabric writes to that chunk: nothing but its report ends that."""
    asked_at: float = 0.0
    is_sure: bool = False
    """Whether nobody can have taken the chunk away before it was read."""
    deadline: float = 0.0
    num_attempts: int = 0
    scatter: Callable[[int], None] | None = None
    """Who puts the bytes where they belong, once that was prepared."""

    @property
    def num_bytes(self) -> int:
        return sum(term.total_bytes for term in self.terms)


class PackedLink(GatheredLink[_Read]):
    """A rank whose ring is seen from here, or read by the fabric."""

    def __init__(
        self,
        mover: PackedMover,
        name: str,
        staging: Staging,
        src: Places,
        ring: Link | RingWindow,
        let_go: Callable[[], None],
    ) -> None:
        """``ring``: its ring as it is seen from here, or who reads it into ours."""
        super().__init__(mover, name, staging, src)
        self.ring, self.let_go = ring, let_go
        self.num_asked = 0
        """Chunks of ours that are reserved for it; the mover's thread's alone."""


class PackedMover(GatherMover[PackedLink, _Read]):
    """Reads the ranks that gather for us, through a ring of our own."""

    new_read = _Read

    def __init__(
        self,
        copier: ChunkCopier,
        ring: StagingRing,
        line: GatherLine,
        nonces: Iterator[int],
        events: EventWait | None = None,
    ) -> None:
        super().__init__(copier, line, nonces, events)
        self._ring = ring
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        # The thread's alone:
        self._free = [*range(ring.size.num_chunks)]
        self._asks: dict[int, _Ask] = {}
        self._is_over = threading.Event()
        self._thread_id = 0
        """The line's thread, once it has taken a turn."""

    # ---- from any thread

    def link(
        self,
        name: str,
        staging: Staging,
        src: Places,
        ring: Link | RingWindow,
        let_go: Callable[[], None] = lambda: None,
    ) -> PackedLink:
        """A rank that gathers, whose ring is seen or connected. ``let_go``: when it is forgotten."""
        return PackedLink(self, name, staging, src, ring, let_go)

    def put(self, event: Callable[[], None]) -> None:
        """Have something done by the thread."""
        self._inbox.put(event)
        if threading.get_ident() != self._thread_id:
            self._line.wake()

    def close(self, timeout_s: float) -> bool:
        """Ask for nothing more; whether all has ended in time."""
        with self._lock:
            self._is_closing = True
        self.put(self._give_all_up)
        return self._is_over.wait(timeout_s)

    def gathered(self, sender: str, nonce: int, told: GatheredChunk) -> None:
        self.put(partial(self._gathered, sender, nonce, told))

    def not_gathered(self, sender: str, nonce: int, error: str) -> None:
        self.put(partial(self._refused, sender, nonce, error))

    def given_back(self, sender: str, nonce: int, *, is_valid: bool) -> None:
        self.put(partial(self._given_back, sender, nonce, is_valid=is_valid))

    def lost(self, sender: str) -> None:
        self.put(partial(self._lost, sender))

    # ---- in the thread

    def turn(self) -> float:
        """Do what there is to do; for how many seconds that is all."""
        self._thread_id = threading.get_ident()
        for event in self._events():
            quietly(event)
        now = monotonic()
        for ask in [ask for ask in self._asks.values() if not ask.is_reading and ask.deadline <= now]:
            detail = f"{ask.read.link.name} did not answer within {ANSWER_S:g} s"
            self.give_up(ask.read, f"the rank that gathers is silent: {detail}")
        self._ask_for_more(now)
        if self._is_closing and not self._asks and not any(link.reads for link in self._links):
            self._is_over.set()
        if not self._inbox.empty() or self._prepare_one():  # there may be news meanwhile
            return 0.0
        deadlines = [ask.deadline for ask in self._asks.values() if not ask.is_reading]
        return max(0.0, min(deadlines, default=now + ANSWER_S) - now)

    def _events(self) -> Iterator[Callable[[], None]]:
        with suppress(Empty):
            while True:
                yield self._inbox.get_nowait()

    def _prepare_one(self) -> bool:
        """While answers are waited for: whether the scattering of one of them was prepared just now."""
        # One that the fabric still writes for outlives its failed read: it is not tried again.
        ask = next((ask for ask in self._asks.values() if not ask.scatter and not ask.read.error), None)
        if ask is None:
            return False
        try:
            ask.scatter = self._scatterer(ask)
        except Exception as failure:  # all of it was checked
            log.exception("the scattering of bytes could not be prepared")
            self.give_up(ask.read, f"unexpected: {failure!r}")
        return True

    def _scatterer(self, ask: _Ask) -> Callable[[int], None]:
        return self.copier.scatterer([dst_of(term) for term in ask.terms])

    def _ask_for_more(self, now: float) -> None:
        """Every rank in turn, a chunk at a time, so that none waits for another's long read."""
        has_asked = True
        while has_asked and self._free:
            has_asked = False
            for link in [*self._links]:
                if self._may_ask(link) and (ask := self._next_ask(link)):
                    self._ask(ask, now)
                    has_asked = True
            self._links.rotate(-1)

    def _may_ask(self, link: PackedLink) -> bool:
        is_roomy = 2 * len(self._free) > self._ring.size.num_chunks
        return bool(self._free) and link.num_asked < (MAX_ASKED if is_roomy else SURE_ASKED)

    def _next_ask(self, link: PackedLink) -> _Ask | None:
        while link.waiting:
            read = link.waiting[0]
            if not read.error and (ask := read.next_ask()):
                return ask
            link.waiting.popleft()
            self._end_if_over(read)
        return None

    def _ask(self, ask: _Ask, now: float) -> None:
        nonce, read = next(self._nonces), ask.read
        ask.chunk, ask.asked_at, ask.deadline = self._free.pop(), now, now + ANSWER_S
        ask.num_attempts += 1
        read.asks[nonce] = self._asks[nonce] = ask
        read.link.num_asked += 1
        self._line.ask(read.link.staging.address, nonce, read.permit, ask.terms, read.link.staging.ring_id)

    def _find(self, sender: str, nonce: int) -> _Ask | None:
        ask = self._asks.get(nonce)
        return ask if ask and ask.read.link.staging.address == sender else None

    def _gathered(self, sender: str, nonce: int, told: GatheredChunk) -> None:
        ask = self._find(sender, nonce)
        if ask is None or ask.chunk < 0 or ask.is_reading:
            if ask is None:  # nobody wants it any more
                self._line.give_back(sender, nonce, told.chunk, told.generation, is_asking=False)
            return
        staging, offset = ask.read.link.staging, told.address - ask.read.link.staging.ring_address
        if not 0 <= offset <= staging.ring_bytes - ask.num_bytes:
            self.give_up(ask.read, f"{ask.read.link.name} says that bytes are outside of its ring")
            return
        ring = ask.read.link.ring
        if isinstance(ring, RingWindow):
            error = self._scatter(ask, ring.address + offset)
            self._give_back(ask, nonce, told)
            self._has_scattered(ask, nonce, error)
            return
        to = ask.chunk * self._ring.size.chunk_bytes
        run = Runs(np.array([offset]), np.array([to]), np.array([ask.num_bytes]))
        has_read = partial(self._has_read, nonce, told)
        ask.is_reading = True
        try:
            # Numbers below 0: those of callers are theirs.
            ring.read(-nonce, Product.of(run), lambda error: self.put(partial(has_read, error)), None)
        except TransportError as error:
            has_read(str(error))

    def _has_read(self, nonce: int, told: GatheredChunk, error: str) -> None:
        """The fabric is through with a chunk."""
        ask = self._asks[nonce]
        ask.is_reading = False
        self._give_back(ask, nonce, told)
        self._has_scattered(ask, nonce, error or self._scatter(ask, self._ring.address(ask.chunk)))

    def _give_back(self, ask: _Ask, nonce: int, told: GatheredChunk) -> None:
        """Nothing of a chunk is read any more. It was lent after we had asked for it."""
        has_one_clock = isinstance(ask.read.link.ring, RingWindow)
        ask.is_sure = has_one_clock and monotonic() - ask.asked_at < told.lent_s * SURE_SHARE
        address = ask.read.link.staging.address
        self._line.give_back(address, nonce, told.chunk, told.generation, is_asking=not ask.is_sure)

    def _scatter(self, ask: _Ask, address: int) -> str:
        """Put bytes where they belong; why not, if so."""
        if ask.read.error:
            return ask.read.error
        try:
            ask.scatter = ask.scatter or self._scatterer(ask)
            ask.scatter(address)
        except Exception as failure:
            log.exception("bytes could not be scattered")
            return f"unexpected: {failure!r}"
        return ""

    def _has_scattered(self, ask: _Ask, nonce: int, error: str) -> None:
        ask.deadline = monotonic() + ANSWER_S
        self._free_chunk(ask)
        if error:
            self._drop(nonce)
            self.give_up(ask.read, error)
        elif ask.is_sure:
            self._drop(nonce)
            self._end_if_over(ask.read)

    def _given_back(self, sender: str, nonce: int, *, is_valid: bool) -> None:
        ask = self._find(sender, nonce)
        if ask is None or ask.chunk >= 0:
            return
        self._drop(nonce)
        read = ask.read
        if is_valid:
            self._end_if_over(read)
        elif ask.num_attempts >= MAX_ATTEMPTS:
            self.give_up(read, f"{read.link.name} took a chunk away before it was read, {MAX_ATTEMPTS} times")
        else:
            read.again.append(ask)
            if read not in read.link.waiting:
                read.link.waiting.append(read)

    def _refused(self, sender: str, nonce: int, error: str) -> None:
        if (ask := self._find(sender, nonce)) and not ask.is_reading:
            self.give_up(ask.read, f"{ask.read.link.name} does not gather: {error}")

    def _stop_asks_of(self, read: _Read) -> None:
        for nonce, ask in [*read.asks.items()]:
            if not ask.is_reading:
                self._free_chunk(ask)
                self._drop(nonce)

    def _give_all_up(self) -> None:
        for link in [*self._links]:
            self.give_up_all_of(link, "the transport was closed")

    def _free_chunk(self, ask: _Ask) -> None:
        if ask.chunk >= 0:
            self._free.append(ask.chunk)
            ask.chunk = -1
            ask.read.link.num_asked -= 1

    def _drop(self, nonce: int) -> None:
        ask = self._asks.pop(nonce)
        del ask.read.asks[nonce]

    def _has_let_go(self, link: PackedLink) -> None:
        link.let_go()
