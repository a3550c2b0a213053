"""The host side of ``copy.cu``: writes a product as the kernel's table, and launches it in bounded parts.

Every address is checked against the registered memory first: one bad address would destroy the engine's CUDA
context.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.core.product import Product
from kvferry.core.runs import Runs
from kvferry.core.view import Ints
from kvferry.errors import SpecError, TransportError
from kvferry.host.this_user import cache_folder, write_private
from kvferry.transport.base import DeviceEvent
from kvferry.transport.cuda import Arguments, Cuda, compile_kernel, compiler_version
from kvferry.transport.places import Places, cut_long

WARP_SIZE, WORDS_PER_LANE = 32, 8
TILE_WORDS = WARP_SIZE * WORDS_PER_LANE
"""A warp copies a tile at a time; ``copy.cu`` has the same numbers."""
THREADS_PER_BLOCK = 512
TILES_PER_BLOCK = THREADS_PER_BLOCK // WARP_SIZE
MAX_WORD_BYTES = 16
MAX_RUN_BYTES = 1 << 30
"""Longer runs are cut: the kernel counts the words of a run in 32 bits."""

TERM = np.dtype(
    [
        ("src", "<u8"),
        ("dst", "<u8"),
        ("src_steps", "<u8"),
        ("dst_steps", "<u8"),
        ("first_tile", "<u8"),
        ("num_words", "<u8"),
        ("words_per_run", "<u4"),
        ("pattern_runs", "<u4"),
        ("word_bytes", "<u4"),
        ("unused", "<u4"),
    ]
)
"""``struct Term`` of ``copy.cu``."""
TERM_WORDS = TERM.itemsize // 8

Words = NDArray[np.uint64]


@dataclass(frozen=True, eq=False)
class Prepared:
    """Runs of one length of a pattern, as addresses: made once, used for every request."""

    addresses: Words
    """Of the sources, if any, then of the destinations."""
    num_runs: int
    num_bytes: int
    bits: int
    """The addresses and the length, combined by "or": the lowest bit is their common alignment."""
    src_room: int
    """How far all runs can be moved before one leaves its region."""
    dst_room: int
    is_clear: bool

    @classmethod
    def of(cls, sides: Sequence[tuple[Words, int]], num_bytes: int) -> Prepared:
        """``sides``: addresses and room of the sources, if any, and of the destinations."""
        addresses = np.concatenate([side for side, _ in sides])
        bits = int(np.bitwise_or.reduce(addresses)) | num_bytes
        rooms = sides[0][1], sides[-1][1]
        return cls(addresses, len(sides[0][0]), num_bytes, bits, *rooms, len(sides) == 1)


def prepare(pattern: Runs, src: Places | None, dst: Places) -> tuple[Prepared, ...]:
    """Without ``src``, for filling with zeros. Raises TransportError if a run leaves its region."""
    if src:
        src.check(pattern.src, pattern.num_bytes)
    dst.check(pattern.dst, pattern.num_bytes)
    pattern = cut_long(pattern, MAX_RUN_BYTES)
    lengths = [pattern.each_bytes] if pattern.each_bytes else sorted({*pattern.num_bytes.tolist()} - {0})
    same_length = (pattern.where(pattern.num_bytes == num_bytes) for num_bytes in lengths)
    return tuple(_prepared(runs, src, dst) for runs in same_length)


def _prepared(runs: Runs, src: Places | None, dst: Places) -> Prepared:
    sides = ([(src, runs.src)] if src else []) + [(dst, runs.dst)]
    located = [side.located(places, runs.num_bytes) for side, places in sides]
    return Prepared.of(located, int(runs.num_bytes[0]))


@dataclass(frozen=True, eq=False)
class Repeated:
    """Prepared runs for all pairs of blocks; raises TransportError if one leaves its region."""

    prepared: Prepared
    steps: Ints

    def __post_init__(self) -> None:
        rooms = self.prepared.src_room, self.prepared.dst_room
        high = self.steps.view(np.uint64).max(axis=1).tolist()  # negative steps become very large
        if high[0] > rooms[0] or high[1] > rooms[1]:
            low, high = self.steps.min(axis=1).tolist(), self.steps.max(axis=1).tolist()
            detail = f"steps from {low} to {high} bytes, with room for {list(rooms)}"
            raise TransportError("out-of-bounds", f"a run would leave its region: {detail}")

    @property
    def num_words(self) -> int:
        """Words of 64 bits of its arrays in the table."""
        return len(self.prepared.addresses) + self.steps.size

    @property
    def word_bytes(self) -> int:
        """The longest word that fits the alignment and length of every run."""
        bits = self.prepared.bits | MAX_WORD_BYTES | int(np.bitwise_or.reduce(self.steps.ravel()))
        return bits & -bits

    @property
    def num_runs(self) -> int:
        return self.prepared.num_runs * int(self.steps.shape[1])

    @property
    def num_bytes(self) -> int:
        return self.prepared.num_bytes * self.num_runs


class Work(NamedTuple):
    num_terms: int
    num_tiles: int
    num_bytes: int


def repeated(product: Product, prepared: Callable[[Runs], Sequence[Prepared]]) -> list[Repeated]:
    terms = [term for term in product.terms if len(term.pattern) and term.num_pairs]
    return [Repeated(part, term.steps) for term in terms for part in prepared(term.pattern)]


def table_words(terms: Sequence[Repeated]) -> int:
    """Words of 64 bits of the table of these terms."""
    return len(terms) * TERM_WORDS + sum(term.num_words for term in terms)


def write_table(terms: Sequence[Repeated], table: Words, address: int) -> Work:
    """Write the kernel's table, which will be at ``address``."""
    heads: list[tuple[int, ...]] = []
    at, num_tiles, num_bytes = len(terms) * TERM_WORDS, 0, 0
    for term in terms:
        prepared, word_bytes, num_pairs = term.prepared, term.word_bytes, term.steps.shape[1]
        arrays, steps = address + 8 * at, address + 8 * (at + len(prepared.addresses))
        table[at : at + len(prepared.addresses)] = prepared.addresses
        at += len(prepared.addresses)
        table[at : at + 2 * num_pairs] = term.steps.ravel()
        at += 2 * num_pairs
        src, dst = (0, arrays) if prepared.is_clear else (arrays, arrays + 8 * prepared.num_runs)
        words_per_run = prepared.num_bytes // word_bytes
        num_words = words_per_run * term.num_runs
        # Two numbers of 32 bits share a word, the first one in the low half.
        lengths = num_tiles, num_words, words_per_run | prepared.num_runs << 32, word_bytes
        heads.append((src, dst, steps, steps + 8 * num_pairs, *lengths))
        num_tiles += -(-num_words // TILE_WORDS)
        num_bytes += term.num_bytes
    table[: len(terms) * TERM_WORDS] = np.array(heads, np.uint64).ravel()
    return Work(len(terms), num_tiles, num_bytes)


class Launch(NamedTuple):
    first_tile: int
    stop_tile: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class CopyLimits:
    """Limits one copy's use of the device, which it shares with the engine (``docs/lab/performance.md``)."""

    num_blocks: int = 32
    """Blocks of 512 threads, at most one on each multiprocessor; 0: one on each."""
    launch_bytes: int = 64 << 20
    """A longer copy takes several launches; 0: always one launch."""

    def launches(self, num_tiles: int, num_bytes: int, num_multiprocessors: int) -> Iterator[Launch]:
        """Launches, one after another. The registers allow one block on each multiprocessor.

        >>> [*CopyLimits(num_blocks=2, launch_bytes=4096).launches(36, 8192, num_multiprocessors=132)]
        [Launch(first_tile=0, stop_tile=18, num_blocks=2), Launch(first_tile=18, stop_tile=36, num_blocks=2)]
        >>> [*CopyLimits(num_blocks=0, launch_bytes=0).launches(1 << 20, 1 << 32, num_multiprocessors=132)]
        [Launch(first_tile=0, stop_tile=1048576, num_blocks=132)]
        """
        most = min(self.num_blocks or num_multiprocessors, num_multiprocessors)
        share = num_tiles * self.launch_bytes // max(1, num_bytes) if self.launch_bytes else num_tiles
        step = max(1, share)
        for first in range(0, num_tiles, step):
            stop = min(first + step, num_tiles)
            yield Launch(first, stop, min(most, -(-(stop - first) // TILES_PER_BLOCK)))


NUM_ARGUMENTS = 4


class TableKernel:
    """A compiled kernel that reads a table, launched in bounded parts."""

    def __init__(
        self, cuda: Cuda, limits: CopyLimits, name: str = "copy", function: str = "copy_runs"
    ) -> None:
        self._cuda, self._limits = cuda, limits
        self._num_multiprocessors = cuda.num_multiprocessors
        self._kernel = cuda.load(compiled_kernel(name, source(name), cuda.architecture), function)

    def launch(self, work: Work, table_address: int, stream: Any, arguments: Arguments) -> None:
        """Queue work. Its table must be at the address when the stream gets there."""
        launches = self._limits.launches(work.num_tiles, work.num_bytes, self._num_multiprocessors)
        for first, stop, num_blocks in launches:
            arguments.set(table_address, work.num_terms, first, stop)
            self._cuda.launch(self._kernel, num_blocks, THREADS_PER_BLOCK, stream, arguments)


def source(name: str) -> str:
    return files(__package__).joinpath(f"{name}.cu").read_text(encoding="utf-8")


def compiled_kernel(name: str, text: str, architecture: str) -> bytes:
    """Compiled once, and kept in the user's cache folder."""
    mark = hashlib.sha256(f"{text}\0{architecture}\0{compiler_version()}".encode()).hexdigest()[:32]
    kept = f"{name}-{architecture}-{mark}.cubin"
    with suppress(OSError, SpecError):
        return (cache_folder() / kept).read_bytes()
    binary = compile_kernel(text, architecture)
    with suppress(OSError, SpecError):  # without a folder it is compiled at each start
        write_private(cache_folder(), kept, binary)
    return binary


TABLE_BYTES = 4 << 20
"""The first size of the table of one copy."""
SHORT_BYTES = 8 << 20
"""For shorter copies, the kernel reads its table from pinned memory, since an upload would take longer."""


class CopyQueue:
    """For one copy at a time: a stream and a table. The device must be current in the calling thread."""

    def __init__(self, cuda: Cuda, kernel: TableKernel) -> None:
        self._cuda, self._kernel = cuda, kernel
        self._arguments = Arguments(NUM_ARGUMENTS)
        with cuda.current(), ExitStack() as undo:
            self._stream = cuda.make_stream()
            undo.callback(cuda.free_stream, self._stream)
            self._mark = cuda.make_event()
            undo.callback(cuda.free_event, self._mark)
            self._table = KernelTable(cuda, TABLE_BYTES)
            undo.callback(self._table.free)
            # The first launch loads the kernel, which waits for all work of the device.
            kernel.launch(Work(0, 1, 1), self._table.address, self._stream, self._arguments)
            cuda.wait_stream(self._stream)
            self._undo = undo.pop_all()

    def put(self, terms: Sequence[Repeated], num_bytes: int, after: DeviceEvent | None = None) -> None:
        """Queue a copy behind an event. If it fails, some of it may have been queued."""
        num_words = table_words(terms)
        table = self._table.room(num_words)
        is_short = num_bytes <= SHORT_BYTES
        address = table.pinned if is_short else table.address
        work = write_table(terms, table.words, address)
        if not work.num_tiles:
            return
        if after is not None:
            self._cuda.wait_in_stream(self._stream, after)
        if not is_short:
            self._cuda.upload_later(address, table.pinned, 8 * num_words, self._stream)
        self._kernel.launch(work, address, self._stream, self._arguments)

    def wait(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Wait for the end of the copy, after ``meanwhile``, even if that raises."""
        wait = partial(self._cuda.wait_stream, self._stream)
        try:
            self._cuda.record(self._mark, self._stream)
            wait = partial(self._cuda.wait_event, self._mark)
            meanwhile()
        finally:
            wait()

    def close(self) -> None:
        self._undo.close()


class KernelTable:
    """Pinned memory, and device memory of the same size."""

    def __init__(self, cuda: Cuda, num_bytes: int) -> None:
        self._cuda = cuda
        self._allocate(num_bytes)

    def _allocate(self, num_bytes: int) -> None:
        pinned = self._cuda.allocate_pinned(num_bytes)
        try:
            address = self._cuda.allocate(num_bytes)
        except BaseException:
            self._cuda.free_pinned(pinned)
            raise
        self.pinned, self.address = pinned, address
        self.words: Words = self._cuda.pinned_array(self.pinned, num_bytes).view(np.uint64)

    def room(self, num_words: int) -> KernelTable:
        """Itself, with room for so many words. Nothing may be under way."""
        if num_words > len(self.words):
            pinned, address = self.pinned, self.address
            self._allocate(8 << (num_words - 1).bit_length())  # if that fails, the table does not change
            self._free(pinned, address)
        return self

    def free(self) -> None:
        self._free(self.pinned, self.address)

    def _free(self, pinned: int, address: int) -> None:
        self._cuda.free_pinned(pinned)
        self._cuda.free(address)
