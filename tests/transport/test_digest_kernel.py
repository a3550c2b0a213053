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
from kvferry.core.digest_cells import (
    CellBlocks,
    CellChunks,
    CellPattern,
    ChunkedCells,
    Dimension,
    Words,
    sums_by_numpy,
)
from kvferry.core.manifest import Region
from kvferry.testing.strategies import cases, engines, requests
from kvferry.transport import copy_kernel, digest_kernel
from kvferry.transport.copy_kernel import CopyLimits
from kvferry.transport.digest_kernel import LANE_WORDS, TERM, TILE_STEPS, DigestKernel, tables_of
from tests.core.planted_faults import memory_of
from tests.transport.fake_cuda import FakeCuda, FakeStream
from tests.transport.kernel_on_cpu import kernel_on_cpu

Memory = Mapping[str, np.ndarray]


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return kernel_on_cpu(copy_kernel.source("digest"), tmp_path_factory.mktemp("kernel"))


def aligned(values: np.ndarray) -> np.ndarray:
    """At a multiple of 16 bytes, as device memory is."""
    room = np.zeros(len(values) + 16, np.uint8)
    room = room[-room.ctypes.data % 16 :][: len(values)]
    room[:] = values
    return room


def sums_on_cpu(
    kernel: ctypes.CDLL, memory: Memory, num_warps: int, limits: CopyLimits, wanted: Sequence[ChunkedCells]
) -> list[Words]:
    regions = {name: Region(name, len(at), at.ctypes.data) for name, at in memory.items()}
    found: list[Words] = []
    for table in tables_of(wanted, regions, 1 << 16):
        scratch = np.full(table.num_words + table.num_sums, 0xAB, np.uint64)
        table.write(scratch, scratch.ctypes.data)
        for first, end, _ in limits.launches(table.num_tiles, table.num_bytes, 2):
            numbers = (table.num_sums, first, end, num_warps)
            kernel.sum_cells(ctypes.c_void_p(scratch.ctypes.data), *map(ctypes.c_uint64, numbers))
        found += table.split(scratch[table.num_words :])
    return found


def chunked(blocks: CellBlocks, num_chunks: int = 2) -> ChunkedCells:
    """All cells of some blocks, the last first, in so many chunks."""
    num_cells = len(blocks.pattern.rows.cells)
    index, places = (each.ravel()[::-1] for each in np.indices((len(blocks.block_ids), num_cells)))
    keys = np.random.default_rng(5).integers(0, 1 << 64, len(places), np.uint64)
    starts = np.unique(np.linspace(0, len(places), num_chunks, endpoint=False).astype(np.int64))
    return ChunkedCells(blocks, CellChunks(index, places, keys, starts))


def assert_found(on_cpu: ctypes.CDLL, memory: Memory, wanted: Sequence[ChunkedCells]) -> None:
    """By several warps, in several launches."""
    found = sums_on_cpu(on_cpu, memory, 3, CopyLimits(launch_bytes=4096), wanted)
    expected = sums_by_numpy(memory, wanted)
    assert [sums.tolist() for sums in found] == [sums.tolist() for sums in expected]


@settings(max_examples=40, deadline=None, suppress_health_check=[*HealthCheck])
@given(data=st.data())
def test_the_kernel_finds_the_numbers_of_numpy(on_cpu: ctypes.CDLL, data: st.DataObject) -> None:
    """RB-1: any layout, block size and parallelism; any number of warps and launches."""
    case = data.draw(cases())
    src, dst = engines(case)
    request = data.draw(requests(src, dst, case.num_tokens, case.num_kept))
    seed, num_warps = data.draw(st.integers(0, 99)), data.draw(st.integers(1, 5))
    limits = CopyLimits(launch_bytes=data.draw(st.sampled_from([0, 64, 1 << 12])))
    for src_rank, some in digest_parts(plan(src, dst, case.dst_rank), request).items():
        random = np.random.default_rng(seed)
        memory = {name: aligned(values) for name, values in memory_of(src, src_rank, random).items()}
        sides = (
            DigestSide(src, src.rank(src_rank), request.src, memory, "src", chunk_sums)
            for chunk_sums in (None, partial(sums_on_cpu, on_cpu, memory, num_warps, limits))
        )
        ours, theirs = (side.sums(some, seed=seed) for side in sides)
        assert [sums.tolist() for sums in ours] == [sums.tolist() for sums in theirs]


