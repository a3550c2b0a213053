"""One layer's cache: what it holds, from its contents; where, from its tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from kvferry.core.box import TOKEN
from kvferry.core.manifest import Region
from kvferry.core.shard import held, turn
from kvferry.core.span import Span
from kvferry.core.state import Axis, Kind, State
from kvferry.core.view import AxisMap, Digit, View
from kvferry.errors import SpecError
from kvferry.integrations.vllm.interiors import Contents, Subject
from kvferry.models.cache import Part
from kvferry.models.describe import with_turns
from kvferry.models.order import PART, Leaf, Spot, grow, num_bytes, spots


@dataclass(frozen=True)
class Layer:
    """A layer's cache on one rank."""

    subject: Subject
    contents: Contents
    group: str
    tp_rank: int
    aliases: tuple[str, ...] = ()
    """Layers that share it."""

    @property
    def name(self) -> str:
        return self.subject.name

    @property
    def states(self) -> Iterator[State]:
        """What both engines must understand."""
        contents = self.contents
        for part in contents.parts:
            yield State(
                f"{self.name}/{part.name}",
                tuple(Axis(dim.axis, dim.size) for dim in part.dims),
                item_bytes=part.bytes_per_item,
                dtype=part.dtype,
                kind=contents.kind,
                tokens_per_cell=contents.tokens_per_cell,
                tail=contents.tail,
                encoding=part.encoding,
                aliases=tuple(f"{alias}/{part.name}" for alias in self.aliases),
            )

    def views(self, regions: Mapping[int, Region]) -> Iterator[View]:
        """Where this rank's boxes of the states sit."""
        tensor = self.subject.tensor
        storage = tensor.untyped_storage().data_ptr()
        start = tensor.data_ptr() - storage
        for part, offset, digits in self._spots():
            yield View.of(
                f"{self.name}/{part.name}",
                self.group,
                regions[storage].name,
                block_stride=self._strides[0] * self._num_kernel_blocks,
                offset=start + offset,
                axes=self._axes(part, digits),
            )

    # -- the tensor ------------------------------------------------------------------------------------

    @property
    def _strides(self) -> list[int]:
        tensor = self.subject.tensor
        return [stride * tensor.element_size() for stride in tensor.stride()]

    @property
    def _num_kernel_blocks(self) -> int:
        """Kernel blocks in a block of the scheduler's."""
        count, rest = divmod(int(self.subject.tensor.shape[0]), self.subject.num_blocks)
        if rest or not count:
            raise SpecError(
                f"{self.name}: {self.subject.tensor.shape[0]} kernel blocks do not divide into"
                f" {self.subject.num_blocks} blocks"
            )
        return count

    @property
    def _cells(self) -> int:
        """Cells of a kernel block, or the one cell that is the whole block."""
        if self.contents.is_whole_block:
            return 1
        return self.subject.kernel_tokens // self.contents.tokens_per_cell

    # -- inside a block --------------------------------------------------------------------------------

    def _spots(self) -> Iterator[tuple[Part, int, dict[str, list[tuple[int, int]]]]]:
        """Every part with its offset in a block, and the (count, stride) digits of its axes."""
        by_name = {part.name: part for part in self.contents.parts}
        for plane, parts in enumerate(self._planes()):
            for spot in self._inner(parts):
                part = by_name[spot.leaf.part]
                yield part, *self._with_outer(part, plane, spot)

    def _planes(self) -> list[Sequence[Part]]:
        parts = self.contents.parts
        return [(part,) for part in parts] if PART in self.contents.outer else [parts]

    def _inner(self, parts: Sequence[Part]) -> Iterator[Spot]:
        """The parts within what the tensor's own axes leave, which must be exactly that."""
        outer = self.contents.outer
        leaves = []
        for part in parts:
            sizes = {axis: n for axis, n in self._sizes(part).items() if axis not in outer}
            leaves.append(Leaf(self.name, part.name, sizes, part.bytes_per_item))
        tree = grow(self.contents.order, leaves, num_blocks=1)
        room = self._room(len(outer))
        if num_bytes(tree) != room:
            raise SpecError(
                f"{self.name}: {', '.join(part.name for part in parts)} take {num_bytes(tree)} bytes, but"
                f" {self._tensor_text()} leaves {room} behind {outer or 'the block'}"
            )
        return spots(tree)

    def _sizes(self, part: Part) -> dict[str, int]:
        sizes = {axis: len(span) for axis, span in self._held(part).items()}
        return sizes if self.contents.kind is Kind.RECURRENT else {**sizes, TOKEN: self._cells}

    def _room(self, num_outer: int) -> int:
        """Bytes that the block and ``num_outer`` more of the tensor's axes leave: one piece of memory."""
        tensor = self.subject.tensor
        if self.contents.is_whole_block:
            piece = tensor[: self._num_kernel_blocks]
            piece = piece.permute(sorted(range(piece.ndim), key=piece.stride, reverse=True))
        else:
            piece = tensor[(0,) * (1 + num_outer)]
        if not piece.is_contiguous():
            raise SpecError(
                f"{self.name}: no order is known inside {self._tensor_text()}: it is not in one piece"
            )
        return int(piece.numel()) * tensor.element_size()

    def _tensor_text(self) -> str:
        tensor = self.subject.tensor
        return f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}"

    def _with_outer(self, part: Part, plane: int, spot: Spot) -> tuple[int, dict[str, list[tuple[int, int]]]]:
        """A spot with the digits of the tensor's own axes, and of kernel blocks."""
        tensor, strides = self.subject.tensor, self._strides
        offset, digits = spot.offset, dict(spot.digits)
        sizes = self._sizes(part)
        for axis, name in enumerate(self.contents.outer, 1):
            if name == PART:
                offset += plane * strides[axis]
                continue
            if tensor.shape[axis] != sizes.get(name, 1):
                raise SpecError(
                    f"{self.name}: {part.name} has {sizes.get(name, 1)} of axis {name} on this rank, but"
                    f" {self._tensor_text()} has {tensor.shape[axis]}"
                )
            if name in sizes:
                digits[name] = [(int(tensor.shape[axis]), strides[axis])]
        if self.contents.kind is Kind.PAGED and not self.contents.is_whole_block:
            kernel_blocks = [(self._num_kernel_blocks, strides[0])] if self._num_kernel_blocks > 1 else []
            digits[TOKEN] = [*kernel_blocks, *digits[TOKEN]]
        return offset, digits

    # -- what this rank holds --------------------------------------------------------------------------

    def _held(self, part: Part) -> dict[str, Span]:
        ranks = (self.tp_rank, self.subject.tp_size)
        return {
            dim.axis: held(dim.sharding, dim.size, *ranks, what=f"{self.name}/{part.name}: {dim.axis}")
            for dim in part.dims
        }

    def _axes(self, part: Part, digits: Mapping[str, list[tuple[int, int]]]) -> dict[str, AxisMap]:
        maps = {
            axis: AxisMap(tuple(Digit(*d) for d in digits.get(axis, ())), span.start)
            for axis, span in self._held(part).items()
        }
        if self.contents.kind is Kind.RECURRENT:
            return maps
        return {**maps, TOKEN: AxisMap(tuple(self._with_turns([Digit(*d) for d in digits[TOKEN]])))}

    def _with_turns(self, digits: list[Digit]) -> list[Digit]:
        """The token axis of a context-parallel rank: neighbours in tensor parallelism take turns."""
        subject = self.subject
        if subject.num_turns == 1:
            return digits
        each, rest = divmod(subject.tokens_per_turn, self.contents.tokens_per_cell)
        if self.contents.is_whole_block or rest:
            raise SpecError(f"{self.name}: kvferry cannot cut its cells among context-parallel ranks")
        return with_turns(digits, each, turn(self.tp_rank % subject.num_turns, subject.num_turns))


def regions_of(caches: Mapping[str, torch.Tensor]) -> dict[int, Region]:
    """One region per allocation, however many layers point into it."""
    regions: dict[int, Region] = {}
    for tensor in caches.values():
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in regions:
            kind, index = tensor.device.type, tensor.device.index or 0
            device = "cpu" if kind == "cpu" else f"{kind}:{index}"
            name = f"allocation-{len(regions)}"
            regions[storage.data_ptr()] = Region(name, storage.nbytes(), storage.data_ptr(), device)
    return regions
