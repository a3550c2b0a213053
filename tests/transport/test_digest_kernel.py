"""The digest kernel's arithmetic, by its own text: compiled for this CPU, lanes and warps run one by one."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry import SpecError, plan
from kvferry.core.digest import DigestSide, digest_parts
from kvferry.core.digest_cells import CellBlocks, CellPattern, Dimension, sums_by_numpy
from kvferry.core.digest_keys import Words
from kvferry.core.manifest import Region
from kvferry.testing.strategies import cases, engines, requests
from kvferry.transport import digest_kernel
from kvferry.transport.copy_kernel import CopyLimits
from kvferry.transport.digest_kernel import TERM, TILE_WORDS, table_of, turns, words_needed
from tests.core.planted_faults import memory_of
from tests.transport.kernel_on_cpu import kernel_on_cpu

Memory = Mapping[str, np.ndarray]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return kernel_on_cpu(digest_kernel.source(), tmp_path_factory.mktemp("kernel"))


def aligned(values: np.ndarray) -> np.ndarray:
    """At a multiple of 16 bytes, as device memory is."""
    room = np.zeros(len(values) + 16, np.uint8)
    room = room[-room.ctypes.data % 16 :][: len(values)]
    room[:] = values
    return room


def sums_on_cpu(
    kernel: ctypes.CDLL, memory: Memory, num_warps: int, limits: CopyLimits, wanted: Sequence[CellBlocks]
) -> list[Words]:
    regions = {name: Region(name, len(at), at.ctypes.data) for name, at in memory.items()}
    scratch = np.zeros(sum(words_needed(each) for each in wanted), np.uint64)
    table = table_of(wanted, regions, scratch.ctypes.data)
    stop = table.words.size + table.num_sums
    assert stop <= len(scratch)
    scratch[: table.words.size] = table.words
    for first, end, _ in limits.launches(table.num_tiles, table.num_bytes, 2):
        numbers = (table.num_terms, first, end, num_warps)
        kernel.sum_cells(ctypes.c_void_p(scratch.ctypes.data), *map(ctypes.c_uint64, numbers))
    return table.split(scratch[table.words.size : stop])


@settings(max_examples=40, deadline=None, suppress_health_check=[*HealthCheck])
@given(data=st.data())
def test_the_kernel_finds_the_numbers_of_numpy(on_cpu: ctypes.CDLL, data: st.DataObject) -> None:
    """Any layout, block size and parallelism; any number of warps and launches."""
    case = data.draw(cases())
    src, dst = engines(case)
    request = data.draw(requests(src, dst, case.num_tokens, case.num_kept))
    seed, num_warps = data.draw(st.integers(0, 99)), data.draw(st.integers(1, 5))
    limits = CopyLimits(launch_bytes=data.draw(st.sampled_from([0, 64, 1 << 12])))
    for src_rank, some in digest_parts(plan(src, dst, case.dst_rank), request).items():
        random = np.random.default_rng(seed)
        memory = {name: aligned(values) for name, values in memory_of(src, src_rank, random).items()}
        sides = (
            DigestSide(src, src.rank(src_rank), request.src, memory, "src", cell_sums)
            for cell_sums in (None, partial(sums_on_cpu, on_cpu, memory, num_warps, limits))
        )
        ours, theirs = (side.sums(some, seed=seed) for side in sides)
        assert [sums.tolist() for sums in ours] == [sums.tolist() for sums in theirs]


@pytest.mark.parametrize("row_words", [1, 7, 32, 33, TILE_WORDS - 1, TILE_WORDS, 2 * TILE_WORDS + 5])
@pytest.mark.parametrize("word_bytes", [1, 2, 4])
def test_long_and_odd_rows_are_split_over_tiles(on_cpu: ctypes.CDLL, row_words: int, word_bytes: int) -> None:
    random, row_bytes = np.random.default_rng(row_words), (row_words + 3) * word_bytes
    memory = {"kv": aligned(random.integers(0, 256, 2 * 9 * row_bytes * 3, np.uint8))}
    cells, rows = Dimension(3, 3 * row_bytes, True), Dimension(3, row_bytes, False)
    keys = random.integers(0, 1 << 64, (3, row_words), np.uint64)
    dimensions = (cells, rows, Dimension(row_words, word_bytes, False))
    pattern = CellPattern(word_bytes, dimensions, (0,), keys, 0, np.arange(3))
    wanted = [CellBlocks("k", "kv", pattern, 0, 9 * row_bytes, np.array(ids)) for ids in ([0, 4, 5], [2])]
    found = sums_on_cpu(on_cpu, memory, 3, CopyLimits(launch_bytes=4096), wanted)
    for ours, theirs in zip(sums_by_numpy(memory, wanted), found, strict=True):
        assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("offset", range(5))
@pytest.mark.parametrize("word_bytes", [1, 2, 4])
def test_words_at_any_address_are_read(on_cpu: ctypes.CDLL, offset: int, word_bytes: int) -> None:
    """The compiler's sanitizer watches: a device would fail at a word that is not aligned."""
    memory = {"kv": aligned(np.random.default_rng(1).integers(0, 256, 128, np.uint8))}
    keys = np.arange(1, 17, 2).astype(np.uint64)
    pattern = CellPattern(word_bytes, (Dimension(8, word_bytes, False),), (), keys, 0, np.zeros(1, np.int64))
    wanted = [CellBlocks("k", "kv", pattern, offset, 36, np.array([0, 2]))]
    (found,) = sums_on_cpu(on_cpu, memory, 1, CopyLimits(), wanted)
    assert found.tolist() == sums_by_numpy(memory, wanted)[0].tolist()


