"""Between caches that vLLM made: cells are written and read through vLLM's views, and moved over NIXL.

Every item gets a number of its own, from its layer, token, head and channel. Nothing here knows how kvferry
describes a cache.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from typing import Any

import numpy as np
import torch

from kvferry.core.manifest import merge
from kvferry.core.request import BlockTable, Request
from kvferry.core.sample import Placement, sample_request
from kvferry.core.span import Spans
from kvferry.endpoint import Destination, SourceEngine, SourceRank
from kvferry.integrations.vllm.shared.groups import group_name
from kvferry.runtime import Timing
from kvferry.transport.process import ProcessTransport
from tests.vllm.corpus.allocated import NUM_BLOCKS, STALE, Worker
from tests.vllm.corpus.families import Plane, planes

SECONDS = 60
"""No transfer takes longer, on a busy machine, or on a virtual one that its host stops for a while."""
TIMING = Timing(meet=SECONDS, read=SECONDS)


def carry(src: Sequence[Worker], dst: Sequence[Worker], num_tokens: int) -> tuple[list[str], list[int]]:
    """Move a request; what is wrong at the destination, and the runs that each of its ranks took."""
    request = sample_request(
        merge([worker.manifest for worker in src]),
        merge([worker.manifest for worker in dst]),
        num_tokens,
        placement=Placement.SCATTERED,
    )
    for worker in src:
        fill(worker, request.src, num_tokens)
    num_runs = _fetch(src, dst, request, num_tokens)
    return [wrong for worker in dst for wrong in check(worker, request)], num_runs


def _fetch(src: Sequence[Worker], dst: Sequence[Worker], request: Request, num_tokens: int) -> list[int]:
    with ExitStack() as stack:
        engine = stack.enter_context(closing(SourceEngine("src", len(src))))
        for worker in src:
            stack.enter_context(closing(SourceRank(engine.invitation, worker.manifest, ProcessTransport())))
        ticket = engine.offer("request", request.src, num_tokens)
        destinations = []
        for number, worker in enumerate(dst):
            destination = Destination(
                worker.manifest,
                number,
                ProcessTransport(),
                reader="dst#1",
                num_ranks=len(dst),
                timing=TIMING,
                accept_unknown_identity=True,
            )
            destinations.append(stack.enter_context(closing(destination)))
            destination.fetch(ticket, request.dst, request.need)
        return [_outcome(destination) for destination in destinations]


def _outcome(destination: Destination) -> int:
    deadline = time.monotonic() + SECONDS
    while not (reports := destination.poll()):
        assert time.monotonic() < deadline, destination.status()
        time.sleep(0.002)
    assert reports[0].failure is None, reports[0].failure
    return reports[0].record.num_runs


def fill(worker: Worker, tables: Mapping[str, BlockTable], num_tokens: int) -> None:
    """Give every cell of the request's tokens its number."""
    for plane, group in _planes_and_groups(worker):
        num_cells = 1 if plane.is_slot else num_tokens // plane.tokens_per_cell
        for block, first_cell in _pages(plane, tables[group]):
            at = _cells_in(worker, plane, first_cell, 0, num_cells)
            plane.cells[block][at] = _numbers(worker, plane, first_cell)[at]


