"""The copy kernel's arithmetic, by its own text: compiled for this CPU, lanes and warps run one by one."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.core.manifest import Region
from kvferry.core.product import Product, Term
from kvferry.core.runs import Runs, place
from kvferry.errors import TransportError
from kvferry.transport import copy_kernel
from kvferry.transport.copy_kernel import (
    TERM,
    TILE_WORDS,
    WARP_SIZE,
    Repeated,
    prepare,
    repeated,
    table_words,
    write_table,
)
from kvferry.transport.places import Places
from tests.transport.kernel_on_cpu import kernel_on_cpu

REGION_BYTES = 1 << 16


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return kernel_on_cpu(copy_kernel.source("copy"), tmp_path_factory.mktemp("kernel"))


class Memory:
    """Two regions on each side, and what a copy should make of them."""

    def __init__(self) -> None:
        random = np.random.default_rng(7)
        # 16 bytes aligned, as device memory is.
        self._raw = [np.zeros(REGION_BYTES + 16, np.uint8) for _ in range(4)]
        buffers = [raw[-raw.ctypes.data % 16 :][:REGION_BYTES] for raw in self._raw]
        self.src, self.dst = buffers[:2], buffers[2:]
        for buffer in self.src:
            buffer[:] = random.integers(1, 255, REGION_BYTES)
        for buffer in self.dst:
            buffer[:] = 255
        self.src_places, self.dst_places = (
            Places(whose, [Region(f"r{i}", REGION_BYTES, b.ctypes.data) for i, b in enumerate(side)])
            for whose, side in (("theirs", self.src), ("ours", self.dst))
        )

    def expected(self, runs: Runs, is_clear: bool) -> list[np.ndarray]:
        after = [buffer.copy() for buffer in self.dst]
        for src_region, src, dst_region, dst, num_bytes in runs:
            bytes_in = 0 if is_clear else self.src[src_region][src : src + num_bytes]
            after[dst_region][dst : dst + num_bytes] = bytes_in
        return after


def terms_of(product: Product, src: Places | None, dst: Places) -> list[Repeated]:
    return repeated(product, lambda pattern: prepare(pattern, src, dst))


def run_on_cpu(kernel: ctypes.CDLL, terms: list[Repeated], num_warps: int, num_launches: int) -> None:
    table = np.zeros(table_words(terms), np.uint64)
    work = write_table(terms, table, table.ctypes.data)
    step = max(1, -(-work.num_tiles // num_launches))
    for first in range(0, work.num_tiles, step):
        stop = min(first + step, work.num_tiles)
        numbers = ctypes.c_uint64(work.num_terms), ctypes.c_uint64(first), ctypes.c_uint64(stop)
        kernel.copy_runs(ctypes.c_void_p(table.ctypes.data), *numbers, ctypes.c_uint64(num_warps))


@st.composite
def products(draw: st.DrawFn) -> Product:
    """A few terms of patterns and steps, any alignment, several lengths, disjoint at the destination."""
    terms = []
    at = 0  # the destination is dealt out from here, in both regions alike
    for _ in range(draw(st.integers(1, 3))):
        unit = draw(st.sampled_from([1, 2, 3, 4, 8, 16, 48, 256]))
        lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
        shift = draw(st.integers(0, 17))
        num_pairs = draw(st.integers(1, 6))
        num_bytes = np.array(lengths) * unit
        starts = np.cumsum(num_bytes) - num_bytes + shift
        stride = int(starts[-1] + num_bytes[-1])
        if at + stride * num_pairs > REGION_BYTES:
            break
        regions = draw(st.lists(st.integers(0, 1), min_size=len(lengths), max_size=len(lengths)))
        dst = np.array(
            [place(region, at + int(start)) for region, start in zip(regions, starts, strict=True)]
        )
        src_shift = draw(st.integers(0, 17))
        src = np.array([place(1 - r, src_shift + int(s)) for r, s in zip(regions, starts[::-1], strict=True)])
        order = draw(st.permutations(range(num_pairs)))
        src_steps = np.array([stride * i for i in order])
        room = REGION_BYTES - (src_shift + stride + int(num_bytes.max()))
        steps = np.stack([np.minimum(src_steps, room), np.arange(num_pairs) * stride])
        terms.append(Term(Runs(src, dst, num_bytes), steps))
        at += stride * num_pairs
    return Product(tuple(terms))


@settings(deadline=None, max_examples=300)
@given(products(), st.integers(1, 5), st.integers(1, 3), st.booleans())
def test_every_byte_of_a_product_arrives_once(
    on_cpu: ctypes.CDLL, product: Product, num_warps: int, num_launches: int, is_clear: bool
) -> None:
    memory = Memory()
    after = memory.expected(product.runs, is_clear)
    terms = terms_of(product, None if is_clear else memory.src_places, memory.dst_places)
    run_on_cpu(on_cpu, terms, num_warps, num_launches)
    assert all((now == then).all() for now, then in zip(memory.dst, after, strict=True))


@pytest.mark.parametrize("num_bytes", [1, 15, 16, 17, 4095, 4096, 4097, 3 * 4096 + 16, REGION_BYTES // 4])
@pytest.mark.parametrize("shift", [0, 1, 8])
def test_long_runs_are_split_over_tiles(on_cpu: ctypes.CDLL, num_bytes: int, shift: int) -> None:
    memory = Memory()
    steps = np.arange(3) * (REGION_BYTES // 4 + 16)
    runs = Runs(np.array([place(0, shift)]), np.array([place(1, 0)]), np.array([num_bytes]))
    product = Product((Term(runs, np.stack([steps, steps[::-1]])),))
    after = memory.expected(product.runs, is_clear=False)
    run_on_cpu(on_cpu, terms_of(product, memory.src_places, memory.dst_places), num_warps=4, num_launches=1)
    assert all((now == then).all() for now, then in zip(memory.dst, after, strict=True))


@pytest.mark.parametrize("is_clear", [False, True])
@pytest.mark.parametrize("word_bytes", [1, 2, 4, 8, 16])
def test_tiles_inside_of_one_run_find_pattern_and_pair(
    on_cpu: ctypes.CDLL, word_bytes: int, is_clear: bool
) -> None:
    """Tiles of long runs look their addresses up once: each run of two, for each of three pairs of blocks."""
    memory = Memory()
    num_bytes = (2 * TILE_WORDS + 3) * word_bytes  # wherever it begins, a whole tile is in it
    src = np.array([place(1, word_bytes), place(0, num_bytes)])
    dst = np.array([place(0, num_bytes), place(0, 0)])
    steps = np.array([[2, 0, 1], [0, 4, 2]]) * num_bytes
    product = Product((Term(Runs(src, dst, np.array([num_bytes] * 2)), steps),))
    after = memory.expected(product.runs, is_clear)
    terms = terms_of(product, None if is_clear else memory.src_places, memory.dst_places)
    assert [term.word_bytes for term in terms] == [word_bytes]
    run_on_cpu(on_cpu, terms, num_warps=3, num_launches=2)
    assert all((now == then).all() for now, then in zip(memory.dst, after, strict=True))


@given(st.integers(0, 5000), st.integers(1, 1 << 40), st.integers(0, 200), st.integers(0, 1 << 36))
def test_launches_take_every_tile_once_by_blocks_that_fit(
    num_tiles: int, num_bytes: int, num_blocks: int, launch_bytes: int
) -> None:
    limits = copy_kernel.CopyLimits(num_blocks, launch_bytes)
    launches = [*limits.launches(num_tiles, num_bytes, num_multiprocessors=132)]
    assert [tile for first, stop, _ in launches for tile in range(first, stop)] == [*range(num_tiles)]
    for first, stop, blocks in launches:
        assert 1 <= blocks <= min(132, num_blocks or 132, stop - first)
        assert not launch_bytes or stop - first == 1 or (stop - first) * num_bytes <= launch_bytes * num_tiles


def test_words_are_as_long_as_both_sides_allow() -> None:
    memory = Memory()

    def word_bytes(src: int, dst: int, num_bytes: int, step: int) -> int:
        term = Term(Runs(*(np.array([n]) for n in (src, dst, num_bytes))), np.array([[step], [0]]))
        (only,) = terms_of(Product((term,)), memory.src_places, memory.dst_places)
        return only.word_bytes

    assert word_bytes(0, 0, 64, 0) == 16
    assert word_bytes(8, 0, 64, 0) == word_bytes(0, 0, 64, 8) == word_bytes(0, 0, 72, 0) == 8
    assert word_bytes(0, 3, 64, 0) == 1


def test_a_run_that_leaves_its_region_never_reaches_the_kernel() -> None:
    memory = Memory()
    runs = Runs(np.array([place(0, 0)]), np.array([place(1, 0)]), np.array([64]))
    inside = np.array([0, REGION_BYTES - 64])
    out_of_the_region = Runs(np.array([place(0, REGION_BYTES - 63)]), runs.dst, runs.num_bytes)
    with pytest.raises(TransportError, match="out-of-bounds"):
        terms_of(Product.of(out_of_the_region), memory.src_places, memory.dst_places)
    for src_steps, dst_steps in ((inside, inside + 1), (inside + 1, inside), (inside - 1, inside)):
        with pytest.raises(TransportError, match="out-of-bounds"):
            terms_of(
                Product((Term(runs, np.stack([src_steps, dst_steps])),)), memory.src_places, memory.dst_places
            )
    terms_of(Product((Term(runs, np.stack([inside, inside])),)), memory.src_places, memory.dst_places)


def test_host_and_kernel_agree_on_the_form_of_a_term() -> None:
    assert TERM.itemsize == 64
    assert "#define WORDS_PER_LANE 8" in copy_kernel.source("copy")
    assert TILE_WORDS == WARP_SIZE * 8


def test_a_launch_without_terms_looks_at_no_table(on_cpu: ctypes.CDLL) -> None:
    """The first launch only loads the kernel: its table holds what an earlier owner left there."""
    memory = Memory()
    runs = Runs(np.array([place(0, 0)]), np.array([place(1, 0)]), np.array([64]))
    terms = terms_of(Product.of(runs), memory.src_places, memory.dst_places)
    table = np.zeros(table_words(terms), np.uint64)
    write_table(terms, table, table.ctypes.data)
    numbers = (ctypes.c_uint64(n) for n in (0, 0, 1, 1))
    on_cpu.copy_runs(ctypes.c_void_p(table.ctypes.data), *numbers)
    assert (memory.dst[1] == 255).all()


LONG = 3 << 30


@pytest.mark.parametrize(("where", "num_bytes"), [(0, -1), (LONG + 1, 0), (0, 1 << 62), (place(2, 0), 0)])
def test_an_impossible_run_is_refused_beside_a_long_one(where: int, num_bytes: int) -> None:
    """Cutting long runs would drop it, or make more of it than fits into memory."""
    places = Places("ours", [Region("r", LONG, 1 << 40), Region("s", LONG, 2 << 40)])
    runs = Runs(np.array([0, where]), np.array([0, 0]), np.array([LONG, num_bytes]))
    with pytest.raises(TransportError):
        prepare(runs, places, places)