@pytest.mark.parametrize("row_words", [1, 5, 12, 31])
def test_many_short_rows_are_found(on_cpu: ctypes.CDLL, row_words: int) -> None:
    """A lane steps over several rows at once."""
    random, row_bytes = np.random.default_rng(2), 4 * row_words + 4
    memory = {"kv": aligned(random.integers(0, 256, 200 * row_bytes, np.uint8))}
    keys = random.integers(0, 1 << 64, (100, row_words), np.uint64)
    dimensions = Dimension(100, row_bytes, False), Dimension(row_words, 4, False)
    pattern = CellPattern(4, dimensions, (), keys, 0, np.zeros(1, np.int64))
    wanted = [CellBlocks("k", "kv", pattern, 0, 100 * row_bytes, np.array([0, 1]))]
    (found,) = sums_on_cpu(on_cpu, memory, 2, CopyLimits(), wanted)
    assert found.tolist() == sums_by_numpy(memory, wanted)[0].tolist()


def test_words_outside_of_a_region_are_refused() -> None:
    pattern = CellPattern(4, (Dimension(8, 4, False),), (), np.ones(8, np.uint64), 0, np.zeros(1, np.int64))
    blocks = partial(CellBlocks, "k", "kv", pattern, block_stride=32, block_ids=np.array([0, 1]))
    regions = {"kv": Region("kv", 70, 4096)}
    assert table_of([blocks(offset=4)], regions, 0).num_tiles == 2
    with pytest.raises(SpecError, match="are not all in region kv of 70 bytes"):
        table_of([blocks(offset=8)], regions, 0)


def test_many_states_take_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = CellPattern(4, (Dimension(8, 4, False),), (), np.ones(8, np.uint64), 0, np.zeros(1, np.int64))
    wanted = [CellBlocks(str(i), "kv", pattern, 0, 32, np.arange(4)) for i in range(5)]
    monkeypatch.setattr(digest_kernel, "SCRATCH_BYTES", 8 * 2 * words_needed(wanted[0]))
    assert [len(some) for some in turns(wanted)] == [2, 2, 1]
    monkeypatch.setattr(digest_kernel, "SCRATCH_BYTES", 1)
    assert [each.state for some in turns(wanted) for each in some] == ["0", "1", "2", "3", "4"]


def test_host_and_device_agree_on_the_table() -> None:
    assert TERM.itemsize == 80
    assert f"#define TILE_WORDS {TILE_WORDS}" in digest_kernel.source()
