"""A reader on the authority's host sees by itself whether its lease stands; and never too much."""

import os
import signal
import subprocess
import sys
from collections import deque

import pytest

from kvferry.endpoint import SourceEngine
from kvferry.endpoint.edges import NO_MARK, NUM_MARKS, Edges, LeaseBoard, is_shown, make_board
from kvferry.wire.messages import MARK_BYTES
from kvferry.wire.outline import join_of
from tests.endpoint.test_confirmed import until

MARK, OTHER = b"m" * MARK_BYTES, b"o" * MARK_BYTES


@pytest.fixture
def board():
    board = LeaseBoard()
    yield board
    board.close()


def test_a_mark_is_seen_until_it_is_struck(board):
    board.show(7, MARK)
    assert is_shown(board.place, 7, MARK)
    assert not is_shown(board.place, 7, OTHER)
    assert not is_shown(board.place, 8, MARK)
    board.strike(7)
    assert not is_shown(board.place, 7, MARK)
    assert not is_shown(board.place, 7, NO_MARK), "an empty place is no lease"


def test_a_later_lease_takes_an_earlier_ones_place(board):
    board.show(7, MARK)
    board.show(7 + NUM_MARKS, OTHER)
    assert is_shown(board.place, 7 + NUM_MARKS, OTHER)
    assert not is_shown(board.place, 7, MARK), "it has to be asked for"


def test_a_closed_board_shows_nothing():
    board = LeaseBoard()
    board.show(1, MARK)
    board.close()
    assert not is_shown(board.place, 1, MARK)
    board.close()


SHOW = """
from kvferry.endpoint.edges import LeaseBoard
board = LeaseBoard()
board.show(1, b"m" * 16)
print(board.place, flush=True)
input()
"""


def test_the_board_of_a_process_lives_with_it():
    """Stopped, it releases nothing; dead, the next one may."""
    command, pipe = [sys.executable, "-c", SHOW], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            place = process.stdout.readline().strip()
            assert is_shown(place, 1, MARK)
            process.send_signal(signal.SIGSTOP)
            assert is_shown(place, 1, MARK)
        finally:
            process.kill()
        until(lambda: not is_shown(place, 1, MARK))  # also while nobody has asked for its exit code
    assert not is_shown(place, 1, MARK)


def test_a_child_of_the_process_has_no_board(board):
    """It may get the number of its dead parent one day, and old marks would be seen again."""
    board.show(1, MARK)
    child = os.fork()
    if child == 0:
        os._exit(int(is_shown(board.place.replace(f"/{os.getppid()}/", f"/{os.getpid()}/"), 1, MARK)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert is_shown(board.place, 1, MARK), "the parent's own is as it was"


def test_what_only_looks_like_a_board_keeps_nobody_waiting(tmp_path, monkeypatch):
    """A pipe that nobody writes to blocks whoever opens it."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    real = os.open
    monkeypatch.setattr(os, "readlink", lambda _: f"/memfd:kvferry-leases-{'0' * 32} (deleted)")
    monkeypatch.setattr(os, "open", lambda _, flags: real(pipe, flags))
    assert not is_shown(f"/proc/1/fd/3 kvferry-leases-{'0' * 32}", 1, MARK)


@pytest.mark.parametrize(
    "place",
    [
        "",
        "/etc/passwd",
        "/proc/1/fd/0",
        f"/proc/{os.getpid()}/fd/0 kvferry-leases-{'0' * 32}",
        f"/proc/{os.getpid()}/fd/../environ kvferry-leases-{'0' * 32}",
        f"/proc/999999999/fd/3 kvferry-leases-{'0' * 32}",
    ],
)
def test_nothing_else_is_opened(place, monkeypatch):
    """What a peer says is compared before anything is opened."""
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("opened"))
    assert not is_shown(place, 1, MARK)


def test_another_file_under_its_number_is_not_believed(board):
    path, name = board.place.split(" ")
    assert not is_shown(f"{path} {name[:-1]}{'0' if name[-1] != '0' else '1'}", 1, NO_MARK)
    for mark in (b"", MARK[:-1], MARK * 2):
        assert not is_shown(board.place, 1, mark)


def test_a_load_of_one_host_is_confirmed_by_the_board(pair_of):
    """And its blocks are released as before."""
    looked = []

    def look(place, number, mark):
        looked.append(is_shown(place, number, mark))
        return looked[-1]

    pair = pair_of(edges=Edges(is_shown=look))
    handle = pair.fetch()
    assert pair.reports()[handle].failure is None
    assert pair.check()[1] == 0
    assert looked == [True]
    (released,) = until(pair.engine.poll)
    assert released.reason == "read"


@pytest.mark.parametrize("edges", [{"is_shown": lambda *_: False}, {"make_board": lambda: None}])
def test_where_no_board_is_seen_the_message_counts(pair_of, edges):
    pair = pair_of(edges=Edges(**edges), source_edges=Edges(**edges))
    handle = pair.fetch()
    assert pair.reports()[handle].failure is None
    assert pair.check()[1] == 0


class Noted(LeaseBoard):
    """Tells what is struck."""

    def __init__(self, events):
        super().__init__()
        self.events = events

    def strike(self, number):
        self.events.append(("struck", number))
        super().strike(number)


class NotedReleases(deque):
    def __init__(self, events):
        super().__init__()
        self.events = events

    def append(self, released):
        self.events.append(("released", released.ticket_id))
        super().append(released)


def test_a_lease_is_struck_before_its_blocks_are_free_also_if_many_end_at_once(engines):
    """A rank that gathers, and was admitted, hears at once: what it says released the others first."""
    events: list = []
    engine = SourceEngine("prefill", 1, edges=Edges(make_board=lambda: Noted(events)))
    engine._released = NotedReleases(events)
    try:
        engine.admit(join_of(engines.src, "memory", b"card", rank_key=b"k" * 32), joins_later=True)
        for i in range(4):
            engine.offer(f"request-{i}", engines.request.src, 20)
        engine._owner.put(lambda now: engine._authority.tick(now + 1000))
        until(lambda: len(events) == 8)
    finally:
        engine.close()
    for number in (1, 2, 3, 4):
        assert events.index(("struck", number)) < events.index(("released", number))


def test_a_system_without_such_memory_has_no_board(monkeypatch):
    monkeypatch.setattr(os, "memfd_create", lambda *_: (_ for _ in ()).throw(OSError))
    assert make_board() is None
