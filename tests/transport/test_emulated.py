"""Peers that cannot be read directly: found out, read a fragment at a time, or at full pace, or refused."""

import ast
import os
import re
import signal
import threading
from pathlib import Path

import pytest

import kvferry
from kvferry.errors import TransportError
from kvferry.testing.sources import serving
from kvferry.testing.transport_world import REGION_BYTES, WHOLE, run, scattered, stale_memory, wait
from kvferry.transport import ReadEnd
from kvferry.transport.cards import pack_card, segment_in, unpack_card
from kvferry.transport.descriptors import FULL_PACE, Pace
from kvferry.transport.emulation import SEGMENT_BYTES, SETTING, AgentMode, EmulatedReads
from kvferry.transport.nixl import Agent, NixlTransport
from kvferry.transport.ucx import FABRICS, UCX_EMULATES, UCX_RECEIVED, UCX_SENT, UcxSettings, prepare_for_cuda

pytest.importorskip("nixl", exc_type=ImportError)

TCP = FABRICS["tcp"]


@pytest.fixture
def holder():
    return stale_memory()


@pytest.fixture
def transport(holder):
    transport = NixlTransport()
    transport.register(holder.regions)
    yield transport
    transport.close()


def connect(transport, name, served):
    transport.connect(name, served.sources[0].card, served.sources[0].regions)


def is_whole(holder, served):
    return bool((holder.load()[0] == served.sources[0].contents[0]).all())


def has_careful_thread():
    return any(thread.name == "kvferry-nixl-careful" for thread in threading.enumerate())


def test_a_second_agent_is_made_for_the_first_peer_that_needs_it(transport, holder):
    with serving(1, REGION_BYTES) as near, serving(1, REGION_BYTES, env=TCP) as far:
        connect(transport, "near", near)
        assert not has_careful_thread()
        connect(transport, "far", far)
        assert has_careful_thread()
        for name, served in (("near", near), ("far", far), ("near", near)):
            transport.read(1, name, WHOLE)
            assert wait(transport, 1) == [ReadEnd(1)]
            assert is_whole(holder, served)
    transport.close()
    assert not has_careful_thread()


class Watched(Agent):
    """Knows how many runs, and of how many bytes, were under way at once on the careful way."""

    max_runs = max_bytes = 0

    def __init__(self, name, engine_config):
        super().__init__(name, engine_config)
        self.is_careful = engine_config == UcxSettings().engine_config(AgentMode.CAREFUL)
        self.runs = {}

    def prepare(self, part, remote):
        handle = super().prepare(part, remote)
        self.runs[handle] = part.src[:, 1].tolist()
        return handle

    def post(self, handle):
        if self.is_careful:
            under_way = [num_bytes for runs in self.runs.values() for num_bytes in runs]
            Watched.max_runs = max(Watched.max_runs, len(under_way))
            Watched.max_bytes = max(Watched.max_bytes, sum(under_way))
        return super().post(handle)

    def release(self, handle):
        super().release(handle)
        del self.runs[handle]


def test_no_more_than_a_fragment_is_under_way_whoever_asks(holder):
    with serving(1, REGION_BYTES, env=TCP) as far:
        transport = NixlTransport(make_agent=Watched)
        transport.register(holder.regions)
        connect(transport, "far", far)
        connect(transport, "the same", far)
        transport.read(0, "far", WHOLE)
        transport.read(1, "the same", WHOLE)
        transport.read(2, "the same", scattered(100, 4096, seed=1))
        assert wait(transport, 3) == [ReadEnd(0), ReadEnd(1), ReadEnd(2)]
        transport.close()
    assert (Watched.max_runs, Watched.max_bytes) == (1, 255 << 10)


def test_an_emulated_peer_that_is_stopped_delays_no_direct_one(transport):
    with serving(1, REGION_BYTES) as near, serving(1, REGION_BYTES, env=TCP) as far:
        connect(transport, "near", near)
        connect(transport, "far", far)
        os.kill(far.pid, signal.SIGSTOP)
        transport.read(0, "far", WHOLE)
        for i in range(1, 11):
            transport.read(i, "near", scattered(100, 4096, seed=i))
            assert wait(transport, 1) == [ReadEnd(i)]
        os.kill(far.pid, signal.SIGCONT)
        assert wait(transport, 1) == [ReadEnd(0)]


@pytest.mark.parametrize("src_segment", ["8k", "256k", "1M"])
@pytest.mark.parametrize("dst_segment", ["8k", "64KB"])
def test_whatever_the_segments_of_both_sides_bytes_arrive_and_the_source_lives(
    monkeypatch, holder, src_segment, dst_segment
):
    # A segment that the reader has no room for would end the source.
    with serving(1, REGION_BYTES, env=TCP | {UCX_SENT: src_segment}) as served:
        monkeypatch.setenv(UCX_RECEIVED, dst_segment)
        transport = NixlTransport()
        transport.register(holder.regions)
        connect(transport, "src", served)
        transport.read(1, "src", WHOLE)
        assert wait(transport, 1) == [ReadEnd(1)]
        assert is_whole(holder, served)
        connect(transport, "again", served)
        transport.close()


