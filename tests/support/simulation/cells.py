"""Memory whose every cell has a name: whoever reads a load back knows of each cell whose it is.

Cells are four bytes, so that a cell is one word and a whole load one array operation. Where a cell sits is
asked of ``kvferry.pattern``, which shares nothing with the code that lowers and selects.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from kvferry.core.identity import Identity
from kvferry.core.manifest import Manifest, Rank
from kvferry.core.request import BlockTable, need_of
from kvferry.core.runs import REGION_SHIFT
from kvferry.core.sample import table_extent
from kvferry.core.span import Span, Spans
from kvferry.core.state import Addressing, Group
from kvferry.models import Topology, describe, model_from_config
from kvferry.pattern import site

Words = NDArray[np.uint32]
Indices = NDArray[np.int64]

WEIGHTS = "ours"
"""The weights of every engine that runs the right model."""
WORD_BYTES = 4
MAX_TOKENS = 24
SRC_STALE, DST_STALE = 0x5A5A5A5A, 0xA5A5A5A5
"""What blocks hold that are nobody's: of a source, and of a destination."""

MISFIT = "misfit"
"""The shape of an engine that no other can be served by."""
_ATTENTION = {"num_attention_heads": 6, "num_key_value_heads": 6, "head_dim": 1, "torch_dtype": "float32"}
_STATE = {
    "mamba_num_heads": 6,
    "mamba_head_dim": 1,
    "ssm_state_size": 1,
    "n_groups": 6,
    "conv_kernel": 2,
    "mamba_ssm_cache_dtype": "float32",
}
SHAPES: Mapping[str, Mapping[str, object]] = {
    "one group": {"model_type": "llama", "num_hidden_layers": 1, **_ATTENTION},
    "window": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 2,
        **_ATTENTION,
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "state": {
        "model_type": "nemotron_h",
        "num_hidden_layers": 2,
        "hybrid_override_pattern": "M*",
        **_ATTENTION,
        **_STATE,
    },
    MISFIT: {"model_type": "llama", "num_hidden_layers": 1, **_ATTENTION, "head_dim": 2},
}
"""Models of one, two and two groups, small enough that every cell of every load is looked at."""


@lru_cache(maxsize=256)
def described(shape: str, topology: str) -> Manifest:
    """What an engine with that model and that set-up says of itself; its name is to be replaced."""
    return describe(model_from_config(SHAPES[shape], "simulated", "fp32"), Topology.parse(topology), "engine")


@dataclass(frozen=True)
class _GroupCells:
    group: Group
    words: Indices
    """Where each cell is: block, cell inside the block, item."""
    names: Words
    """What each cell is called: cell, item."""


@lru_cache(maxsize=512)
def _cells(shape: str, topology: str, rank: int) -> Mapping[str, _GroupCells]:
    manifest = described(shape, topology)
    one = manifest.rank(rank)
    starts = dict(zip((r.name for r in one.regions), _region_starts(one).tolist(), strict=True))
    words: dict[str, list[Indices]] = {group.name: [] for group in manifest.groups}
    names: dict[str, list[Words]] = {group.name: [] for group in manifest.groups}
    for view in one.views:
        group = manifest.group_by_name[view.group]
        is_slot = group.addressing is Addressing.SLOT
        num_cells = 1 if is_slot else group.tokens_per_block
        table = BlockTable.of(list(range(group.num_blocks)))
        everywhere = site(manifest, view, table, np.arange(group.num_blocks * num_cells))
        offsets = everywhere.offsets.reshape(group.num_blocks, num_cells, -1)
        words[group.name].append(starts[view.region] + offsets // WORD_BYTES)
        named = site(manifest, view, table, np.arange(1 if is_slot else MAX_TOKENS))
        patterns = np.ascontiguousarray(named.patterns(view.state)).view(np.uint32)
        names[group.name].append(patterns.reshape(named.offsets.shape[0], -1))
    return {
        group.name: _GroupCells(
            group, np.concatenate(words[group.name], axis=-1), np.concatenate(names[group.name], axis=-1)
        )
        for group in manifest.groups
        if words[group.name]
    }


def _region_starts(rank: Rank) -> Indices:
    lengths = [region.num_bytes // WORD_BYTES for region in rank.regions]
    return np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Content:
    """What a request's cells hold: which tokens, and which request's."""

    number: int
    num_tokens: int

    @property
    def salt(self) -> np.uint32:
        return np.uint32(self.number * 0x9E3779B1 & 0xFFFFFFFF)


@dataclass(frozen=True, slots=True)
class Placed:
    """Where a request lies in the pool of an engine."""

    tables: Mapping[str, BlockTable]
    ids: Mapping[str, Indices]
    """By group, as arrays."""


def joined(before: Placed, more: Placed) -> Placed:
    """Where a request lies whose tables have grown."""
    ids = {name: np.concatenate([before.ids[name], more.ids[name]]) for name in before.ids}
    tables = {name: BlockTable(ids[name], table.first_token) for name, table in before.tables.items()}
    return Placed(tables, ids)


def keeps_all(group: Group) -> bool:
    """Whether a group keeps every token of a request: its table only grows."""
    return group.addressing is Addressing.TABLE and not group.window


class NamedMemory:
    """The memory of one rank, and who owns each of its words."""

    def __init__(
        self, shape: str, topology: str, rank: int, stale: int, *, engine: str, weights: str = WEIGHTS
    ) -> None:
        manifest = described(shape, topology)
        described_rank = manifest.rank(rank)
        num_words = sum(region.num_bytes for region in described_rank.regions) // WORD_BYTES
        self._cells = _cells(shape, topology, rank)
        self.stale = np.uint32(stale)
        self.words: Words = np.full(num_words, stale, np.uint32)
        self.owners = np.zeros(num_words, np.int64)
        """The number of the load that each word belongs to; 0: nobody's."""
        self._starts = _region_starts(described_rank)
        base = self.words.ctypes.data
        regions = tuple(
            replace(region, address=base + int(start) * WORD_BYTES)
            for region, start in zip(described_rank.regions, self._starts, strict=True)
        )
        self.manifest = replace(
            manifest,
            engine=engine,
            ranks=(replace(described_rank, regions=regions),),
            identity=Identity.of({"weights": weights}),
        )

    def indices(self, places: Indices, num_bytes: Indices) -> Indices:
        """The words that runs touch on this side, in the order of the runs."""
        starts = self._starts[places >> REGION_SHIFT] + (places & ((1 << REGION_SHIFT) - 1)) // WORD_BYTES
        lengths = num_bytes // WORD_BYTES
        before = np.cumsum(lengths) - lengths
        return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))

    def _of(self, name: str, placed: Placed) -> tuple[_GroupCells, Indices]:
        """The cells of a group, and the words of a request's blocks in it: cell by cell."""
        cells = self._cells[name]
        words = cells.words[placed.ids[name]]
        return cells, words.reshape(-1, words.shape[-1])

    def own(self, placed: Placed, number: int) -> None:
        """Give a request's blocks to an owner; whatever they hold is stale then."""
        for name in self._cells:
            if name in placed.ids:
                words = self._of(name, placed)[1]
                self.owners[words] = number
                self.words[words] = self.stale

    def write(self, placed: Placed, content: Content, tokens: Mapping[str, Spans]) -> None:
        """Write the names of these tokens into a request's blocks."""
        for name, spans in tokens.items():
            if name in self._cells:
                cells, words = self._of(name, placed)
                first = placed.tables[name].first_token
                for span in spans:
                    self.words[words[span.start - first : span.stop - first]] = (
                        cells.names[span.start : span.stop] ^ content.salt
                    )

    def num_wrong(self, placed: Placed, content: Content, tokens: Mapping[str, Spans]) -> int:
        """How many cells of these tokens do not hold their own name."""
        num_wrong = 0
        for name, spans in tokens.items():
            if name in self._cells:
                cells, words = self._of(name, placed)
                first = placed.tables[name].first_token
                for span in spans:
                    wanted = cells.names[span.start : span.stop] ^ content.salt
                    found = self.words[words[span.start - first : span.stop - first]]
                    num_wrong += int(np.count_nonzero(found != wanted))
        return num_wrong

    def num_stale(self, placed: Placed) -> int:
        """How many cells of a request's blocks were never written."""
        return sum(
            int(np.count_nonzero(self.words[self._of(name, placed)[1]] == self.stale))
            for name in self._cells
            if name in placed.ids
        )


