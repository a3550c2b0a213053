"""Compiled code copies what numpy copies, to the same places, and no byte more; else it is not used."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.core.manifest import Region
from kvferry.core.runs import place
from kvferry.errors import TransportError
from kvferry.host.compiler import NotCompiled, compiled, find_compiler
from kvferry.transport import compiled_copies as module
from kvferry.transport import pack as packing
from kvferry.transport.compiled_copies import CompiledCopies, compiled_copies
from kvferry.transport.pack import TermSide, pack, unpacker
from kvferry.transport.places import Places

REGION_BYTES = 1 << 15
CHUNK_BYTES = 1 << 15


@pytest.fixture(scope="module")
def compiler() -> str:
    try:
        return find_compiler({})
    except NotCompiled as error:
        pytest.skip(f"{error}: compiled copies are tested where there is one")


@pytest.fixture(scope="module", params=[1, 3], ids=["one thread", "three threads"])
def copies(
    compiler: str, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> CompiledCopies:
    library = compiled(compiler, "copy", module.source(), tmp_path_factory.mktemp("compiled"))
    return CompiledCopies(library, request.param, parallel_bytes=1)


class By:
    """Who copies, instead of the process's own."""

    def __init__(self, copies: CompiledCopies | None) -> None:
        self._copies = copies

    def for_bytes(self, _: int) -> CompiledCopies | None:
        return self._copies


@st.composite
def sides(draw: st.DrawFn) -> list[TermSide]:
    """Runs that stay inside of the region, no two on the same bytes, and all of them fit into a chunk."""
    made, at = [], 0
    for _ in range(draw(st.integers(1, 3))):
        lengths = np.array(draw(st.lists(st.sampled_from([1, 2, 7, 64, 300, 2000]), min_size=1, max_size=5)))
        gaps = np.array(draw(st.lists(st.integers(0, 70), min_size=len(lengths), max_size=len(lengths))))
        ends = np.cumsum(lengths + gaps)
        stride, num_steps = int(ends[-1]) + draw(st.integers(0, 50)), draw(st.integers(1, 4))
        steps = np.array(draw(st.permutations(range(num_steps)))) * stride
        if at + num_steps * stride > REGION_BYTES:
            break
        made.append(TermSide(at + ends - lengths, lengths, steps))
        at += num_steps * stride
    return made


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wanted=sides(), shift=st.integers(0, 9))
def test_compiled_copies_are_those_of_numpy(
    copies: CompiledCopies, monkeypatch: pytest.MonkeyPatch, wanted: list[TermSide], shift: int
) -> None:
    seen = []
    for by in (None, copies):
        monkeypatch.setattr(packing, "host_copies", lambda by=by: By(by))
        source = np.random.default_rng(1).integers(0, 256, REGION_BYTES + shift, np.uint8)
        chunk, target = np.zeros(CHUNK_BYTES, np.uint8), np.zeros(REGION_BYTES + shift, np.uint8)
        whose = [
            Places("it", [Region("kv", REGION_BYTES, each.ctypes.data + shift)]) for each in (source, target)
        ]
        pack(whose[0], wanted, chunk.ctypes.data, CHUNK_BYTES)
        unpacker(whose[1], wanted)(chunk.ctypes.data)
        seen.append((chunk.tolist(), target.tolist()))
        moved = np.flatnonzero(target)
        assert (target[moved] == source[moved]).all()
    assert seen[0] == seen[1]


def test_a_run_that_leaves_its_region_is_refused_before_anything_is_copied(
    copies: CompiledCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "host_copies", lambda: By(copies))
    memory, chunk = np.ones(64, np.uint8), np.zeros(64, np.uint8)
    places = Places("it", [Region("kv", 64, memory.ctypes.data)])
    good = TermSide(np.array([0]), np.array([8]), np.array([0]))
    bad = TermSide(np.array([0]), np.array([8]), np.array([0, 60]))
    for call in (pack, lambda *words: unpacker(*words[:2])(words[2])):
        with pytest.raises(TransportError, match="out-of-bounds"):
            call(places, [bad, good], chunk.ctypes.data, 64)
    with pytest.raises(TransportError, match="too-much"):
        pack(places, [good], chunk.ctypes.data, 7)
    assert not chunk.any()
    assert memory.all()