@pytest.mark.parametrize("row_words", [1, 2, 7, 8, 32, 33, 60, 127, 128, 2048, 2065])
@pytest.mark.parametrize("word_bytes", [1, 2, 4])
@pytest.mark.parametrize("gap", [0, 1, 4])
@pytest.mark.parametrize("num_cells", [1, 3, 40])
def test_rows_of_any_length_are_split_over_tiles(
    on_cpu: ctypes.CDLL, row_words: int, word_bytes: int, gap: int, num_cells: int
) -> None:
    """Short ones share a warp, few long ones are cut, and words that lie in fours are read as such."""
    random, row_bytes = np.random.default_rng(row_words), (row_words + gap) * word_bytes
    block_bytes = num_cells * 3 * row_bytes
    memory = {"kv": aligned(random.integers(0, 256, 6 * block_bytes, np.uint8))}
    cells, rows = Dimension(num_cells, 3 * row_bytes, True), Dimension(3, row_bytes, False)
    keys = random.integers(0, 1 << 64, (3, row_words), np.uint64)
    dimensions = (cells, rows, Dimension(row_words, word_bytes, False))
    pattern = CellPattern(word_bytes, dimensions, (0,), keys, 0, np.arange(num_cells))
    some = [CellBlocks("k", "kv", pattern, 0, block_bytes, np.array(ids)) for ids in ([0, 4, 5], [2])]
    assert_found(on_cpu, memory, [chunked(blocks) for blocks in some])


