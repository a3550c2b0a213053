"""The transport over NIXL, between two processes: the laws, on host memory, over TCP, and on a GPU.

What is special about TCP, where reads are emulated, is in ``test_emulated``.
"""

import os
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from typing import ClassVar

import numpy as np
import pytest

from kvferry import Region
from kvferry.errors import TransportError
from kvferry.testing.sources import serving
from kvferry.testing.transport_laws import TransportLaws
from kvferry.testing.transport_world import REGION_BYTES, WHOLE, World, run, scattered, stale_memory, wait
from kvferry.transport import ReadEnd, Transport
from kvferry.transport.cuda import has_cuda
from kvferry.transport.nixl import NixlTransport, pack_card, unpack_card
from kvferry.transport.ucx import FABRICS

TCP = FABRICS["tcp"]
"""Posts return at once here, and a stopped source stops the bytes."""

pytest.importorskip("nixl", exc_type=ImportError)


class NixlLaws(TransportLaws):
    device = "cpu"
    env: ClassVar[dict[str, str]] = {}

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
        stopped = partial(stopping, served.pid) if "tcp" in self.env.get("UCX_TLS", "") else None
        yield World(NixlTransport, holder, served.sources, stopped)
        holder.free()


@contextmanager
def stopping(pid):
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


class TestNixl(NixlLaws):
    pass


class TestNixlOverTcp(NixlLaws):
    env = TCP


@pytest.mark.slow
class TestNixlOverTcpFast(NixlLaws):
    env = TCP | {"KVFERRY_EMULATED_READS": "fast"}


@pytest.mark.skipif(not has_cuda(), reason="no CUDA device")
class TestNixlOnGpu(NixlLaws):
    device = "cuda:0"
    env: ClassVar[dict[str, str]] = {"KVFERRY_MAPPED_READS": "off"}


@pytest.mark.skipif(not has_cuda(), reason="no CUDA device")
class TestMappedOnGpu(NixlLaws):
    """The copy kernel, between two processes; a peer that cannot be mapped is refused."""

    device = "cuda:0"
    env: ClassVar[dict[str, str]] = {"KVFERRY_MAPPED_READS": "require"}


@pytest.mark.skipif(not has_cuda(), reason="no CUDA device")
class TestNixlOnGpuOverTcp(NixlLaws):
    device = "cuda:0"
    # The other GPU tests set a variable for CUDA IPC, and UCX would complain that nothing uses it.
    env: ClassVar[dict[str, str]] = {
        "UCX_TLS": "tcp,self,cuda_copy",
        "UCX_WARN_UNUSED_ENV_VARS": "n",
        "KVFERRY_MAPPED_READS": "off",
    }


@pytest.fixture
def tcp(monkeypatch):
    """A source of its own, over TCP: the test may stop or kill it."""
    for name, value in TCP.items():
        monkeypatch.setenv(name, value)
    with serving(1, REGION_BYTES, env=TCP) as served:
        yield served


@pytest.fixture
def holder():
    return stale_memory()


def connected(transport, holder, served):
    transport.register(holder.regions)
    transport.connect("src", served.sources[0].card, served.sources[0].regions)


def test_a_stopped_source_ends_nothing_and_its_bytes_come_late(tcp, holder):
    transport = NixlTransport(close_timeout_s=0.2)
    connected(transport, holder, tcp)
    os.kill(tcp.pid, signal.SIGSTOP)
    transport.read(1, "src", WHOLE)
    time.sleep(0.1)
    transport.forget("src")
    with pytest.raises(TransportError, match="still-under-way"):
        transport.close()
    assert transport.poll() == []
    os.kill(tcp.pid, signal.SIGCONT)
    (end,) = wait(transport, 1)
    assert end.error in ("", "peer 'src' was forgotten")
    quiet = holder.load()
    transport.close()
    assert all((a == b).all() for a, b in zip(holder.load(), quiet, strict=True))


def test_a_stopped_source_delays_no_other_peer(tcp, holder):
    with serving(1, REGION_BYTES, env=TCP) as other:
        transport = NixlTransport()
        connected(transport, holder, tcp)
        transport.connect("other", other.sources[0].card, other.sources[0].regions)
        os.kill(tcp.pid, signal.SIGSTOP)
        for i in range(20):
            transport.read(i, "src", WHOLE)
        for i in range(20, 30):
            transport.read(i, "other", scattered(100, 4096, seed=i))
            assert [end.transfer for end in wait(transport, 1)] == [i]
        os.kill(tcp.pid, signal.SIGCONT)
        assert not any(end.error for end in wait(transport, 20))
        transport.close()


