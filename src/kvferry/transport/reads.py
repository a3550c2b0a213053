"""The reads of one NIXL agent: what waits for its turn, and what the fabric was asked for.

Each remote rank has a queue of its own; queues are served in turn, a slice at a time, so that no rank waits
for another's slow post.

What was posted cannot be called back: releasing a handle or removing an agent ends nothing, and bytes still
arrive. So handles are released only after the fabric reported their end, a failed read ends only when all its
posted slices have, and a forgotten rank is removed only when nothing is under way with it.

Any call to the agent may raise anything. What then holds:

=========== ============================================================================================
prepare     nothing was posted: the read fails
post        some of it may be under way: it fails, but ends only when a check says so
check       a TransportError is the fabric's report of a failure, an end. Anything else says nothing of the
            transfer: it is still under way, and looked at again
release     the transfer has ended all the same; a handle may be lost
remove      nothing is under way; the agent may keep what it knew
=========== ============================================================================================
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from kvferry.core.runs import Runs
from kvferry.errors import TransportError
from kvferry.log import is_worth_a_line, log_of
from kvferry.transport.agent import MAX_POSTED, FabricAgent, RegionTable, SlicePair, slice_pairs
from kvferry.transport.base import CANCELLED, OnEnd, quietly
from kvferry.transport.cards import Card

log = log_of(__name__)


@dataclass(eq=False, slots=True)
class Connection:
    """To one remote agent, for all remote ranks that are met there."""

    card: Card
    num_ranks: int = 0
    num_posted: int = 0
    """Slices under way."""


@dataclass(eq=False, slots=True)
class RemoteRank:
    name: str
    connection: Connection
    memory: RegionTable
    waiting: deque[Read] = field(default_factory=deque)
    """Reads with slices that are not posted yet; first come, first served."""
    num_posted: int = 0
    """Slices under way."""
    is_forgotten: bool = False

    @property
    def can_post(self) -> bool:
        return bool(self.waiting) and self.connection.num_posted < MAX_POSTED


@dataclass(eq=False, slots=True)
class Read:
    """A read that has not ended."""

    rank: RemoteRank
    runs: Runs
    dst: RegionTable
    on_end: OnEnd
    transfer: int | None = None
    """The caller's number, if it can be cancelled."""
    unposted: Iterator[SlicePair] | None = None
    is_waiting: bool = False
    num_posted: int = 0
    has_fabric_failed: bool = False
    """Whether its first error is NIXL's own report of what it was asked for."""
    has_ended: bool = False
    error: str = ""

    def next_pair(self) -> SlicePair | None:
        if self.unposted is None:
            self.unposted = slice_pairs(self.runs, self.rank.memory, self.dst)
        return next(self.unposted, None)

    def fail(self, error: str) -> None:
        """The first error counts."""
        self.error = self.error or error


@dataclass(eq=False, slots=True)
class Posted:
    """A slice under way."""

    handle: int
    read: Read
    num_failed_checks: int = 0
    """How often a look at its state raised something that says nothing of it."""


