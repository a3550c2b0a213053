"""One layer's cache: its contents, and their place in its tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from kvferry.core.box import TOKEN
from kvferry.core.manifest import Region
from kvferry.core.state import Kind, State
from kvferry.core.view import View
from kvferry.errors import SpecError
from kvferry.integrations.vllm.worker.layouts import CacheTensor, Contents
from kvferry.layout.order import PART, Leaf, Spot, grow, num_bytes, spots
from kvferry.layout.pages import Page, PagePart, RankShare


@dataclass(frozen=True)
class DescribedLayer:
    cache: CacheTensor
    contents: Contents
    group: str
    tp_rank: int
    aliases: tuple[str, ...] = ()
    """Layers that share this cache."""

    @property
    def name(self) -> str:
        return self.cache.name

    @property
    def page(self) -> Page:
        return self.contents.page

    @property
    def states(self) -> Iterator[State]:
        return self.page.states(self.name, self.aliases)

    def views(self, regions: Mapping[int, Region]) -> Iterator[View]:
        tensor = self.cache.tensor
        storage = tensor.untyped_storage().data_ptr()
        start = tensor.data_ptr() - storage
        for part, offset, digits in self._spots():
            yield View(
                f"{self.name}/{part.name}",
                self.group,
                regions[storage].name,
                start + offset,
                self._strides[0] * self._num_kernel_blocks,
                self._share.axes(self.page, part, digits, self.name),
            )

    # -- the tensor ------------------------------------------------------------------------------------

    @property
    def _strides(self) -> list[int]:
        tensor = self.cache.tensor
        return [stride * tensor.element_size() for stride in tensor.stride()]

    @property
    def _num_kernel_blocks(self) -> int:
        count, rest = divmod(int(self.cache.tensor.shape[0]), self.cache.num_blocks)
        if rest or not count:
            raise SpecError(
                f"{self.name}: {self.cache.tensor.shape[0]} kernel blocks do not divide into"
                f" {self.cache.num_blocks} blocks"
            )
        return count

    @property
    def _cells(self) -> int:
        """Cells per kernel block; 1 if the whole block is one cell."""
        if self.page.is_whole_block:
            return 1
        return self.cache.kernel_tokens // self.page.tokens_per_cell

    # -- inside a block --------------------------------------------------------------------------------

    def _spots(self) -> Iterator[tuple[PagePart, int, dict[str, list[tuple[int, int]]]]]:
        """Every part with its offset in a block and the (count, stride) digits of its axes."""
        parts = self.page.parts
        for plane, some in enumerate([(p,) for p in parts] if PART in self.contents.outer else [parts]):
            for spot in self._inner(some):
                yield self.page.part(spot.leaf.part), *self._with_outer(plane, spot)

    def _inner(self, parts: Sequence[PagePart]) -> Iterator[Spot]:
        """The parts inside the tensor's outer axes; they must fill that memory exactly."""
        outer = self.contents.outer
        leaves = []
        for part in parts:
            leaf = self._leaf(part)
            sizes = {axis: size for axis, size in leaf.sizes.items() if axis not in outer}
            leaves.append(replace(leaf, sizes=sizes))
        tree = grow(self.page.order or (), leaves, num_blocks=1)
        room = self._room(len(outer))
        if num_bytes(tree) != room:
            raise SpecError(
                f"{self.name}: {', '.join(part.name for part in parts)} take {num_bytes(tree)} bytes, but"
                f" {self._tensor_text()} leaves {room} inside {outer or 'the block'}"
            )
        return spots(tree)

    def _leaf(self, part: PagePart) -> Leaf:
        return self._share.leaf(self.page, part, self.name, self._cells)

    def _room(self, num_outer: int) -> int:
        """Contiguous bytes inside the block axis and the next ``num_outer`` axes of the tensor."""
        tensor = self.cache.tensor
        if self.page.is_whole_block:
            piece = tensor[: self._num_kernel_blocks]
            piece = piece.permute(sorted(range(piece.ndim), key=piece.stride, reverse=True))
        else:
            piece = tensor[(0,) * (1 + num_outer)]
        if not piece.is_contiguous():
            raise SpecError(f"{self.name}: each block of {self._tensor_text()} must be contiguous")
        return int(piece.numel()) * tensor.element_size()

    def _tensor_text(self) -> str:
        tensor = self.cache.tensor
        return f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}"

    def _with_outer(self, plane: int, spot: Spot) -> tuple[int, dict[str, list[tuple[int, int]]]]:
        """A spot with the digits of the tensor's outer axes and of its kernel blocks."""
        tensor, strides = self.cache.tensor, self._strides
        offset, digits = spot.offset, dict(spot.digits)
        part = self.page.part(spot.leaf.part)
        sizes = self._leaf(part).sizes
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
        if self.page.kind is Kind.PAGED and not self.page.is_whole_block:
            kernel_blocks = [(self._num_kernel_blocks, strides[0])] if self._num_kernel_blocks > 1 else []
            digits[TOKEN] = [*kernel_blocks, *digits[TOKEN]]
        return offset, digits

    # -- this rank's share -----------------------------------------------------------------------------

    @property
    def _share(self) -> RankShare:
        """Ranks that take turns at the tokens (context parallelism) are adjacent in tensor parallelism."""
        cache = self.cache
        turns = (self.tp_rank % cache.num_turns, cache.num_turns, cache.tokens_per_turn)
        return RankShare(self.tp_rank, cache.tp_size, *turns)


def regions_of(caches: Mapping[str, torch.Tensor]) -> dict[int, Region]:
    """One region per allocation, even if several layers share it."""
    regions: dict[int, Region] = {}
    for tensor in caches.values():
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in regions:
            name, device = f"allocation-{len(regions)}", str(tensor.device)
            regions[storage.data_ptr()] = Region(name, storage.nbytes(), storage.data_ptr(), device)
    return regions
