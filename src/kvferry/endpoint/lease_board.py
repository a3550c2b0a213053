"""A source engine's board: which of its leases stand, for readers of the same host to see by themselves.

A load counts if its lease still stood after the last byte. To ask for that takes a message and its answer,
longer than a device takes to copy a gigabyte. Where both processes are on one host, the reader looks instead:
for each lease that it grants, the authority writes a *mark* into memory of its own, which processes of the
same user can open by its name; and it strikes the mark before anybody hears that the blocks are free.

Why that is enough: a mark that was struck never comes again, and a board opens only while its process lives.
So a mark that is seen stood at some moment after the last byte, at which the authority lived and had released
nothing. An authority that stands still releases nothing either; one that is gone has no board, and the next
one's has another name.

Nothing that is read here can harm the reader: the name is compared before anything is opened, and what cannot
be opened, or read, or has another mark, is no answer. Then the message is what counts, as between two hosts.
"""

from __future__ import annotations

import os
from contextlib import suppress
from weakref import WeakMethod

from kvferry.host.shared_memory import SharedMemory, open_place
from kvferry.wire.messages import MARK_BYTES

NUM_MARKS = 4096
"""Leases are numbered; one that comes so much later takes the place, and the earlier one is asked for."""
NAME = "kvferry-leases-"
NO_MARK = bytes(MARK_BYTES)


class LeaseBoard:
    """The authority's own board."""

    def __init__(self) -> None:
        """Raises OSError where there is no such memory."""
        self._shared = SharedMemory(NAME, NUM_MARKS * MARK_BYTES)
        self._marks, self.place = self._shared.memory, self._shared.place
        """Where readers look."""
        leave = WeakMethod(self._leave)
        os.register_at_fork(after_in_child=lambda: (it := leave()) and it())

    def show(self, number: int, mark: bytes) -> None:
        """A lease stands; on a closed board none does."""
        if self._marks.closed:
            return
        start = number % NUM_MARKS * MARK_BYTES
        self._marks[start : start + MARK_BYTES] = mark

    def strike(self, number: int) -> None:
        """It stands no more; or a later one that took its place has to be asked for."""
        self.show(number, NO_MARK)

    def close(self) -> None:
        """No lease stands any more; once is enough."""
        if not self._marks.closed:
            self._marks[:] = bytes(len(self._marks))
            self._leave()

    def _leave(self) -> None:
        """Let go of it, as a child that was forked must: it may get the number of its dead parent one day."""
        self._shared.close()


def make_board() -> LeaseBoard | None:
    """A board, where this system has what it takes."""
    with suppress(OSError):
        return LeaseBoard()
    return None


def is_shown(place: str, number: int, mark: bytes) -> bool:
    """Whether a lease stands, as far as can be seen from here; False says nothing."""
    if len(mark) != MARK_BYTES or mark == NO_MARK:
        return False
    try:
        fd = open_place(place, NAME)
        try:
            return os.pread(fd, MARK_BYTES, number % NUM_MARKS * MARK_BYTES) == mark
        finally:
            os.close(fd)
    except OSError:
        return False