class Reads:
    """For one thread, the one that owns the agent."""

    def __init__(self, agent: FabricAgent) -> None:
        self._agent = agent
        self._ranks: deque[RemoteRank] = deque()
        self._posted: list[Posted] = []
        self._by_transfer: dict[int, Read] = {}
        self._connections: dict[str, Connection] = {}
        """By remote agent."""

    @property
    def num_posted(self) -> int:
        """Slices under way."""
        return sum(rank.num_posted for rank in self._ranks)

    @property
    def can_post(self) -> bool:
        return any(rank.can_post for rank in self._ranks)

    # ---- remote ranks

    def connect(self, name: str, card: Card, memory: RegionTable) -> RemoteRank:
        if card.agent == self._agent.name:
            raise TransportError("bad-card", f"{name}: this is our own card")
        connection = self._connections.get(card.agent) or Connection(card)
        if connection.card != card:
            # NIXL would take the new metadata for the old agent, and its reads with it.
            raise TransportError("bad-card", f"{name}: a second card of {card.agent!r}, which is connected")
        rank = RemoteRank(name, connection, memory)
        if card.agent not in self._connections:
            self._agent.add(card.agent, card.metadata)
            self._connections[card.agent] = connection
        connection.num_ranks += 1
        self._ranks.append(rank)
        return rank

    def forget(self, rank: RemoteRank) -> None:
        """Post nothing more for a rank, and remove it once nothing is under way with it."""
        rank.is_forgotten = True
        self._give_up(rank, f"peer {rank.name!r} was forgotten")
        self._remove_if_quiet(rank)

    def give_up(self, reason: str) -> None:
        """Post nothing that waits any more."""
        for rank in [*self._ranks]:
            self._give_up(rank, reason)

    def close(self) -> None:
        """Have the agent forget all others, and forget the agent; nothing may be under way."""
        for agent in self._connections:
            quietly(self._agent.remove, agent)
        del self._agent

    def _give_up(self, rank: RemoteRank, reason: str) -> None:
        for read in [*rank.waiting]:
            read.fail(reason)
            self._post_no_more(read)

    def _remove_if_quiet(self, rank: RemoteRank) -> None:
        if not rank.is_forgotten or rank.num_posted or rank not in self._ranks:
            return
        self._ranks.remove(rank)
        connection = rank.connection
        connection.num_ranks -= 1
        if not connection.num_ranks:
            del self._connections[connection.card.agent]
            quietly(self._agent.remove, connection.card.agent)

    # ---- reads

    def submit(self, read: Read) -> None:
        if read.transfer is not None:
            self._by_transfer[read.transfer] = read
        if read.rank.is_forgotten:
            read.fail(f"peer {read.rank.name!r} was forgotten")
        if not read.error and len(read.runs):
            read.is_waiting = True
            read.rank.waiting.append(read)
        self._end_if_quiet(read)

    def refuse(self, read: Read, error: TransportError) -> None:
        """End a read of which nothing was posted."""
        read.fail(str(error))
        self._post_no_more(read)

    def cancel(self, transfer: int) -> None:
        """Post nothing more of a read."""
        if read := self._by_transfer.get(transfer):
            read.fail(CANCELLED)
            self._post_no_more(read)

    def post_round(self) -> bool:
        """Post one slice for every rank that has one, where its connection has room."""
        ready = [rank for rank in self._ranks if rank.can_post]
        self._ranks.rotate(-1)
        for rank in ready:
            # Another rank of the same connection may have been first.
            if rank.can_post:
                self._post_next(rank.waiting[0])
        return bool(ready)

    def check_posted(self) -> bool:
        """Look at every slice under way; whether one ended."""
        ended = [posted for posted in self._posted if self._has_ended(posted)]
        for posted in ended:
            self._posted.remove(posted)
            self._end_slice(posted.handle, posted.read)
            if posted.read.error:
                self._post_no_more(posted.read)
            else:
                self._end_if_quiet(posted.read)
        return bool(ended)

    def _post_next(self, read: Read) -> None:
        handle = self._prepare_next(read)
        if handle is not None:
            self._post(handle, read)
        if handle is None or read.error:
            self._post_no_more(read)

    def _prepare_next(self, read: Read) -> int | None:
        """A handle of the next slice, if there is one and nothing goes wrong."""
        try:
            pair = read.next_pair()
            return None if pair is None else self._agent.prepare(pair, read.rank.connection.card.agent)
        except Exception as error:
            _log_unexpected("a read could not be prepared", error)
            read.fail(_reason("it could not be prepared", error))
            return None

    def _post(self, handle: int, read: Read) -> None:
        posted = Posted(handle, read)
        self._posted.append(posted)
        _count(read, 1)
        try:
            is_done = self._agent.post(handle)
        except Exception as error:
            # Some of its runs may be on their way: only a look at its state says that none is any more.
            _log_unexpected("a read could not be posted", error)
            read.has_fabric_failed |= not read.error and isinstance(error, TransportError)
            read.fail(_reason("it could not be posted", error))
            return
        if is_done:
            self._posted.remove(posted)
            self._end_slice(handle, read)

    def _has_ended(self, posted: Posted) -> bool:
        try:
            return self._agent.check(posted.handle)
        except TransportError as error:
            posted.read.has_fabric_failed |= not posted.read.error
            posted.read.fail(str(error))
            return True
        except Exception:
            posted.num_failed_checks += 1
            if is_worth_a_line(posted.num_failed_checks):
                times = posted.num_failed_checks
                log.exception("a read is still under way, but its state is unknown (%d checks failed)", times)
            return False

    def _end_slice(self, handle: int, read: Read) -> None:
        quietly(self._agent.release, handle)
        _count(read, -1)

    def _post_no_more(self, read: Read) -> None:
        if read.is_waiting:
            read.rank.waiting.remove(read)
            read.is_waiting = False
        self._end_if_quiet(read)

    def _end_if_quiet(self, read: Read) -> None:
        """Report a read of which nothing is under way, and nothing will be."""
        if read.num_posted or read.is_waiting or read.has_ended:
            return
        read.has_ended = True
        if read.transfer is not None:
            self._by_transfer.pop(read.transfer, None)
        quietly(read.on_end, read.error)
        self._remove_if_quiet(read.rank)


def _count(read: Read, num_slices: int) -> None:
    for counted in (read, read.rank, read.rank.connection):
        counted.num_posted += num_slices


def _reason(what: str, error: Exception) -> str:
    return str(error) if isinstance(error, TransportError) else f"{what}: {error!r}"


def _log_unexpected(what: str, error: Exception) -> None:
    if not isinstance(error, TransportError):
        log.error("%s", what, exc_info=error)
