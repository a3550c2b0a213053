"""Rings that both processes see: taken where they can be, and given up with the peer."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from kvferry.errors import TransportError
from kvferry.transport.gather_line import GatheredChunk
from kvferry.transport.ring_window import SETTING, RingWindow, RingWindows, SharedRings
from kvferry.transport.staging import Staging
from kvferry.transport.staging_ring import StagingRing
from tests.transport.test_packed_mover import RANK, SIZE, World


class SharedWorld(World):
    """As between two ranks of one host: nobody reads by the fabric."""

    def __init__(self) -> None:
        super().__init__()
        self.rank.ring.close()
        self.rank.ring = StagingRing(SIZE, SharedRings.ON.memory(SIZE))
        self.staging = replace(
            self.link.staging, ring_address=self.rank.ring.region.address, place=self.rank.ring.place
        )
        self.window = RingWindow(self.staging)
        self.link = self.mover.link("src", self.staging, self.rank.memory, self.window, self.window.close)


@pytest.fixture
def world() -> Iterator[SharedWorld]:
    world = SharedWorld()
    yield world
    assert world.mover.close(20)
    world.rank.turning.close()
    assert sorted(world.mover._free) == [*range(SIZE.num_chunks)]
    world.window.close()


def is_right(world: SharedWorld, runs) -> bool:
    return all(
        (world.dst[dst : dst + num_bytes] == world.src[src : src + num_bytes]).all()
        for _, src, _, dst, num_bytes in runs
    )


def test_what_is_gathered_is_scattered_from_where_it_is(world: SharedWorld) -> None:
    runs = world.read(1)
    assert world.wait(1) == ""
    assert is_right(world, runs)
    assert len(world.rank.asked) == len(world.rank.given_back) == 10
    assert not any(world.ring._memory[:]), "nobody reads into our own ring"


def test_a_chunk_is_given_back_after_it_was_scattered(
    world: SharedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its rank could gather something else into it meanwhile."""
    spoilt = []

    def spoil(to, nonce, chunk, generation, *, is_asking) -> None:
        start = chunk * SIZE.chunk_bytes
        world.rank.ring._memory[start : start + SIZE.chunk_bytes] = bytes(SIZE.chunk_bytes)
        spoilt.append(chunk)
        give_back(to, nonce, chunk, generation, is_asking=is_asking)

    give_back = world.rank.give_back
    monkeypatch.setattr(world.rank, "give_back", spoil)
    runs = world.read(1)
    assert world.wait(1) == ""
    assert is_right(world, runs)
    assert len(spoilt) == 10


def test_who_reads_a_chunk_soon_need_not_ask_whether_it_was_taken_away(world: SharedWorld) -> None:
    world.rank.lent_s = 60.0

    def nobody_asks() -> bool:
        raise AssertionError

    world.rank.is_valid = nobody_asks
    runs = world.read(1)
    assert world.wait(1) == ""
    assert is_right(world, runs)
    assert len(world.rank.asked) == len(world.rank.given_back) == 10


def test_who_takes_long_asks(world: SharedWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the time for which a chunk is lent is over before it was scattered."""
    world.rank.lent_s = 0.1
    verdicts: list[bool] = []
    scatterer = world.mover.copier.scatterer

    def slowly(sides) -> Callable[[int], None]:
        def scatter(chunk: int) -> None:
            if not verdicts:
                time.sleep(0.06)
            scatterer(sides)(chunk)

        return scatter

    monkeypatch.setattr(world.mover.copier, "scatterer", slowly)

    def is_valid() -> bool:
        verdicts.append(bool(verdicts))
        return verdicts[-1]

    world.rank.is_valid = is_valid
    runs = world.read(1)
    assert world.wait(1) == ""
    assert is_right(world, runs)
    assert len(verdicts) >= 1, "the first chunk was asked for"
    assert len(world.rank.asked) == 11, "and it had been taken away"


def test_a_chunk_that_was_taken_away_is_asked_for_again(world: SharedWorld) -> None:
    verdicts = iter([False, True, False])
    world.rank.is_valid = lambda: next(verdicts, True)
    runs = world.read(1)
    assert world.wait(1) == ""
    assert is_right(world, runs)
    assert len(world.rank.asked) == 12


def test_bytes_that_are_not_in_the_ring_are_not_looked_at(world: SharedWorld) -> None:
    ring = world.rank.ring
    world.rank.answer = lambda nonce, _: world.rank.answers.gathered(
        RANK, nonce, GatheredChunk(ring.region.address + SIZE.num_bytes - 8, 0, 1)
    )
    world.read(1)
    assert world.wait(1) == "src says that bytes are outside of its ring"
    assert not world.dst.any()


def test_a_rank_that_is_forgotten_is_not_looked_at_any_more(world: SharedWorld) -> None:
    world.read(1)
    assert world.wait(1) == ""
    world.link.forget()
    world.settle()
    assert world.window._memory.closed


@pytest.mark.parametrize("place", ["", "/proc/1/fd/1 kvferry-ring-" + "0" * 32, "/etc/passwd", "x" * 4000])
def test_a_ring_that_is_not_there_cannot_be_seen(place: str) -> None:
    with pytest.raises(OSError, match=r"names no place|something else|No such file|not permitted|denied"):
        RingWindow(Staging(RANK, 1 << 20, SIZE.num_bytes, SIZE.chunk_bytes, place=place))


def test_a_ring_that_is_shorter_than_it_says_cannot_be_seen() -> None:
    ring = StagingRing(SIZE, SharedRings.ON.memory(SIZE))
    told = Staging(RANK, ring.region.address, SIZE.num_bytes + 1, SIZE.chunk_bytes, place=ring.place)
    with pytest.raises(OSError, match="fewer than"):
        RingWindow(told)
    ring.close()


def test_a_ring_leaves_nothing_behind() -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    ring = StagingRing(SIZE, SharedRings.ON.memory(SIZE))
    window = RingWindow(Staging(RANK, ring.region.address, *sizes(ring), place=ring.place))
    window.close()
    window.close()
    ring.close()
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def sizes(ring: StagingRing) -> tuple[int, int]:
    return ring.size.num_bytes, ring.size.chunk_bytes


def test_a_rank_that_closes_looks_at_nobody_any_more() -> None:
    ring = StagingRing(SIZE, SharedRings.ON.memory(SIZE))
    staging = Staging(RANK, ring.region.address, *sizes(ring), place=ring.place)
    windows = RingWindows(SharedRings.ON)
    window = windows.open("peer", staging)
    assert window
    assert RingWindows(SharedRings.OFF).open("peer", staging) is None
    assert windows.open("peer", replace(staging, place="")) is None
    assert windows.open("peer", replace(staging, ring_bytes=1 << 39)) is None
    windows.close()
    assert window._memory.closed
    ring.close()


def test_where_rings_are_not_shared_they_have_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    assert SharedRings.from_environment({}) is SharedRings.ON
    ring = StagingRing(SIZE, SharedRings.from_environment({SETTING: "off"}).memory(SIZE))
    assert ring.place == ""
    ring.close()
    with pytest.raises(TransportError, match="one of on, off"):
        SharedRings.from_environment({SETTING: "maybe"})
    monkeypatch.delattr(os, "memfd_create")
    ring = StagingRing(SIZE, SharedRings.ON.memory(SIZE))
    assert (ring.place, ring.region.num_bytes) == ("", SIZE.num_bytes)
    ring.close()
