"""The packed way between two processes: the laws of transports; and which way is taken by itself."""

from typing import ClassVar

import pytest

from kvferry.cli.processes import FABRICS, AskingTransport
from kvferry.core.choices import Way
from kvferry.errors import TransportError
from kvferry.testing.transport_laws import TransportLaws
from kvferry.testing.transport_world import REGION_BYTES, WHOLE, World, stale_memory, wait
from kvferry.transport.base import Connected, ReadEnd
from kvferry.transport.cards import Card
from kvferry.transport.process import CLOSED_THERE
from kvferry.transport.settings import UCX_TRANSPORTS, Expose, WayChoice
from tests.support.sources import serving

FABRIC = {"KVFERRY_EXPOSE": "fabric", UCX_TRANSPORTS: FABRICS["cma"][UCX_TRANSPORTS]}


class TestPacked(TransportLaws):
    env: ClassVar[dict[str, str]] = {}

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


@pytest.fixture
def holder():
    return stale_memory()


def reads_all_of(transport, source, holder):
    transport.read(1, "src", WHOLE)
    assert wait(transport, 1) == [ReadEnd(1)]
    return (holder.load()[0] == source.contents[0]).all()


def connected(holder, served, **options):
    """How a reader with these options reads a source, and that it does."""
    transport, (source,) = AskingTransport(**options), served.sources
    transport.register(holder.regions)
    try:
        made = transport.connect("src", source.card, source.regions)
        assert reads_all_of(transport, source, holder)
        return made
    finally:
        transport.close()


@pytest.fixture(scope="module")
def by_default():
    with serving(1, REGION_BYTES) as served:
        yield served


def test_by_default_no_library_of_nixl_is_loaded_and_the_source_sends(by_default, holder):
    assert connected(holder, by_default) == Connected(Way.PACKED)
    with open(f"/proc/{by_default.pid}/maps") as maps:
        assert not any(name in maps.read() for name in ("libucp", "libnixl"))
    assert Card.from_bytes(by_default.sources[0].card).metadata == b""


def test_direct_where_both_are_registered_and_packed_where_one_is_not(by_default, holder, monkeypatch):
    pytest.importorskip("nixl", exc_type=ImportError)
    for name, value in FABRIC.items():
        monkeypatch.setenv(name, value)
    told = connected(holder, by_default)
    assert (told.way, told.reason) == (Way.PACKED, f"not direct: {CLOSED_THERE}")
    with serving(1, REGION_BYTES, env=FABRIC) as served:
        assert connected(holder, served) == Connected(Way.DIRECT)
        assert connected(holder, served, way=WayChoice.PACKED) == Connected(Way.PACKED)
        assert connected(holder, served, expose=Expose.HOST) == Connected(Way.PACKED)


def test_a_way_that_is_required_is_taken_or_refused(by_default, holder, monkeypatch):
    pytest.importorskip("nixl", exc_type=ImportError)
    for name, value in FABRIC.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TransportError, match="not-direct: it is not registered with NIXL"):
        connected(holder, by_default, way=WayChoice.DIRECT)
    with pytest.raises(TransportError, match="host memory is not mapped"):
        connected(holder, by_default, way=WayChoice.MAPPED)


@pytest.mark.parametrize(("way", "expose"), [("direct", "host"), ("mapped", "nothing")])
def test_settings_that_exclude_each_other_are_refused_by_name(monkeypatch, way, expose):
    monkeypatch.setenv("KVFERRY_WAY", way)
    monkeypatch.setenv("KVFERRY_EXPOSE", expose)
    with pytest.raises(TransportError, match=f"bad-setting: KVFERRY_WAY={way} needs KVFERRY_EXPOSE="):
        AskingTransport()


def test_words_that_are_none_are_refused_by_name(monkeypatch):
    monkeypatch.setenv("KVFERRY_WAY", "fast")
    with pytest.raises(TransportError, match="'fast': must be one of auto, mapped, direct, packed"):
        AskingTransport()


def test_shorter_chunks_here_than_there_are_asked_for_one_by_one(by_default, holder):
    assert connected(holder, by_default, chunk_bytes=4096).way is Way.PACKED


def test_a_rank_that_sends_nothing_is_not_read(by_default, holder):
    transport = AskingTransport()
    transport.register(holder.regions)
    with pytest.raises(TransportError, match="not-packed: src: packed reads are disabled on the source rank"):
        transport.connect("src", Card().to_bytes(), by_default.sources[0].regions)
    transport.close()