def test_a_killed_source_gives_an_error(tcp, holder):
    transport = NixlTransport()
    connected(transport, holder, tcp)
    os.kill(tcp.pid, signal.SIGSTOP)
    transport.read(1, "src", WHOLE)
    transport.read(2, "src", run((0, 0), (1, 0), 64))
    os.kill(tcp.pid, signal.SIGKILL)
    ends = wait(transport, 2)
    assert [end.transfer for end in ends] == [1, 2]
    assert all(end.error for end in ends)
    transport.read(3, "src", run((0, 0), (1, 0), 64))
    assert wait(transport, 1)[0].error
    transport.forget("src")
    transport.close()


@pytest.mark.timed
def test_no_connection_is_an_error_in_time(tcp, holder):
    transport = NixlTransport(connect_timeout_s=0.2, close_timeout_s=0.2)
    transport.register(holder.regions)
    os.kill(tcp.pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(TransportError, match=r"no-connection: src: no answer within 0\.2 s"):
        transport.connect("src", tcp.sources[0].card, tcp.sources[0].regions)
    assert time.monotonic() - started < 5
    os.kill(tcp.pid, signal.SIGCONT)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            transport.close()
            return
        except TransportError:
            pass
    pytest.fail("the warm-up never ended")


@pytest.mark.timed
def test_waiting_costs_no_cpu():
    memory = np.zeros(4096, np.uint8)
    transport = NixlTransport()
    transport.register([Region("kv", 4096, memory.ctypes.data)])
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.05
    transport.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvferry-nixl")]


def test_it_is_a_transport():
    transport: Transport = NixlTransport()
    assert transport.kind == "nixl"
    transport.close()


def test_our_own_card_and_a_card_of_junk_are_refused():
    memory = np.zeros(4096, np.uint8)
    regions = [Region("kv", 4096, memory.ctypes.data)]
    transport = NixlTransport()
    transport.register(regions)
    for card, code in ((transport.card(), "bad-card"), (pack_card("x", b"junk"), "bad-card")):
        with pytest.raises(TransportError, match=code):
            transport.connect("x", card, regions)
    transport.close()


def test_a_spoilt_card_harms_nobody_else(holder):
    """Whatever its metadata: the checksum is right, the peer is not."""
    rng = np.random.default_rng(0)
    with serving(2, REGION_BYTES) as served:
        (spoilt_source, source), transport = served.sources, NixlTransport(connect_timeout_s=2)
        transport.register(holder.regions)
        name, metadata = unpack_card(spoilt_source.card)
        for _ in range(20):
            spoilt = bytearray(metadata)
            start = rng.integers(len(spoilt) - 8)
            spoilt[start : start + rng.integers(1, 8)] = rng.bytes(int(rng.integers(0, 8)))
            with suppress(TransportError):
                transport.connect("bad", pack_card(name, bytes(spoilt)), spoilt_source.regions)
            transport.forget("bad")
        transport.connect("src", source.card, source.regions)
        forged = unpack_card(source.card)[0], metadata
        with pytest.raises(TransportError, match="bad-card: bad: a second card of"):
            transport.connect("bad", pack_card(*forged), source.regions)
        transport.read(1, "src", WHOLE)
        assert wait(transport, 1) == [ReadEnd(1)]
        transport.close()


def test_no_regions_are_refused():
    with pytest.raises(TransportError, match="no-regions"):
        NixlTransport().register([])


def test_without_nixl_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl", None)
    memory = np.zeros(64, np.uint8)
    with pytest.raises(TransportError, match=r'pip install "kvferry\[nixl\]"'):
        NixlTransport().register([Region("kv", 64, memory.ctypes.data)])


def test_a_backend_that_cannot_be_made_is_refused_with_those_that_there_are(holder):
    """RA-5: whoever asks for another backend learns what NIXL has here."""
    transport = NixlTransport(backend="NO_SUCH_PLUGIN")
    with pytest.raises(TransportError, match=r"backend NO_SUCH_PLUGIN \(plugins here: .*UCX"):
        transport.register(holder.regions)
    assert transport.kind == "nixl/NO_SUCH_PLUGIN"
    transport.close()