def test_at_full_pace_a_source_of_longer_segments_than_there_is_room_for_is_refused(monkeypatch, holder):
    monkeypatch.setenv(SETTING, "fast")
    with serving(1, REGION_BYTES) as served:
        monkeypatch.setenv(UCX_RECEIVED, "8k")
        transport = NixlTransport()
        transport.register(holder.regions)
        with pytest.raises(TransportError, match="segments: it sends segments of 262144 bytes"):
            connect(transport, "src", served)
        transport.close()


def test_if_told_to_a_reader_refuses_and_says_what_to_do(monkeypatch, holder):
    monkeypatch.setenv(SETTING, "refuse")
    with serving(1, REGION_BYTES) as near, serving(1, REGION_BYTES, env=TCP) as far:
        transport = NixlTransport()
        transport.register(holder.regions)
        with pytest.raises(TransportError, match=r"not-direct: far: .*set KVFERRY_EMULATED_READS=careful"):
            connect(transport, "far", far)
        assert not has_careful_thread()
        connect(transport, "near", near)
        transport.read(1, "near", run((0, 0), (0, 0), 64))
        assert wait(transport, 1) == [ReadEnd(1)]
        transport.close()


def settings(**environ):
    return UcxSettings.from_environment(environ)


def test_the_setting_is_checked(monkeypatch):
    assert settings(**{SETTING: "fast"}).emulated_reads is EmulatedReads.FAST
    monkeypatch.setenv(SETTING, "carefully")
    with pytest.raises(TransportError, match="'carefully': one of careful, fast, refuse"):
        NixlTransport()


def test_what_the_environment_tells_ucx_itself_is_heard(monkeypatch):
    assert settings(**{UCX_EMULATES: "n"}).emulated_reads is EmulatedReads.REFUSE
    assert settings(**{UCX_EMULATES: "y", SETTING: "fast"}).emulated_reads is EmulatedReads.FAST
    monkeypatch.setenv(UCX_EMULATES, "y")
    with pytest.raises(TransportError, match="bad-setting: UCX_PROTO_EMULATION_ENABLE='y'"):
        NixlTransport()


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("8k", 8192), ("64KB", 65536), ("1M", 1 << 20), ("9000", 9000), ("512b", 512)]
)
def test_segments_are_read_as_ucx_reads_them(text, num_bytes):
    def segments(**environ):
        found = settings(**environ)
        return found.sent_bytes, found.received_bytes

    assert segments() == (SEGMENT_BYTES, SEGMENT_BYTES)
    assert segments(**{UCX_SENT: text}) == (num_bytes, max(SEGMENT_BYTES, num_bytes))
    assert segments(**{UCX_SENT: text, UCX_RECEIVED: "2M"}) == (num_bytes, 2 << 20)
    assert segments(**{UCX_RECEIVED: "2M"}) == (SEGMENT_BYTES, 2 << 20)
    assert segments(**{UCX_RECEIVED: text}) == (min(SEGMENT_BYTES, num_bytes), num_bytes)


def test_segments_that_are_no_number_are_refused():
    with pytest.raises(TransportError, match="bad-setting: UCX_TCP_RX_SEG_SIZE='auto'"):
        settings(**{UCX_RECEIVED: "auto"})


def test_the_careful_pace_fits_the_smaller_segment():
    ours = settings()
    assert ours.pace(AgentMode.CAREFUL, SEGMENT_BYTES) == Pace.careful(255 << 10)
    assert ours.pace(AgentMode.CAREFUL, 32 << 10) == Pace.careful(31 << 10)
    assert ours.pace(AgentMode.CAREFUL, 0) == Pace.careful(7 << 10)
    assert settings(**{UCX_RECEIVED: "16k"}).pace(AgentMode.CAREFUL, 32 << 10) == Pace.careful(15 << 10)
    assert ours.pace(AgentMode.DIRECT, 32 << 10) == FULL_PACE


def test_ucx_is_told_and_asked_in_one_file():
    def names_in(path):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
                text = node.value if isinstance(node.value, str) else node.value.decode(errors="replace")
                if re.fullmatch(r"UCX_\w*", text):
                    yield text

    package = Path(kvferry.__file__).parent
    found = {path.relative_to(package).as_posix(): {*names_in(path)} for path in package.rglob("*.py")}
    assert [path for path, names in found.items() if names] == ["transport/ucx.py"]


def test_what_the_environment_has_stays():
    environ = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "n"}
    prepare_for_cuda(environ)
    assert environ == {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "n"}
    environ.clear()
    prepare_for_cuda(environ)
    assert environ == {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "y"}


def test_a_card_tells_the_segments_and_a_changed_one_is_no_card():
    card = pack_card("a", b"keys", 4096)
    assert unpack_card(card) == ("a", b"keys")
    assert segment_in(card) == 4096
    for i in range(len(card)):
        changed = bytearray(card)
        changed[i] ^= 1
        with pytest.raises(TransportError, match="bad-card"):
            unpack_card(bytes(changed))
