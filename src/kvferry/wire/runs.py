"""What ``select`` found, as JSON: enough to move the bytes with a loop and a memcpy."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from kvferry.core.manifest import VERSION
from kvferry.core.plan import Plan
from kvferry.core.select import Selection
from kvferry.wire.text import write_json


class RunDoc(msgspec.Struct, frozen=True):
    """Copy ``num_bytes`` from a region of a source rank to a region of the destination rank."""

    src_rank: int
    src_region: str
    src_offset: int
    dst_region: str
    dst_offset: int
    num_bytes: int


class ZeroDoc(msgspec.Struct, frozen=True):
    """Fill ``num_bytes`` of a region of the destination rank with zeros."""

    dst_region: str
    dst_offset: int
    num_bytes: int


class SelectionDoc(msgspec.Struct, frozen=True):
    """The whole document."""

    version: int
    dst_rank: int
    num_runs: int
    total_bytes: int
    """Bytes that the runs copy."""
    zeroed_bytes: int
    runs: tuple[RunDoc, ...]
    zeros: tuple[ZeroDoc, ...]


def selection_to_json(plan: Plan, selection: Selection, *, indent: int = 2) -> bytes:
    """Write the runs of one request, regions by name."""
    doc = SelectionDoc(
        version=VERSION,
        dst_rank=plan.dst_rank,
        num_runs=selection.num_runs,
        total_bytes=selection.total_bytes,
        zeroed_bytes=selection.zeros.total_bytes,
        runs=tuple(_runs(plan, selection)),
        zeros=tuple(_zeros(plan, selection)),
    )
    return write_json(doc, indent)


def _runs(plan: Plan, selection: Selection) -> Iterator[RunDoc]:
    dst_names = [region.name for region in plan.dst.rank(plan.dst_rank).regions]
    for src_rank, runs in selection.reads.items():
        src_names = [region.name for region in plan.src.rank(src_rank).regions]
        for src_region, src_offset, dst_region, dst_offset, num_bytes in runs:
            yield RunDoc(
                src_rank, src_names[src_region], src_offset, dst_names[dst_region], dst_offset, num_bytes
            )


def _zeros(plan: Plan, selection: Selection) -> Iterator[ZeroDoc]:
    dst_names = [region.name for region in plan.dst.rank(plan.dst_rank).regions]
    for _, _, dst_region, dst_offset, num_bytes in selection.zeros:
        yield ZeroDoc(dst_names[dst_region], dst_offset, num_bytes)
