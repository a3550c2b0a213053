"""The packed way between two processes: the laws of transports, and what only this way has."""

from dataclasses import replace
from typing import ClassVar

import pytest

from kvferry.core.cost import Traffic
from kvferry.core.way import Way
from kvferry.errors import TransportError
from kvferry.testing.packed import AskingTransport
from kvferry.testing.sources import serving
from kvferry.testing.transport_laws import TransportLaws
from kvferry.testing.transport_world import REGION_BYTES, WHOLE, World, stale_memory, wait
from kvferry.transport.base import Connected, ReadEnd
from kvferry.transport.cards import pack_card, segment_in, staging_in, unpack_card, with_staging
from kvferry.transport.packed import PackedLink
from kvferry.transport.ring_options import RingOptions
from kvferry.transport.ring_window import SharedRings
from kvferry.transport.staging import PackedReads, Staging
from kvferry.transport.staging_ring import StagingSize
from kvferry.transport.ucx import FABRICS

pytest.importorskip("nixl", exc_type=ImportError)

PACKED = {"KVFERRY_PACKED_READS": "require"}
AUTO = {"KVFERRY_PACKED_READS": "auto"}
TCP = FABRICS["tcp"]


class PackedLaws(TransportLaws):
    env: ClassVar[dict[str, str]] = PACKED

    @pytest.fixture(scope="class")
    @classmethod
    def served(cls):
        with serving(3, REGION_BYTES, "cpu", cls.env) as served:
            yield served

    @pytest.fixture
    def world(self, served, monkeypatch):
        for name, value in self.env.items():
            monkeypatch.setenv(name, value)
        return World(AskingTransport, stale_memory(), served.sources)


class TestPacked(PackedLaws):
    pass


class TestPackedByTheFabric(PackedLaws):
    """As if rings could not be seen from another process."""

    env: ClassVar[dict[str, str]] = PACKED | {"KVFERRY_SHARED_RINGS": "off"}


class TestPackedOverTcp(PackedLaws):
    env: ClassVar[dict[str, str]] = PACKED | TCP


class TestHiddenPool(PackedLaws):
    env: ClassVar[dict[str, str]] = {"KVFERRY_EXPOSE": "staging"}


class TestHiddenPoolWithoutFabric(PackedLaws):
    env: ClassVar[dict[str, str]] = {"KVFERRY_EXPOSE": "nothing"}


@pytest.fixture(scope="module")
def far():
    """A source that only its own help can read, and that gathers."""
    with serving(1, REGION_BYTES, env=AUTO | TCP) as served:
        yield served.sources[0]


@pytest.fixture
def holder():
    return stale_memory()


@pytest.fixture
def transport(holder):
    transport = AskingTransport(packed_reads=PackedReads.AUTO)
    transport.register(holder.regions)
    yield transport
    transport.close()


def reads_all_of(transport, name, source, holder):
    transport.read(1, name, WHOLE)
    assert wait(transport, 1) == [ReadEnd(1)]
    return (holder.load()[0] == source.contents[0]).all()


def test_by_itself_a_rank_is_asked_to_gather_only_where_the_fabric_cannot_read(far, holder, transport):
    with serving(1, REGION_BYTES, env=AUTO) as near:
        (source,) = near.sources
        assert transport.connect("near", source.card, source.regions).way is Way.DIRECT
        assert reads_all_of(transport, "near", source, holder)
    connected = transport.connect("far", far.card, far.regions)
    assert str(connected) == "packed (the fabric cannot read its memory by itself)"
    assert reads_all_of(transport, "far", far, holder)


