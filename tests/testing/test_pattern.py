"""The quick pattern agrees with the slow oracle on where every cell sits, and tells cells apart."""

import numpy as np
import pytest

from kvferry import Addressing, BlockTable, Span, pattern
from kvferry.models import Topology, describe
from kvferry.testing import oracle
from kvferry.testing.small import FAMILIES, small

TOPOLOGIES = ("tp=2,blocks=30", "tp=1,cp=2,blocks=30", "tp=3,blocks=30,layout=cross-layer")
NUM_TOKENS = 37


def engine(family, topology):
    return describe(small(family), Topology.parse(f"{topology},block=8"), "engine")


def tables_of(manifest):
    """A table per group: blocks in a strange order, none twice, one hole."""
    tables, used = {}, 0
    for group in manifest.groups:
        count = (
            1 if group.addressing is Addressing.SLOT else min(4, -(-NUM_TOKENS // group.tokens_per_block) + 1)
        )
        ids = [(7 * (used + i)) % 30 for i in range(count)]
        used += count
        if count > 2:
            ids[1] = -1
        tables[group.name] = BlockTable.of(ids)
    return tables


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "compressed"])
def test_every_cell_is_where_the_oracle_says(family, topology):
    manifest = engine(family, topology)
    tables = tables_of(manifest)
    for view in manifest.ranks[-1].views:
        state = manifest.state_by_name[view.state]
        cells = pattern.cells_of(state, [Span(3, NUM_TOKENS)])
        site = pattern.site(manifest, view, tables[view.group], cells)
        names = [name for name, _ in site.axes]
        found = {}
        for index in np.ndindex(*site.offsets.shape):
            at = [int(axis[i]) for (_, axis), i in zip(site.axes, index, strict=True)]
            found[at[0], tuple(zip(names[1:], at[1:], strict=True))] = int(site.offsets[index])
        slow = oracle.cells_of(manifest, view, tables, range(NUM_TOKENS))
        wanted = set(cells.tolist())
        expected = {(cell, at): offset for (_, cell, at), _, offset in slow if cell in wanted}
        assert found == expected


@pytest.mark.parametrize("family", ["gqa", "mla-indexer", "kda-mla"])
def test_what_was_filled_is_found_and_what_was_not_is_named(family):
    manifest = engine(family, "tp=2,blocks=30")
    rank, tables = manifest.rank(1), tables_of(manifest)
    memory = {region.name: np.zeros(region.num_bytes, np.uint8) for region in rank.regions}
    tokens = {group.name: (Span(0, NUM_TOKENS),) for group in manifest.groups}
    names = {view.state: view.state for view in rank.views}
    pattern.fill_rank(memory, manifest, 1, tables, tokens)
    good = pattern.check_rank(memory, manifest, 1, tables, tokens, names)
    assert good.num_cells > 0
    assert (good.num_wrong, good.first) == (0, None)
    view = rank.views[-1]
    cells = pattern.cells_of(manifest.state_by_name[view.state], tokens[view.group])
    site = pattern.site(manifest, view, tables[view.group], cells)
    spoilt = int(site.offsets.flat[-1])
    memory[view.region][spoilt] ^= 1
    bad = pattern.check_rank(memory, manifest, 1, tables, tokens, names)
    assert bad.num_wrong == 1
    assert bad.first is not None
    assert (bad.first.state, bad.first.cell) == (view.state, int(site.axes[0][1][-1]))
    assert bad.first.coordinates == tuple((name, int(at[-1])) for name, at in site.axes[1:])
    assert str(bad.first).startswith(f"{view.state} cell {bad.first.cell}")


def test_patterns_differ_by_state_cell_coordinate_and_salt():
    manifest = engine("gqa", "tp=1,blocks=30")
    view = manifest.rank(0).views[0]
    site = pattern.site(manifest, view, BlockTable.of([1, 2, 3, 4, 5]), np.arange(NUM_TOKENS))
    values = site.patterns("a").view(np.uint16).ravel()
    assert len(np.unique(values)) > 0.95 * len(values)
    for other in (site.patterns("b"), site.patterns("a", "salt")):
        assert (other.view(np.uint16).ravel() == values).mean() < 0.01
