"""What is measured: kinds of memory, sizes of runs, numbers of runs, and how a request's blocks lie."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from kvferry.core.product import Product, Term
from kvferry.core.runs import Runs
from kvferry.core.view import Ints
from kvferry.errors import SpecError

NUM_LAYERS = 16
"""A request has its blocks in so many layers, at the same places of each."""
TOKENS_PER_BLOCK = 32
HEAD_BYTES = 128
"""The most bytes of a head's K of one token; longer runs have more heads."""
MIN_RUN_BYTES, MAX_RUN_BYTES = 256, 1 << 20

RUN_BYTES = (256, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
NUM_RUNS = (64, 1024, 16384)
QUICK_RUN_BYTES, QUICK_NUM_RUNS = (16 << 10,), (1024,)

HOST_BYTES, DEVICE_BYTES = 64 << 20, 512 << 20
"""The most bytes of a case."""


class BlockOrder(StrEnum):
    """How the blocks of a request lie in the pools of both sides."""

    SCATTERED = "scattered"
    """No two are neighbours."""
    HALF = "half-consecutive"
    """The first half is in a row, of the others no two are neighbours."""
    CONSECUTIVE = "consecutive"
    """All are in a row, so that each layer is one run."""


@dataclass(frozen=True, slots=True)
class Medium:
    """Where the memory is, and what carries its bytes."""

    name: str
    device: str
    """'cpu' or 'cuda:N'."""
    over: str = ""
    """'cma' or 'tcp', of host memory."""

    @classmethod
    def host(cls, over: str) -> Medium:
        """Memory of the host.

        >>> Medium.host("cma").name
        'host-cma'
        """
        return cls(f"host-{over}", "cpu", over)

    @property
    def uses_nixl(self) -> bool:
        """Whether NIXL can read it: its TCP is never used."""
        return self.over != "tcp"

    @property
    def title(self) -> str:
        """For people."""
        return f"host memory over {self.over.upper()}" if self.over else f"device memory, {self.device}"

    @property
    def max_bytes(self) -> int:
        """The most bytes of a case."""
        return HOST_BYTES if self.device == "cpu" else DEVICE_BYTES


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The caches of both sides: layers of blocks, one behind the other in one piece of memory.

    >>> shape = CacheShape(run_bytes=4096, num_blocks=8)
    >>> shape.num_heads, shape.head_dim, shape.total_bytes
    (1, 32, 524288)
    """

    run_bytes: int
    """One block of one layer."""
    num_blocks: int
    """Blocks of the pool."""

    def __post_init__(self) -> None:
        if not _is_run(self.run_bytes):
            raise SpecError(
                f"runs of {self.run_bytes} bytes: say a power of two from {MIN_RUN_BYTES} to {MAX_RUN_BYTES}"
            )

    @property
    def layer_bytes(self) -> int:
        """The pool of one layer."""
        return self.num_blocks * self.run_bytes

    @property
    def total_bytes(self) -> int:
        return NUM_LAYERS * self.layer_bytes

    @property
    def head_dim(self) -> int:
        """Channels of two bytes."""
        return min(HEAD_BYTES, self._token_bytes // 2) // 2

    @property
    def num_heads(self) -> int:
        return self._token_bytes // (4 * self.head_dim)

    @property
    def _token_bytes(self) -> int:
        return self.run_bytes // TOKENS_PER_BLOCK


@dataclass(frozen=True, slots=True)
class BenchCase:
    """One request: so many runs of one length, before neighbours are merged, and where they lie."""

    shape: CacheShape
    num_pages: int
    """Blocks of a layer, counted over all layers."""
    order: BlockOrder

    @property
    def num_blocks(self) -> int:
        """Blocks of the request, each in every layer."""
        return self.num_pages // NUM_LAYERS

    @property
    def total_bytes(self) -> int:
        return self.num_pages * self.shape.run_bytes

    def block_ids(self) -> tuple[Ints, Ints]:
        """Of the source and of the destination, the same in every process.

        >>> shape = CacheShape(256, 16)
        >>> [ids.tolist() for ids in BenchCase(shape, 128, BlockOrder.HALF).block_ids()]
        [[0, 1, 2, 3, 5, 11, 7, 9], [0, 1, 2, 3, 7, 5, 11, 9]]
        """
        random = np.random.default_rng(self.num_pages)
        return self._ids(random), self._ids(random)

    def _ids(self, random: np.random.Generator) -> Ints:
        num_first = {
            BlockOrder.SCATTERED: 0,
            BlockOrder.HALF: self.num_blocks // 2,
            BlockOrder.CONSECUTIVE: self.num_blocks,
        }[self.order]
        rest = num_first + 1 + 2 * random.permutation(self.num_blocks - num_first)
        return np.concatenate([np.arange(num_first), rest])

    def product(self) -> Product:
        """What a reader is asked for, made anew: its list is made when it is first needed."""
        starts = np.arange(NUM_LAYERS) * self.shape.layer_bytes
        pattern = Runs(starts, starts, np.full(NUM_LAYERS, self.shape.run_bytes))
        steps = np.stack(self.block_ids()) * self.shape.run_bytes
        return Product((Term(pattern, steps, self.shape.run_bytes),))


def grid(
    run_bytes: Sequence[int], num_runs: Sequence[int], orders: Sequence[BlockOrder], max_bytes: int
) -> Iterator[list[BenchCase]]:
    """All cases that are not too big, those of one shape together; raises SpecError on numbers that fit none.

    >>> [len(cases) for cases in grid([256, 1 << 20], [64, 16384], list(BlockOrder), 64 << 20)]
    [6, 3]
    """
    for number in num_runs:
        if number < NUM_LAYERS or number % NUM_LAYERS:
            raise SpecError(f"{number} runs: say a multiple of {NUM_LAYERS}, the number of layers")
    made = []
    for each in run_bytes:
        CacheShape(each, 1)
        fitting = [number for number in num_runs if number * each <= max_bytes]
        if fitting:
            # Blocks that are no neighbours take every other place of the pool.
            shape = CacheShape(each, 2 * max(fitting) // NUM_LAYERS)
            made.append([BenchCase(shape, number, order) for number in fitting for order in orders])
    if not made:
        raise SpecError(f"no case fits: one may have {max_bytes >> 20} MiB at most")
    yield from made


def largest(shapes: Iterable[Sequence[BenchCase]]) -> int:
    """The bytes that both sides need for all of these."""
    return max(cases[0].shape.total_bytes for cases in shapes)


def _is_run(run_bytes: int) -> bool:
    return MIN_RUN_BYTES <= run_bytes <= MAX_RUN_BYTES and run_bytes.bit_count() == 1