@pytest.mark.parametrize("offset", [0, 1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("word_bytes", [1, 2, 4])
@pytest.mark.parametrize("block_stride", [36, 40, 48])
def test_words_at_any_address_are_read(
    on_cpu: ctypes.CDLL, offset: int, word_bytes: int, block_stride: int
) -> None:
    """The compiler's sanitizer watches: a device would fail at a word that is not aligned."""
    memory = {"kv": aligned(np.random.default_rng(1).integers(0, 256, 160, np.uint8))}
    keys = np.arange(1, 17, 2).astype(np.uint64)
    pattern = CellPattern(word_bytes, (Dimension(8, word_bytes, False),), (), keys, 0, np.zeros(1, np.int64))
    assert_found(
        on_cpu, memory, [chunked(CellBlocks("k", "kv", pattern, offset, block_stride, np.array([0, 2])))]
    )


@pytest.mark.parametrize("row_words", [1, 5, 12, 31])
def test_many_short_rows_are_found(on_cpu: ctypes.CDLL, row_words: int) -> None:
    random, row_bytes = np.random.default_rng(2), 4 * row_words + 4
    memory = {"kv": aligned(random.integers(0, 256, 200 * row_bytes, np.uint8))}
    keys = random.integers(0, 1 << 64, (100, row_words), np.uint64)
    dimensions = Dimension(100, row_bytes, False), Dimension(row_words, 4, False)
    pattern = CellPattern(4, dimensions, (), keys, 0, np.zeros(1, np.int64))
    blocks = CellBlocks("k", "kv", pattern, 0, 100 * row_bytes, np.array([0, 1]))
    assert_found(on_cpu, memory, [chunked(blocks)])


class DigestCuda(FakeCuda):
    """A device whose kernel is the digest's."""

    def __init__(self, kernel: ctypes.CDLL) -> None:
        super().__init__()
        self._sum_cells = kernel.sum_cells

    def launch(
        self, kernel: None, num_blocks: int, num_threads: int, stream: FakeStream, args: object
    ) -> None:
        numbers = [ctypes.c_uint64(number) for number in (*args._values, 4)]  # type: ignore[attr-defined]
        stream.put(lambda: self._sum_cells(*numbers))

    def download_later(self, pinned: int, address: int, num_bytes: int, stream: FakeStream) -> None:
        def download() -> None:
            ctypes.memmove(pinned, address, num_bytes)

        stream.put(download)


def test_a_device_takes_one_digest_after_another(
    on_cpu: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scratch is used again, and grows for a table that does not fit."""
    monkeypatch.setattr(copy_kernel, "compiled_kernel", lambda *names: b"")
    monkeypatch.setattr(digest_kernel, "SCRATCH_BYTES", 1024)
    memory = {"kv": aligned(np.random.default_rng(4).integers(0, 256, 4096, np.uint8))}
    regions = {"kv": Region("kv", 4096, memory["kv"].ctypes.data)}
    cuda = DigestCuda(on_cpu)
    kernel = DigestKernel(cuda, CopyLimits(launch_bytes=512))  # type: ignore[arg-type]
    for num_words in (8, 4, 300, 8):
        keys = np.arange(1, 2 * num_words, 2).astype(np.uint64)
        pattern = CellPattern(4, (Dimension(num_words, 4, False),), (), keys, 0, np.zeros(1, np.int64))
        some = [CellBlocks(str(i), "kv", pattern, 4 * i, 4 * num_words, np.arange(3)) for i in range(9)]
        wanted = [chunked(blocks) for blocks in some]
        expected = sums_by_numpy(memory, wanted)
        assert [sums.tolist() for sums in kernel.sums(regions, wanted)] == [one.tolist() for one in expected]
    assert not cuda.faults


def test_layers_share_what_they_have_in_common(on_cpu: ctypes.CDLL) -> None:
    """Of ten layers a table holds one list of cells; their addresses decide how each is read."""
    memory = {"kv": aligned(np.random.default_rng(3).integers(0, 256, 4096, np.uint8))}
    keys = np.arange(1, 17, 2).astype(np.uint64)
    pattern = CellPattern(4, (Dimension(8, 4, False),), (), keys, 0, np.zeros(1, np.int64))
    first = chunked(CellBlocks("0", "kv", pattern, 0, 32, np.arange(20)))
    blocks = [CellBlocks(str(i), "kv", pattern, 33 * i, 32, np.arange(20)) for i in range(10)]
    wanted = [ChunkedCells(each, first.chunks) for each in blocks]
    assert_found(on_cpu, memory, wanted)
    (table,) = tables_of(wanted, {"kv": Region("kv", 4096, 4096)}, 1 << 20)
    assert table.num_words == table.num_sums * TERM.itemsize // 8 + 1 + 8 + 20 + 20


def test_words_outside_of_a_region_are_refused() -> None:
    pattern = CellPattern(4, (Dimension(8, 4, False),), (), np.ones(8, np.uint64), 0, np.zeros(1, np.int64))
    blocks = partial(CellBlocks, "k", "kv", pattern, block_stride=32, block_ids=np.array([0, 1]))
    regions = {"kv": Region("kv", 70, 4096)}
    (table,) = tables_of([chunked(blocks(offset=4))], regions, 1 << 20)
    assert (table.num_sums, table.num_tiles, table.num_bytes) == (2, 2, 64)
    with pytest.raises(SpecError, match="are not all in region kv of 70 bytes"):
        [*tables_of([chunked(blocks(offset=8))], regions, 1 << 20)]


def test_many_states_take_several_turns() -> None:
    pattern = CellPattern(4, (Dimension(8, 4, False),), (), np.ones(8, np.uint64), 0, np.zeros(1, np.int64))
    wanted = [chunked(CellBlocks(str(i), "kv", pattern, 0, 32, np.arange(4))) for i in range(5)]
    regions = {"kv": Region("kv", 128, 4096)}
    (whole,) = tables_of(wanted[:2], regions, 1 << 20)
    room = 8 * (whole.num_words + whole.num_sums)
    assert [table.num_sums for table in tables_of(wanted, regions, room)] == [4, 4, 2]
    assert [table.num_sums for table in tables_of(wanted, regions, 1)] == [2, 2, 2, 2, 2]
    assert [*tables_of([], regions, 1)] == []


def test_host_and_device_agree_on_the_table() -> None:
    assert TERM.itemsize == 88
    for line in (f"#define TILE_STEPS {TILE_STEPS}\n", f"#define LANE_WORDS {LANE_WORDS}\n"):
        assert line in copy_kernel.source("digest")