@pytest.mark.parametrize(
    ("run_bytes", "shared", "way"),
    [
        (512, SharedRings.ON, Way.PACKED),
        (512, SharedRings.OFF, Way.DIRECT),
        (1 << 20, SharedRings.ON, Way.DIRECT),
        (0, SharedRings.ON, Way.DIRECT),
    ],
    ids=["short runs", "short runs, and no ring to look at", "long runs", "nobody knows"],
)
def test_on_one_host_a_rank_gathers_if_usual_loads_are_quicker_so(holder, run_bytes, shared, way):
    usual = Traffic(1, (16 << 20) // run_bytes, 16 << 20) if run_bytes else None
    transport = AskingTransport(packed_reads=PackedReads.AUTO, rings=RingOptions(shared=shared))
    transport.register(holder.regions)
    with serving(1, REGION_BYTES, env=AUTO) as near:
        (source,) = near.sources
        assert transport.connect("near", source.card, source.regions, usual) == Connected(way)
        assert reads_all_of(transport, "near", source, holder)
        transport.close()


@pytest.mark.parametrize("over", [{}, TCP | {"KVFERRY_EXPOSE": "nothing"}], ids=["ring", "stream"])
def test_shorter_chunks_here_than_there_are_asked_for_one_by_one(holder, monkeypatch, over):
    for name, value in over.items():
        monkeypatch.setenv(name, value)
    size = StagingSize(num_chunks=4, chunk_bytes=4096)
    transport = AskingTransport(packed_reads=PackedReads.REQUIRE, rings=RingOptions(size))
    transport.register(holder.regions)
    with serving(1, REGION_BYTES, env={"KVFERRY_PACKED_READS": "require"} | over) as near:
        (source,) = near.sources
        assert transport.connect("near", source.card, source.regions).way is Way.PACKED
        assert reads_all_of(transport, "near", source, holder)
        transport.close()


def test_a_rank_that_the_fabric_cannot_read_is_looked_at_if_it_is_of_this_host(holder, monkeypatch):
    """Where processes may not read each other's memory (Yama, containers), they may still share some."""
    monkeypatch.setenv("UCX_TLS", TCP["UCX_TLS"])
    transport = AskingTransport(packed_reads=PackedReads.AUTO)
    transport.register(holder.regions)
    with serving(1, REGION_BYTES, env=AUTO | {"UCX_TLS": TCP["UCX_TLS"]}) as near:
        (source,) = near.sources
        connected = transport.connect("near", source.card, source.regions)
        assert str(connected) == "packed (the fabric cannot read its memory by itself)"
        assert isinstance(transport._links["near"], PackedLink)
        assert reads_all_of(transport, "near", source, holder)
        transport.close()


def test_where_no_stream_can_be_had_reads_are_emulated_and_the_reason_is_named(far, holder, transport):
    agent, metadata = unpack_card(far.card)
    alone = pack_card(agent, metadata, segment_in(far.card))
    connected = transport.connect("alone", alone, far.regions)
    assert connected.way is Way.EMULATED
    assert "its rank does not gather; set KVFERRY_PACKED_READS" in connected.reason
    assert reads_all_of(transport, "alone", far, holder)
    transport.forget("alone")

    nobody = replace(Staging.from_bytes(staging_in(far.card)), address="tcp://127.0.0.1:1")
    connected = transport.connect("lost", with_staging(alone, nobody.to_bytes()), far.regions)
    assert connected.way is Way.EMULATED
    assert "nor is there a stream" in connected.reason
    assert reads_all_of(transport, "lost", far, holder)


def test_a_stream_is_no_emulated_read(far, holder, monkeypatch):
    monkeypatch.setenv("KVFERRY_EMULATED_READS", "refuse")
    transport = AskingTransport(packed_reads=PackedReads.AUTO)
    transport.register(holder.regions)
    assert transport.connect("far", far.card, far.regions).way is Way.PACKED
    assert reads_all_of(transport, "far", far, holder)
    transport.close()


def test_the_setting_is_checked(monkeypatch):
    monkeypatch.setenv("KVFERRY_PACKED_READS", "off")
    with pytest.raises(TransportError, match="'off': one of never, auto, require"):
        AskingTransport()