@pytest.mark.parametrize("is_compiled", [True, False])
def test_blocks_in_two_regions_are_refused_though_each_is_inside_of_one(
    copies: CompiledCopies, monkeypatch: pytest.MonkeyPatch, is_compiled: bool
) -> None:
    monkeypatch.setattr(packing, "host_copies", lambda: By(copies if is_compiled else None))
    memory, chunk = np.ones(128, np.uint8), np.zeros(64, np.uint8)
    places = Places("it", [Region(f"kv.{i}", 64, memory.ctypes.data + 64 * i) for i in range(2)])
    far = TermSide(np.array([0]), np.array([8]), np.array([0, place(1, 0)]))
    for call in (pack, lambda *words: unpacker(*words[:2])(words[2])):
        with pytest.raises(TransportError, match="not in one region"):
            call(places, [far], chunk.ctypes.data, 64)
    assert not chunk.any()
    assert memory.all()


def scattered(copies: CompiledCopies, seed: int, times: int = 1) -> bool:
    """Whether what is gathered from random places, and scattered to others, is right every time."""
    random = np.random.default_rng(seed)
    memory, target = random.integers(1, 256, 1 << 18, np.uint8), np.zeros(1 << 18, np.uint8)
    chunk = np.zeros(1 << 17, np.uint8)
    lengths, steps = np.full(512, 256), np.array([0])
    for _ in range(times):
        here, there = (random.permutation(1024)[:512] * 256 for _ in range(2))
        copies.gather(here + memory.ctypes.data, lengths, steps, chunk.ctypes.data)
        copies.scatter(there + target.ctypes.data, lengths, steps, chunk.ctypes.data)
        if (target.reshape(1024, 256)[there // 256] != memory.reshape(1024, 256)[here // 256]).any():
            return False
    return True


def test_who_copies_at_the_same_time_gets_its_own_bytes(copies: CompiledCopies) -> None:
    with ThreadPoolExecutor(8) as callers:
        assert all(callers.map(lambda seed: scattered(copies, seed, times=200), range(8)))


def test_a_copy_is_over_when_its_call_returns(copies: CompiledCopies) -> None:
    """Also what a thread that helps has taken: here the caller is through long before it."""
    lengths = np.array([1 << 22, 1 << 25, *[1] * 10])  # a part each
    memory, chunk = np.ones(int(lengths.sum()), np.uint8), np.zeros(int(lengths.sum()), np.uint8)
    rows = memory.ctypes.data + np.cumsum(lengths) - lengths
    for _ in range(5):
        chunk[:] = 0
        copies.gather(rows, lengths, np.array([0]), chunk.ctypes.data)
        assert chunk[(1 << 22) + (1 << 25) - 1]
        assert chunk.all()


def is_well_in_a_child(call: Callable[[], bool]) -> bool:
    """What it says in a child that is forked, and lives as long."""
    child = os.fork()
    if not child:
        is_well = False
        try:
            is_well = call()
        finally:
            os._exit(0 if is_well else 1)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    if ended[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return ended == (child, 0)


def test_a_forked_child_copies_alone(copies: CompiledCopies) -> None:
    """The threads that help are not there."""
    assert scattered(copies, 1)
    assert is_well_in_a_child(lambda: scattered(copies, 2))


def test_a_host_without_room_for_threads_copies_with_those_it_has(compiler: str, tmp_path: Path) -> None:
    library = compiled(compiler, "copy", module.source(), tmp_path)

    def copied() -> bool:
        used = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * resource.getpagesize()
        before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + (20 << 20), before[1]))
        many = CompiledCopies(library, num_threads=1000, parallel_bytes=1)
        num_started = len(os.listdir("/proc/self/task"))
        resource.setrlimit(resource.RLIMIT_AS, before)
        return num_started < 1000 and scattered(many, 3)

    assert is_well_in_a_child(copied)


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("put(chunk, now.at(), length)", "put(chunk, now.at(), length / 2)"),
        ("put(now.at(), chunk, length)", "put(now.at(), chunk, length + 1)"),
        ("chunk += length", "chunk += 512"),
        ("side.steps[step]", "side.steps[0]"),
        ("run == stop", "run + 1 == stop"),
    ],
)
def test_code_that_copies_other_bytes_is_not_used(
    copies: CompiledCopies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: str, wrong: str
) -> None:
    text = module.source()
    assert right in text
    monkeypatch.setattr(module, "source", lambda: text.replace(right, wrong))
    with pytest.raises(NotCompiled, match="other bytes"):
        compiled_copies(find_compiler({}), tmp_path)
