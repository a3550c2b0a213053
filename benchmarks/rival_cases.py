"""What is measured: kinds of memory, caches of one shape, requests of them, and what must have arrived."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from kvferry.cli.reads import first_wrong
from kvferry.core.identity import STATED, Identity
from kvferry.core.manifest import Manifest, Region
from kvferry.core.product import Product, Term
from kvferry.core.runs import Runs
from kvferry.core.view import Ints
from kvferry.errors import SpecError
from kvferry.models import Layer, Model, Topology, describe
from kvferry.models.model import attention
from kvferry.transport.region_memory import Bytes, RegionMemory

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


@dataclass(frozen=True)
class RankCard:
    """A source rank, as a reader's transport connects to it."""

    card: bytes
    regions: tuple[Region, ...]


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
    def max_bytes(self) -> int:
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
        if not (MIN_RUN_BYTES <= self.run_bytes <= MAX_RUN_BYTES and self.run_bytes.bit_count() == 1):
            raise SpecError(
                f"runs of {self.run_bytes} bytes: use a power of two from {MIN_RUN_BYTES} to {MAX_RUN_BYTES}"
            )

    @property
    def layer_bytes(self) -> int:
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
            raise SpecError(f"{number} runs: use a multiple of {NUM_LAYERS}, the number of layers")
    made = []
    for each in run_bytes:
        CacheShape(each, 1)
        fitting = [number for number in num_runs if number * each <= max_bytes]
        if fitting:
            # Blocks that are no neighbours take every other place of the pool.
            shape = CacheShape(each, 2 * max(fitting) // NUM_LAYERS)
            made.append([BenchCase(shape, number, order) for number in fitting for order in orders])
    if not made:
        raise SpecError(f"no case fits: the limit is {max_bytes >> 20} MiB per case")
    yield from made


GROUP = "full"
NUMBERED_CELLS = Identity.of({STATED: "cells numbered by a benchmark"})


def cache_manifest(engine: str, shape: CacheShape, memory: Region) -> Manifest:
    """An engine of one rank, whose layers lie one behind the other in one piece of memory."""
    cache = attention(shape.num_heads, shape.head_dim, "bf16")
    model = Model("bench", tuple(Layer(f"layers.{i}", (cache,)) for i in range(NUM_LAYERS)))
    manifest = describe(model, Topology(block=TOKENS_PER_BLOCK, blocks=shape.num_blocks), engine)
    (rank,) = manifest.ranks
    regions = tuple(
        replace(region, address=memory.address + i * shape.layer_bytes, device=memory.device)
        for i, region in enumerate(rank.regions)
    )
    return replace(manifest, ranks=(replace(rank, regions=regions),), identity=NUMBERED_CELLS)


# -- what must have arrived, said without kvferry's own lists ----------------------------------------


@dataclass(frozen=True, eq=False)
class Stretch:
    """Bytes in a row of the destination, and what they must be after a read. Before it, they are zeros."""

    start: int
    wanted: Bytes


def expected_pages(case: BenchCase, source: Bytes) -> list[Stretch]:
    """After a read of a case's blocks: a stretch for each layer, with the blocks between still zeros."""
    shape = case.shape
    src_ids, dst_ids = case.block_ids()
    pool = source[: shape.total_bytes].reshape(NUM_LAYERS, shape.num_blocks, shape.run_bytes)
    num_blocks = min(2 * case.num_blocks, shape.num_blocks)
    image = np.zeros((NUM_LAYERS, num_blocks, shape.run_bytes), np.uint8)
    image[:, dst_ids] = pool[:, src_ids]
    return [Stretch(layer * shape.layer_bytes, image[layer].ravel()) for layer in range(NUM_LAYERS)]


def expected_whole(case: BenchCase, source: Bytes) -> list[Stretch]:
    """After a read of as many bytes in one run, from the beginning to the beginning."""
    return [Stretch(0, source[: case.total_bytes])]


def wipe(memory: RegionMemory, stretches: Sequence[Stretch]) -> None:
    """Fill these places with zeros."""
    for one in stretches:
        memory.clear(one.start, len(one.wanted))


def first_wrong_in(memory: RegionMemory, stretches: Sequence[Stretch]) -> str:
    """The first wrong cell of these places; empty if all are right."""
    found = (first_wrong(one.wanted, memory.read(one.start, len(one.wanted)), one.start) for one in stretches)
    return next(filter(None, found), "")
