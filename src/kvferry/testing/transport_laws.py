"""The laws of transports, as a class to inherit from in a pytest module::

    class TestMine(TransportLaws):
        @pytest.fixture
        def world(self): ...
            yield World(MyTransport, holder, sources)

A world makes transports, and has memory to read into and at least two sources, each with ``REGION_BYTES``.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest import SkipTest

import numpy as np

from kvferry.core.runs import NO_RUNS, REGION_SHIFT, Runs, place
from kvferry.testing.transport_world import (
    PATIENCE_S,
    REGION_BYTES,
    WHOLE,
    Storm,
    World,
    after,
    check,
    check_read,
    check_storm,
    grew,
    refused,
    run,
    scattered,
    threads_and_files,
    wait,
)
from kvferry.transport.base import CANCELLED, ReadEnd


class TransportLaws:
    """Inherit, and provide the fixture ``world``."""

    def test_bytes_arrive_exactly_where_they_should(self, world: World) -> None:
        check_read(world, 0, scattered(300, 8192, seed=1))

    def test_ten_thousand_scattered_runs(self, world: World) -> None:
        check_read(world, 1, scattered(10_000, 128, seed=2, num_bytes=64))

    def test_one_huge_run(self, world: World) -> None:
        check_read(world, 0, WHOLE)

    def test_no_runs_and_no_bytes_end_too(self, world: World) -> None:
        expected = world.holder.load()
        with world.reader(0) as reader:
            reader.read(1, "0", NO_RUNS)
            reader.read(2, "0", run((0, 5), (1, 5), 0))
            assert wait(reader, 2) == [ReadEnd(1), ReadEnd(2)]
        check(world, expected)

    def test_several_peers_at_once(self, world: World) -> None:
        expected, peers = world.holder.load(), range(len(world.sources))
        everything = scattered(600, 4096, seed=3)
        with world.reader(*peers) as reader:
            for i in range(60):
                runs = Runs(everything.src[i::60], everything.dst[i::60], everything.num_bytes[i::60])
                peer = i % len(peers)
                reader.read(i, str(peer), runs)
                after(expected, runs, world.sources[peer])
            assert wait(reader, 60) == [ReadEnd(i) for i in range(60)]
        check(world, expected)

    def test_an_end_is_reported_once(self, world: World) -> None:
        with world.reader(0) as reader:
            for _ in range(3):
                reader.read(5, "0", run((0, 0), (0, 0), 64))
                assert wait(reader, 1) == [ReadEnd(5)]
                assert [reader.poll() for _ in range(10)] == [[]] * 10

    def test_submitting_never_waits_for_bytes(self, world: World) -> None:
        with world.reader(0, 1) as reader:
            started = time.perf_counter()
            for i in range(8):
                reader.read(i, str(i % 2), WHOLE)
            seconds = time.perf_counter() - started
            assert seconds < 0.5
            assert wait(reader, 8) == [ReadEnd(i) for i in range(8)]

    def test_a_cancelled_read_ends_once_and_nothing_of_it_arrives_later(self, world: World) -> None:
        with world.reader(0, 1) as reader:
            for i in range(12):
                reader.read(i, str(i % 2), WHOLE)
            for i in (11, 3, 3, 8):
                reader.cancel(i)
            ends = wait(reader, 12)
            quiet = world.holder.load()
            assert [end.transfer for end in ends] == [*range(12)]
            assert not any(end.error for end in ends if end.transfer not in (3, 8, 11))
            assert {end.error for end in ends} <= {"", CANCELLED}  # some may have ended before the cancel
            assert reader.poll() == []
            reader.read(11, "1", run((0, 0), (1, 0), 0))
            assert wait(reader, 1) == [ReadEnd(11)]
            check(world, quiet)

    def test_cancelling_what_is_unknown_or_has_ended_does_nothing(self, world: World) -> None:
        with world.reader(0) as reader:
            reader.cancel(5)
            reader.read(5, "0", run((0, 0), (0, 0), 64))
            assert wait(reader, 1) == [ReadEnd(5)]
            reader.cancel(5)
            assert [reader.poll() for _ in range(3)] == [[]] * 3
            reader.read(5, "0", run((0, 0), (0, 0), 64))
            assert wait(reader, 1) == [ReadEnd(5)]
        reader.cancel(5)

    def test_a_read_that_was_never_posted_is_cancelled_at_once_though_its_source_is_stopped(
        self, world: World
    ) -> None:
        if world.stopped is None:
            raise SkipTest("this world cannot stop its sources")
        expected = world.holder.load()
        with world.reader(0) as reader:
            with world.stopped():
                for i in range(10):
                    reader.read(i, "0", run((0, 0), (0, 0), REGION_BYTES[0] // 2))
                time.sleep(0.05)
                assert reader.poll() == []
                reader.read(10, "0", run((1, 0), (1, 0), REGION_BYTES[1]))
                reader.cancel(10)
                started = time.monotonic()
                assert wait(reader, 1) == [ReadEnd(10, CANCELLED)]
                assert time.monotonic() - started < 1
                reader.cancel(0)
                time.sleep(0.05)
                assert reader.poll() == []  # it was posted: only the fabric ends it
            ends = wait(reader, 10)
            assert [end.transfer for end in ends] == [*range(10)]
            assert ends[0].error == CANCELLED
            assert not any(end.error for end in ends[1:])
        after(expected, run((0, 0), (0, 0), REGION_BYTES[0] // 2), world.sources[0])
        check(world, expected)

    def test_whatever_many_threads_do_at_once_each_read_ends_once(self, world: World) -> None:
        with world.reader(0) as reader:
            storm = Storm(reader, world.sources, max_reads=600)
            with storm.blowing():
                storm.wait_for_reads(PATIENCE_S)
            storm.collect(PATIENCE_S)
            storm.check()
            check_storm(world, storm)

    def test_closing_while_many_threads_call_loses_no_end(self, world: World) -> None:
        with world.reader(0) as reader:
            storm = Storm(reader, world.sources, max_reads=100_000)
            with storm.blowing():
                storm.wait_for_reads(0.3)
                with ThreadPoolExecutor(2) as closers:
                    closing = [closers.submit(reader.close) for _ in range(2)]
                for closed in closing:
                    closed.result()
                quiet = world.holder.load()
        storm.ends += reader.poll()
        storm.check()
        check(world, quiet)
        check_storm(world, storm)

    def test_forgetting_ends_nothing_by_itself(self, world: World) -> None:
        with world.reader(0, 1) as reader:
            for i in range(6):
                reader.read(i, str(i % 2), WHOLE)
            reader.forget("0")
            reader.forget("0")
            assert refused(lambda: reader.read(9, "0", WHOLE)) == "unknown-peer"
            ends = wait(reader, 6)
            assert [end.transfer for end in ends] == [*range(6)]
            assert not any(end.error for end in ends if end.transfer % 2)
            quiet = world.holder.load()
            reader.connect("0", world.sources[0].card, world.sources[0].regions)
            check(world, quiet)
            reader.read(0, "0", WHOLE)
            assert wait(reader, 1) == [ReadEnd(0)]

    def test_what_cannot_be_is_refused_before_anything_moves(self, world: World) -> None:
        expected, big, small = world.holder.load(), *REGION_BYTES
        good = run((0, 0), (0, 0), 64)
        with world.reader(0) as reader:
            for code, peer, bad in (
                ("unknown-peer", "nobody", good),
                ("unknown-region", "0", run((2, 0), (0, 0), 1)),
                ("unknown-region", "0", run((0, 0), (2, 0), 1)),
                ("unknown-region", "0", run((0, 0), (-1, 0), 1)),
                ("out-of-bounds", "0", run((0, big - 1), (0, 0), 2)),
                ("out-of-bounds", "0", run((0, 0), (1, small), 1)),
                ("out-of-bounds", "0", run((0, 0), (0, 0), (1 << REGION_SHIFT) + 1)),
                ("out-of-bounds", "0", run((0, 9), (0, 9), -1)),
            ):
                both = Runs(
                    *(np.append(getattr(good, n), getattr(bad, n)) for n in ("src", "dst", "num_bytes"))
                )
                assert refused(lambda peer=peer, both=both: reader.read(1, peer, both)) == code  # type: ignore[misc]
                if peer == "0" and bad.dst[0] >= place(1, small):
                    assert refused(lambda both=both: reader.clear(1, both)) == code  # type: ignore[misc]
            assert reader.poll() == []
            check(world, expected)
            reader.read(1, "0", WHOLE)
            assert refused(lambda: reader.read(1, "0", good)) == "under-way"
            assert wait(reader, 1) == [ReadEnd(1)]

    def test_clearing_clears_just_that(self, world: World) -> None:
        expected, runs = world.holder.load(), scattered(50, 256, seed=4)
        with world.reader() as reader:
            reader.clear(1, NO_RUNS)
            reader.clear(2, runs)
            ends = wait(reader, 2)
            assert sorted(end.transfer for end in ends) == [1, 2]
            assert not any(end.error for end in ends)
            for _, _, region, offset, num_bytes in runs:
                expected[region][offset : offset + num_bytes] = 0
            check(world, expected)

    def test_memory_comes_first_and_once(self, world: World) -> None:
        transport, source = world.make(), world.sources[0]
        for early in (
            transport.card,
            lambda: transport.connect("0", source.card, source.regions),
            lambda: transport.read(1, "0", NO_RUNS),
        ):
            assert refused(early) == "not-registered"
        offline = [replace(region, address=0) for region in world.holder.regions]
        assert refused(lambda: transport.register(offline)) == "no-address"
        tape = [replace(region, device="tape") for region in world.holder.regions]
        assert refused(lambda: transport.register(tape)) == "bad-device"
        transport.register(world.holder.regions)
        assert refused(lambda: transport.register(world.holder.regions)) == "registered"
        transport.close()

    def test_a_peer_must_be_what_it_says(self, world: World) -> None:
        source, other = world.sources[:2]
        with world.reader(0) as reader:
            for card in (b"", b"junk" * 9, source.card[:-1], source.card + b"?", source.card[::-1]):
                assert refused(lambda card=card: reader.connect("bad", card, source.regions)) == "bad-card"  # type: ignore[misc]
            assert refused(lambda: reader.connect("0", other.card, other.regions)) == "known-peer"
            elsewhere = [replace(region, address=1 << 20) for region in source.regions]
            assert refused(lambda: reader.connect("bad", source.card, elsewhere)) in ("no-connection", "nixl")
            assert refused(lambda: reader.read(1, "bad", NO_RUNS)) == "unknown-peer"
            reader.read(1, "0", run((0, 0), (0, 0), 64))
            assert wait(reader, 1) == [ReadEnd(1)]

    def test_closing_ends_what_is_under_way(self, world: World) -> None:
        with world.reader(0, 1) as reader:
            for i in range(6):
                reader.read(i, str(i % 2), WHOLE)
        quiet = world.holder.load()
        assert sorted(end.transfer for end in reader.poll()) == [*range(6)]
        assert reader.poll() == []
        check(world, quiet)

    def test_closing_leaves_nothing_behind(self, world: World) -> None:
        kept = []  # references to a closed transport must not keep its resources

        def use() -> None:
            with world.reader(0, 1) as reader:
                kept.append(reader)
                reader.read(1, "0", run((0, 0), (0, 0), 4096))
                assert wait(reader, 1) == [ReadEnd(1)]

        use()
        before = threads_and_files()
        for _ in range(3):
            use()
        deadline = time.monotonic() + 30
        # A thread that was joined may still be on its way out of the kernel, then and now.
        while grew(before, threads_and_files()) and time.monotonic() < deadline:
            time.sleep(5e-3)
        assert not grew(before, threads_and_files())

    def test_a_closed_transport_says_so(self, world: World) -> None:
        with world.reader(0) as reader:
            reader.read(1, "0", run((0, 0), (0, 0), 64))
            assert wait(reader, 1) == [ReadEnd(1)]
        reader.close()
        reader.forget("0")
        source = world.sources[0]
        for late in (
            reader.card,
            lambda: reader.register(world.holder.regions),
            lambda: reader.connect("1", source.card, source.regions),
            lambda: reader.read(2, "0", NO_RUNS),
            lambda: reader.clear(2, NO_RUNS),
        ):
            assert refused(late) == "closed"
        assert reader.poll() == []