class FreeBlocks:
    """The blocks of an engine that are free. The last that came back goes out first: reuse comes at once."""

    def __init__(self, manifest: Manifest) -> None:
        self._groups = manifest.groups
        self._free = {group.pool: list(range(group.num_blocks)) for group in manifest.groups}
        self._num_blocks = {pool: len(ids) for pool, ids in self._free.items()}

    def take(
        self, num_tokens: int, num_now: int | None = None, before: Placed | None = None
    ) -> Placed | None:
        """Blocks for a request in every group, beyond those it had before; None if there are too few.

        ``num_now``: of groups that keep all tokens, only the blocks of so many first ones.
        """
        extents = {
            group.name: table_extent(
                group, num_tokens if num_now is None or not keeps_all(group) else num_now
            )
            for group in self._groups
        }
        wanted = {
            group.name: extents[group.name][1] - (len(before.ids[group.name]) if before else 0)
            for group in self._groups
        }
        by_pool = dict.fromkeys(self._free, 0)
        for group in self._groups:
            by_pool[group.pool] += wanted[group.name]
        if any(len(self._free[pool]) < number for pool, number in by_pool.items()):
            return None
        ids, tables = {}, {}
        for group in self._groups:
            taken = [self._free[group.pool].pop() for _ in range(wanted[group.name])]
            ids[group.name] = np.array(taken, np.int64)
            tables[group.name] = BlockTable(ids[group.name], extents[group.name][0])
        return Placed(tables, ids)

    def give_back(self, placed: Placed) -> None:
        """The blocks of a request are free again."""
        for group in self._groups:
            self._free[group.pool] += placed.ids[group.name].tolist()

    @property
    def num_taken(self) -> int:
        """Blocks that are not free."""
        return sum(self._num_blocks[pool] - len(ids) for pool, ids in self._free.items())


def wanted_tokens(
    manifest: Manifest, num_tokens: int, num_kept: int
) -> tuple[dict[str, Spans], dict[str, Spans]]:
    """What a destination needs of a request, and what it has of it already, by group."""
    need = {group.name: need_of(group, num_tokens, num_kept) for group in manifest.groups}
    kept: dict[str, Spans] = {}
    for group in manifest.groups:
        first = table_extent(group, num_tokens)[0]
        if group.addressing is not Addressing.SLOT and num_kept > first:
            kept[group.name] = (Span(first, num_kept),)
    return need, kept


def held_tokens(manifest: Manifest, num_tokens: int) -> dict[str, Spans]:
    """What a source holds of a request, by group."""
    return {
        group.name: (Span(0, 1),)
        if group.addressing is Addressing.SLOT
        else (Span(table_extent(group, num_tokens)[0], num_tokens),)
        for group in manifest.groups
    }
