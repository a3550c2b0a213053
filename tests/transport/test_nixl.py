"""Direct reads by NIXL, between two processes: the laws, on host memory and on a GPU; and mapped ones."""

import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest

from kvferry import Region
from kvferry.cli.processes import FABRICS
from kvferry.errors import TransportError
from kvferry.testing.transport_laws import TransportLaws
from kvferry.testing.transport_world import REGION_BYTES, WHOLE, World, stale_memory, wait
from kvferry.transport import ReadEnd, Transport
from kvferry.transport.cards import Card
from kvferry.transport.cuda import has_cuda
from kvferry.transport.process import ProcessTransport
from tests.support.sources import serving

DIRECT = FABRICS["cma"]

pytest.importorskip("nixl", exc_type=ImportError)


class NixlLaws(TransportLaws):
    device = "cpu"
    env: ClassVar[dict[str, str]] = DIRECT

    @pytest.fixture(scope="class")
    @classmethod
    def served(cls):
        with serving(3, REGION_BYTES, cls.device, cls.env) as served:
            yield served

    @pytest.fixture
    def world(self, served, monkeypatch):
        for name, value in self.env.items():
            monkeypatch.setenv(name, value)
        holder = stale_memory(self.device)
        yield World(ProcessTransport, holder, served.sources)
        holder.free()


class TestNixl(NixlLaws):
    pass


@pytest.mark.skipif(not has_cuda(), reason="no CUDA device")
class TestNixlOnGpu(NixlLaws):
    device = "cuda:0"


@pytest.mark.skipif(not has_cuda(), reason="no CUDA device")
class TestMappedOnGpu(NixlLaws):
    """The copy kernel, between two processes; a peer that cannot be mapped is refused."""

    device = "cuda:0"
    env: ClassVar[dict[str, str]] = {"KVFERRY_WAY": "mapped"}


@pytest.fixture
def holder():
    return stale_memory()


@pytest.fixture(autouse=True)
def direct(monkeypatch):
    for name, value in DIRECT.items():
        monkeypatch.setenv(name, value)


def test_a_killed_source_gives_an_error(holder):
    with serving(1, REGION_BYTES, env=DIRECT) as served:
        transport = ProcessTransport()
        transport.register(holder.regions)
        transport.connect("src", served.sources[0].card, served.sources[0].regions)
        os.kill(served.pid, signal.SIGKILL)
        os.waitid(os.P_PID, served.pid, os.WEXITED | os.WNOWAIT)
        for transfer in (1, 2):
            transport.read(transfer, "src", WHOLE)
            (end,) = wait(transport, 1)
            assert end.error
        transport.forget("src")
        transport.close()


@pytest.mark.timed
def test_waiting_costs_no_cpu():
    memory = np.zeros(4096, np.uint8)
    transport = ProcessTransport()
    transport.register([Region("kv", 4096, memory.ctypes.data)])
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05
    transport.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvferry-nixl")]


def test_it_is_a_transport():
    transport: Transport = ProcessTransport()
    assert transport.kind == "nixl"
    transport.close()


def test_our_own_card_and_a_card_of_junk_are_refused():
    memory = np.zeros(4096, np.uint8)
    regions = [Region("kv", 4096, memory.ctypes.data)]
    transport = ProcessTransport()
    transport.register(regions)
    for card, code in ((transport.card(), "bad-card"), (Card("x", b"junk").to_bytes(), "bad-card")):
        with pytest.raises(TransportError, match=code):
            transport.connect("x", card, regions)
    transport.close()


def test_a_spoilt_card_harms_nobody_else(holder):
    """Whatever its metadata: the checksum is right, the peer is not."""
    rng = np.random.default_rng(0)
    with serving(2, REGION_BYTES, env=DIRECT) as served:
        (spoilt_source, source), transport = served.sources, ProcessTransport(connect_timeout_s=2)
        transport.register(holder.regions)
        told = Card.from_bytes(spoilt_source.card)
        for _ in range(20):
            spoilt = bytearray(told.metadata)
            start = rng.integers(len(spoilt) - 8)
            spoilt[start : start + rng.integers(1, 8)] = rng.bytes(int(rng.integers(0, 8)))
            with suppress(TransportError):
                transport.connect(
                    "bad", replace(told, metadata=bytes(spoilt)).to_bytes(), spoilt_source.regions
                )
            transport.forget("bad")
        transport.connect("src", source.card, source.regions)
        forged = replace(Card.from_bytes(source.card), metadata=told.metadata)
        with pytest.raises(TransportError, match=r"bad-card: bad: .* is connected with a different card"):
            transport.connect("bad", forged.to_bytes(), source.regions)
        transport.read(1, "src", WHOLE)
        assert wait(transport, 1) == [ReadEnd(1)]
        transport.close()


def test_no_regions_are_refused():
    with pytest.raises(TransportError, match="no-regions"):
        ProcessTransport().register([])


def test_without_nixl_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl", None)
    memory = np.zeros(64, np.uint8)
    with pytest.raises(TransportError, match=r'pip install "\.\[nixl\]"'):
        ProcessTransport().register([Region("kv", 64, memory.ctypes.data)])


def test_a_backend_that_cannot_be_made_is_refused_with_those_that_there_are(holder):
    """RA-5: whoever asks for another backend learns what NIXL has here."""
    transport = ProcessTransport(backend="NO_SUCH_PLUGIN")
    with pytest.raises(TransportError, match=r"backend NO_SUCH_PLUGIN \(available plugins: .*UCX"):
        transport.register(holder.regions)
    assert transport.kind == "nixl/NO_SUCH_PLUGIN"
    transport.close()