def check(worker: Worker, request: Request) -> Iterator[str]:
    """Everything that is not what it should be."""
    owned = {int(block) for table in request.dst.values() for block in table.block_ids}
    for plane, group in _planes_and_groups(worker):
        num_checked = 0
        for block, first_cell in _pages(plane, request.dst[group]):
            wanted = _numbers(worker, plane, first_cell)
            for start, stop in _needed(plane, request.need[group]):
                at = _cells_in(worker, plane, first_cell, start, stop)
                num_checked += wanted[at].numel()
                if num_wrong := int((plane.cells[block][at] != wanted[at]).sum()):
                    yield f"rank {worker.cut.rank}: {plane.name}: {num_wrong} wrong in block {block}"
        if not num_checked:
            yield f"rank {worker.cut.rank}: {plane.name}: nothing was needed"
        ratio = len(plane.cells) // NUM_BLOCKS
        others = [b for b in range(len(plane.cells)) if b // ratio not in owned]
        if not (plane.cells[others].contiguous().view(torch.uint8) == STALE).all():
            yield f"rank {worker.cut.rank}: {plane.name}: blocks that are not the request's were written"


def _planes_and_groups(worker: Worker) -> Iterator[tuple[Plane, str]]:
    groups = {
        name: group_name(index)
        for index, group in enumerate(worker.config.kv_cache_groups)
        for name in group.layer_names
    }
    for plane in planes(worker):
        yield plane, groups[plane.name.rpartition("/")[0]]


def _pages(plane: Plane, table: BlockTable) -> Iterator[tuple[int, int]]:
    """Kernel blocks of a request, as vLLM numbers them, and the first cell of each."""
    ratio = len(plane.cells) // NUM_BLOCKS
    per_page = 1 if plane.is_slot else plane.cells.shape[1 + plane.axes.index("token")]
    first = 0 if plane.is_slot else table.first_token // plane.tokens_per_cell
    for index, block in enumerate(table.block_ids):
        for part in range(ratio):
            if block >= 0:
                yield int(block) * ratio + part, first + (index * ratio + part) * per_page


def _needed(plane: Plane, need: Spans) -> Iterator[tuple[int, int]]:
    """Cells that are complete once the needed tokens are there."""
    for span in need:
        if plane.is_slot:
            yield 0, 1
        else:
            yield -(-span.start // plane.tokens_per_cell), span.stop // plane.tokens_per_cell


def _tokens(worker: Worker, plane: Plane, first_cell: int) -> np.ndarray:
    """Which cell of the request each cell of a page is: context-parallel ranks take turns, as vLLM deals out
    slots (token t belongs to rank t // interleave % ranks).
    """
    cells = first_cell + np.arange(plane.cells.shape[1 + plane.axes.index("token")])
    turns, each = worker.cut.dcp, worker.cut.interleave
    if turns == 1:
        return cells
    return (cells // each * turns + worker.cut.rank % turns) * each + cells % each


def _cells_in(worker: Worker, plane: Plane, first_cell: int, start: int, stop: int) -> tuple[Any, ...]:
    """The index of a page's cells from ``start`` to ``stop``."""
    if plane.is_slot:
        return (slice(None),)
    tokens = _tokens(worker, plane, first_cell)
    inside = torch.from_numpy((tokens >= start) & (tokens < stop))
    return (*(slice(None),) * plane.axes.index("token"), inside)


def _numbers(worker: Worker, plane: Plane, first_cell: int) -> torch.Tensor:
    """The items of one page, by name."""
    digest = hashlib.blake2b(plane.name.encode(), digest_size=8).digest()
    numbers = np.array(int.from_bytes(digest, "little"), np.uint64)
    by_name = sorted(range(len(plane.axes)), key=lambda axis: plane.axes[axis])
    for axis in by_name:
        name, size = plane.axes[axis], plane.cells.shape[1 + axis]
        if name == "token":
            coordinates = _tokens(worker, plane, first_cell)
        else:
            coordinates = np.arange(size) + dict(plane.starts).get(name, 0)
        numbers = _mixed(numbers[..., None] + (coordinates + 1).astype(np.uint64))
    numbers = numbers.transpose(np.argsort(by_name))
    bits = 8 * plane.cells.element_size()
    return torch.from_numpy((numbers & np.uint64((1 << bits) - 1)).astype(f"u{bits // 8}")).view(
        plane.cells.dtype
    )


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """A step of splitmix64: neighbours become strangers."""
    with np.errstate(over="ignore"):
        numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return numbers ^ (numbers >> np.uint64(31))
