"""Break the code on purpose: every break must turn a named test red.

Each mutant disables or falsifies one line of the package, in a copy of it, and runs only the tests that are
about that line. A mutant that no test notices is a missing test, and fails the run.

    python tools/mutants.py                 all of them, two at a time
    python tools/mutants.py gap hole        only these
    python tools/mutants.py --list          their names, and what each one breaks
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src"
WORKERS = 2
TIMEOUT_S = 120


@dataclass(frozen=True)
class Mutant:
    """One break: the text in the file, which occurs there once, what takes its place, and who must notice."""

    name: str
    file: str
    """Below src/kvferry."""
    old: str
    new: str
    tests: tuple[str, ...]
    """Node ids; each of them must fail (of a test with parameters: for one of them)."""


def sabotage(*cases: str) -> tuple[str, ...]:
    return tuple(f"tests/test_sabotage.py::test_sabotage_is_noticed[{case}]" for case in cases)


def requirement(file: str, *tests: str) -> tuple[str, ...]:
    return tuple(f"tests/requirements/test_{file}.py::{test}" for test in tests)


def meaning(field: str) -> tuple[str, ...]:
    stem = "tests/test_sabotage.py::test_a_difference_in_meaning_is_refused_with_both_values"
    return (f"{stem}[{field}]",)


OFF = "if False:"

MEANING = 'MEANING = ("kind", "dtype", "item_bytes", "encoding", "tokens_per_cell", "tail")'

MUTANTS: tuple[Mutant, ...] = (
    # -- prove: the tiling of pieces
    Mutant(
        "prove-meaning",
        "core/prove.py",
        "found = list(compare(plan.src, plan.dst, plan.states)) or list(_tiling(plan))",
        "found = list(_tiling(plan))",
        sabotage("plan-proved-against-another-engine"),
    ),
    Mutant(
        "prove-other-state-or-rank",
        "core/prove.py",
        "if piece.state not in plan.states or piece.dst_rank != plan.dst_rank:",
        OFF,
        sabotage("piece-of-a-state-that-is-not-needed"),
    ),
    Mutant(
        "prove-other-rank",
        "core/prove.py",
        "if piece.state not in plan.states or piece.dst_rank != plan.dst_rank:",
        "if piece.state not in plan.states:",
        sabotage("piece-for-another-destination-rank"),
    ),
    Mutant(
        "prove-state-of-another-stage",
        "core/prove.py",
        "if unknown := set(plan.states) - views.keys():",
        "if unknown := set():",
        sabotage("plan-for-a-state-that-the-rank-does-not-hold"),
    ),
    Mutant(
        "prove-axes-of-a-piece",
        "core/prove.py",
        "if [name for name, _ in box.axes] != axes or not box:",
        OFF,
        sabotage("piece-without-one-of-the-axes"),
    ),
    Mutant(
        "prove-not-needed",
        "core/prove.py",
        "if (box & need).over(period) != box.over(period):",
        OFF,
        sabotage("piece-outside-the-need"),
    ),
    Mutant(
        "prove-source-holds-less",
        "core/prove.py",
        "if has is None or (box & has) != box.over(lcm(box.period, has.period)):",
        "if has is None:",
        sabotage("piece-from-a-rank-that-does-not-hold-it"),
    ),
    Mutant(
        "prove-source-holds-nothing",
        "core/prove.py",
        "if has is None or (box & has) != box.over(lcm(box.period, has.period)):",
        "if has is not None and (box & has) != box.over(lcm(box.period, has.period)):",
        sabotage("piece-from-a-stage-that-lacks-the-layer"),
    ),
    Mutant(
        "prove-written-twice",
        "core/prove.py",
        "if both := a & b:",
        "if both := None:",
        sabotage("piece-doubled", "one-piece-doubled-another-lost"),
    ),
    Mutant(
        "prove-gap",
        "core/prove.py",
        "if covered < wanted:",
        OFF,
        (
            *sabotage("piece-lost", "piece-too-small", "state-dropped-from-the-pieces"),
            *requirement("beyond", "test_only_what_was_proved_can_be_lowered"),
        ),
    ),
    Mutant(
        "prove-gap-in-turns",
        "core/prove.py",
        "    period = lcm(need.period, *(box.period for _, box in parts))\n",
        "    period = need.period\n",
        sabotage("every-second-token-lost"),
    ),
    Mutant(
        "prove-by-assertion",
        "core/prove.py",
        "    if found:\n        raise Refused(*found)\n",
        "    assert not found, found\n",
        ("tests/test_sabotage.py::test_python_without_assertions_changes_nothing",),
    ),
    # -- prove: the soundness of views
    Mutant(
        "prove-destination-views",
        "core/prove.py",
        'found += _soundness(plan.dst, plan.dst.rank(plan.dst_rank), "destination")',
        "found += ()",
        sabotage("offset-past-the-region", "strides-make-cells-collide"),
    ),
    Mutant(
        "prove-source-views",
        "core/prove.py",
        'found += _soundness(plan.src, plan.src.rank(src_rank), "source")',
        "found += ()",
        (
            *sabotage("source-region-one-byte-short", "strides-make-cells-collide-at-the-source"),
            *requirement("r000", "test_a_length_wrongly_scaled_by_tp_is_refused"),
        ),
    ),
    Mutant(
        "prove-bounds",
        "core/prove.py",
        "if comb.stop > size:",
        "if comb.stop > size + 1:",
        (
            *sabotage("region-one-byte-short"),
            *requirement("r001", "test_a_tensor_registered_to_its_shorter_view_is_refused"),
        ),
    ),
    Mutant(
        "prove-one-cell-per-byte",
        "core/prove.py",
        "if comb.folds():",
        OFF,
        (
            *sabotage("block-stride-too-short", "replicated-page-scaled-by-tp", "sharded-box-not-scaled"),
            *requirement(
                "r001",
                "test_the_kda_stride_for_mla_cells_is_refused",
                "test_state_and_attention_are_validated_each_by_itself",
            ),
        ),
    ),
    Mutant(
        "prove-tangled",
        "core/prove.py",
        "yield Finding(Code.CELLS_COLLIDE, state=view.state, field=where, note=_TANGLED)",
        "pass",
        sabotage("strides-too-tangled-for-a-proof"),
    ),
    Mutant(
        "prove-overlap-in-a-group",
        "core/prove.py",
        'yield _overlap(where, members[i][0], members[j][0], "one group")',
        "pass",
        sabotage("two-views-of-one-group-on-the-same-bytes"),
    ),
    Mutant(
        "prove-overlap-of-two-pools",
        "core/prove.py",
        "if groups[0].pool != groups[1].pool:",
        OFF,
        (
            *sabotage("two-groups-of-two-pools-on-one-region"),
            *requirement("r001", "test_views_of_one_tensor_must_share_a_pool"),
        ),
    ),
    Mutant(
        "prove-overlap-in-a-pool",
        "core/prove.py",
        "elif not _pages_agree(manifest, [view for view, _ in (*a, *b)]):",
        "elif False:",
        sabotage("wrong-block-stride-in-one-pool", "page-shifted-into-the-next-block-of-its-pool"),
    ),
    Mutant(
        "prove-two-strides-in-a-pool",
        "core/prove.py",
        "if view_a.block_stride != view_b.block_stride:",
        OFF,
        sabotage("mla-with-its-own-unpadded-stride"),
    ),
    Mutant(
        "prove-page-straddles",
        "core/prove.py",
        "            <= (view.offset // stride + 1) * stride\n",
        "            <= (view.offset // stride + 2) * stride\n",
        sabotage("page-shifted-into-the-next-block-of-its-pool"),
    ),
    # -- overlap: the arithmetic below it
    Mutant(
        "overlap-stride-shorter-than-below",
        "core/overlap.py",
        "if stride < reach:",
        "if stride < 0:",
        sabotage("strides-make-cells-collide"),
    ),
    Mutant(
        "overlap-reach-of-what-is-below",
        "core/overlap.py",
        "            reach += stride * (count - 1)\n",
        "            reach = stride\n",
        sabotage("strides-collide-only-far-apart"),
    ),
    Mutant(
        "overlap-by-a-single-byte",
        "core/overlap.py",
        "return self._low <= distance <= self._high",
        "return distance == 0",
        sabotage("two-views-that-share-a-single-byte"),
    ),
    Mutant(
        "overlap-cells-collide",
        "core/overlap.py",
        "if self.near(0, ((stride, 1, count - 1), *rest)):",
        OFF,
        sabotage("strides-make-cells-collide"),
    ),
    Mutant(
        "overlap-too-much-work",
        "core/overlap.py",
        "            raise Tangled\n",
        "            return False\n",
        sabotage("strides-too-tangled-for-a-proof"),
    ),
    Mutant(
        "overlap-last-block",
        "core/overlap.py",
        "steps = (*view.steps(), (num_blocks, view.block_stride))",
        "steps = view.steps()",
        sabotage("block-stride-too-short", "region-one-byte-short"),
    ),
    Mutant(
        "overlap-other-blocks-of-a-pool",
        "core/overlap.py",
        "sides = [(stride, 1 - num_blocks_a, -1), (stride, 1, num_blocks_b - 1)]",
        "sides = [(stride, 1, num_blocks_b - 1)]",
        sabotage("page-shifted-into-the-next-block-of-its-pool"),
    ),
    Mutant(
        "overlap-other-blocks-of-a-pool-too",
        "core/overlap.py",
        "sides = [(stride, 1 - num_blocks_a, -1), (stride, 1, num_blocks_b - 1)]",
        "sides = [(stride, 1 - num_blocks_a, -1)]",
        sabotage("page-shifted-the-other-way-round"),
    ),
    # -- manifest: descriptions that contradict themselves
    Mutant(
        "manifest-one-group-per-state",
        "core/manifest.py",
        "if homes.setdefault(view.state, view.group) != view.group:",
        OFF,
        sabotage("one-state-in-two-groups"),
    ),
    Mutant(
        "manifest-names-once",
        "core/manifest.py",
        "        if name in seen:\n",
        "        if False:\n",
        sabotage("alias-that-is-another-states-name"),
    ),
    Mutant(
        "manifest-names-resolve",
        "core/manifest.py",
        "if name not in known:",
        OFF,
        (
            *sabotage("view-in-an-unknown-group", "view-in-an-unknown-region"),
            *requirement("r003", "test_registering_and_describing_are_two_duties"),
        ),
    ),
    Mutant(
        "manifest-regions-apart",
        "core/manifest.py",
        "if device == next_device and address + size > next_address:",
        OFF,
        sabotage("regions-that-overlap-in-memory"),
    ),
    Mutant(
        "manifest-slots-for-states",
        "core/manifest.py",
        "if recurrent != (group.addressing is Addressing.SLOT):",
        OFF,
        sabotage("recurrent-state-with-a-block-table"),
    ),
    Mutant(
        "manifest-axes",
        "core/manifest.py",
        "if set(maps) != set(expected):",
        OFF,
        sabotage("view-without-one-of-the-axes"),
    ),
    Mutant(
        "manifest-axis-reach",
        "core/manifest.py",
        "if name != TOKEN and maps[name].start + maps[name].size > size:",
        OFF,
        sabotage("view-of-heads-that-are-not-there"),
    ),
    Mutant(
        "manifest-tokens-per-block",
        "core/manifest.py",
        "if rest or cells != maps[TOKEN].size or maps[TOKEN].start:",
        OFF,
        sabotage("view-of-blocks-of-another-size"),
    ),
    Mutant(
        "manifest-unknown-rank",
        "core/manifest.py",
        "if rank not in self._ranks:",
        OFF,
        sabotage("destination-rank-unknown", "source-rank-of-a-piece-unknown"),
    ),
    Mutant(
        "manifest-aliases",
        "core/manifest.py",
        "        names = (state.name, *state.aliases)\n",
        "        names = (state.name,)\n",
        requirement("r003", "test_a_shared_cache_is_found_by_any_of_its_names"),
    ),
    # -- compare: two meanings under one name
    Mutant(
        "compare-version",
        "core/manifest.py",
        "if src.version != dst.version:",
        OFF,
        (
            *sabotage("schema-version-differs"),
            *requirement("r002", "test_another_protocol_version_is_refused"),
        ),
    ),
    Mutant(
        "compare-fingerprint",
        "core/manifest.py",
        "if src.fingerprint and dst.fingerprint and src.fingerprint != dst.fingerprint:",
        OFF,
        sabotage("fingerprint-differs"),
    ),
    Mutant(
        "compare-missing-state",
        "core/manifest.py",
        'yield Finding(Code.MISSING_STATE, state=ours.name, note=f"not in engine {src.engine}")',
        "pass",
        sabotage("state-missing-on-the-source"),
    ),
    Mutant(
        "compare-one-state-is-several",
        "core/manifest.py",
        "if len(set(known)) > 1:",
        OFF,
        sabotage("one-state-here-is-several-there"),
    ),
    Mutant(
        "compare-axes",
        "core/manifest.py",
        "for name in sorted(sizes[0].keys() | sizes[1].keys()):",
        "for name in ():",
        (*meaning("axes"), *sabotage("number-of-heads-differs")),
    ),
    *(
        Mutant(
            f"compare-{field}", "core/manifest.py", MEANING, MEANING.replace(f'"{field}"', '"kind"'), tests
        )
        for field, tests in {
            "dtype": meaning("dtype"),
            "item_bytes": meaning("item_bytes"),
            "encoding": meaning("encoding"),
            "tokens_per_cell": meaning("tokens_per_cell"),
            "tail": meaning("tail"),
        }.items()
    ),
    Mutant(
        "compare-all-of-it",
        "core/manifest.py",
        "        if a != b:\n",
        "        if a != b and name == 'dtype':\n",
        requirement("beyond", "test_every_difference_is_named_not_only_the_first"),
    ),
    # -- plan: who sends what
    Mutant(
        "plan-compares",
        "core/plan.py",
        "if found := compare(src, dst, states):",
        "if found := ():",
        requirement("r002", "test_another_protocol_version_is_refused"),
    ),
    Mutant(
        "plan-narrowed-to-what-is-not-held",
        "core/plan.py",
        "if unknown := asked - held.keys():",
        "if unknown := set():",
        sabotage("narrowed-to-a-state-that-is-not-held"),
    ),
    Mutant(
        "plan-not-held",
        "core/plan.py",
        "        if not ranks:\n",
        "        if False:\n",
        sabotage("replicated-box-scaled-by-tp", "state-that-no-source-rank-holds"),
    ),
    Mutant(
        "plan-holders-take-turns",
        "core/plan.py",
        "yield name, atom, atom.holders[share]",
        "yield name, atom, atom.holders[0]",
        requirement("r000", "test_groups_replicate_differently"),
    ),
    Mutant(
        "plan-cuts-at-holders-edges",
        "core/plan.py",
        "    edges |= {e for _, axes in held for span in axes[name] for e in (span.start, span.stop)}\n",
        "",
        requirement(
            "r000", "test_heads_are_cut_and_latents_are_whole_in_one_group", "test_kimi_k25_with_its_draft"
        ),
    ),
    Mutant(
        "plan-joins-only-one-source",
        "core/plan.py",
        "if other_rank == src_rank and other.period == box.period and len(differing) == 1:",
        "if other.period == box.period and len(differing) == 1:",
        requirement("r002", "test_the_plan_says_which_part_each_source_fills"),
    ),
    Mutant(
        "plan-finds-aliases",
        "core/plan.py",
        "        source = self._src.find(state)\n",
        "        source = self._src._primary.get(state.name)\n",
        requirement("r003", "test_a_shared_cache_is_found_by_any_of_its_names"),
    ),
    Mutant(
        "plan-asks-rank-numbers",
        "core/plan.py",
        "            boxes[view.state].append((rank.rank, view.box()))\n",
        "            boxes[view.state].append((manifest.ranks.index(rank), view.box()))\n",
        requirement("r004", "test_who_holds_what_is_asked_of_boxes_never_of_rank_numbers"),
    ),
    Mutant(
        "plan-minds-names",
        "core/plan.py",
        "        for name in self._order:\n",
        "        for name in sorted(self._order):\n",
        requirement("r000", "test_no_flag_and_no_name_decides"),
    ),
    # -- shard, box, view: what a rank holds
    Mutant(
        "shard-whole",
        "core/shard.py",
        "if sharding is Sharding.WHOLE:",
        OFF,
        (
            *requirement(
                "r000",
                "test_heads_are_cut_and_latents_are_whole_in_one_group",
                "test_each_layer_is_classified_from_its_own_description",
                "test_the_indexer_is_whole_and_of_its_own_size",
            ),
            *requirement("r001", "test_state_scales_with_tp_and_mla_does_not"),
        ),
    ),
    Mutant(
        "shard-even",
        "core/shard.py",
        "if sharding is Sharding.EVEN and size % num_ranks:",
        OFF,
        requirement("r002", "test_state_that_does_not_divide_is_refused"),
    ),
    Mutant(
        "shard-more-ranks-than-heads",
        "core/shard.py",
        "-(-(rank + 1) * size // num_ranks)",
        "(rank + 1) * size // num_ranks",
        requirement("r002", "test_a_head_that_straddles_two_ranks_is_on_both"),
    ),
    Mutant(
        "box-turns",
        "core/box.py",
        "if parts > MAX_TURNS:",
        OFF,
        sabotage("turns-that-never-seem-to-repeat"),
    ),
    Mutant(
        "box-intersection",
        "core/box.py",
        "(name, intersect(a, b)) for (name, a), (_, b) in pairs",
        "(name, a) for (name, a), (_, b) in pairs",
        sabotage("piece-from-a-rank-that-does-not-hold-it"),
    ),
    Mutant(
        "view-turns",
        "core/view.py",
        "    if axis.period == 1:\n        return EVERY\n",
        "    if True:\n        return EVERY\n",
        requirement("beyond", "test_pipeline_context_and_tensor_parallel_at_once"),
    ),
    # -- lower: from pieces to bytes
    Mutant(
        "lower-budget",
        "core/lower.py",
        "if runs > budget:",
        OFF,
        (
            *sabotage("more-runs-than-the-budget"),
            *requirement("beyond", "test_the_number_of_runs_is_known_and_bounded_before_running"),
        ),
    ),
    Mutant(
        "lower-cells-of-two-sizes",
        "core/lower.py",
        "key = (src_view.group, dst_view.group, state.kind, state.tokens_per_cell, state.tail)",
        "key = (src_view.group, dst_view.group, state.kind, 4, state.tail)",
        requirement("r002", "test_mixed_kinds_in_one_group_are_exact"),
    ),
    Mutant(
        "lower-state-apart-from-attention",
        "core/lower.py",
        "key = (src_view.group, dst_view.group, state.kind, state.tokens_per_cell, state.tail)",
        "key = (src_view.group, dst_view.group, Kind.RECURRENT, state.tokens_per_cell, state.tail)",
        requirement("r002", "test_state_is_exact_at_unequal_tp"),
    ),
    Mutant(
        "lower-own-strides",
        "core/lower.py",
        "key = (src_rank, src_view.block_stride, dst_view.block_stride)",
        "key = (src_rank, dst_view.block_stride, dst_view.block_stride)",
        (
            *requirement("r003", "test_tensors_of_unequal_size_are_legal"),
            *requirement("r001", "test_kda_and_mla_are_exact_at_unequal_tp"),
        ),
    ),
    Mutant(
        "lower-blanks",
        "core/lower.py",
        "            _blanks(plan, pieces, dst_period),\n",
        "            (),\n",
        requirement("beyond", "test_what_a_request_will_move_is_counted"),
    ),
    Mutant(
        "lower-phase",
        "core/lower.py",
        "residues = (cells + shape.phase) % period",
        "residues = cells % period",
        requirement("beyond", "test_pipeline_context_and_tensor_parallel_at_once"),
    ),
    Mutant(
        "lower-destination-turns",
        "core/lower.py",
        "dst_period = lcm(*(dst_view.box().period for _, dst_view in views))",
        "dst_period = 1",
        sabotage("table-that-starts-out-of-turn"),
    ),
    Mutant(
        "lower-head-offset",
        "core/lower.py",
        "return _held(src.offsets()[at - src.start]), _held(dst.offsets()[at - dst.start])",
        "return _held(src.offsets()[at - at[0]]), _held(dst.offsets()[at - dst.start])",
        (
            *requirement("r000", "test_a_mixed_group_is_exact_at_unequal_tp"),
            *requirement("r002", "test_splits_that_do_not_divide_are_exact"),
        ),
    ),
    Mutant(
        "lower-keeps-a-request",
        "core/lower.py",
        "runs = self._patterns.get(shape)",
        "runs = next(iter(self._patterns.values()), None)",
        requirement("r004", "test_the_life_cycle_is_three_verbs"),
    ),
    # -- runs: merging
    Mutant(
        "runs-merge",
        "core/runs.py",
        "    if starts.all():\n",
        "    if True:\n",
        requirement("beyond", "test_neighbouring_blocks_are_one_run"),
    ),
    Mutant(
        "runs-merge-one-side",
        "core/runs.py",
        "    starts[1:] |= src[:-1] + num_bytes[:-1] != src[1:]\n",
        "",
        requirement("beyond", "test_any_ratio_and_any_layout_at_once"),
    ),
    # -- select: requests that do not fit
    Mutant(
        "select-source-tables",
        "core/select.py",
        '    _check_tables(route.plan.src, request.src, "src")\n',
        "",
        sabotage("source-block-out-of-range", "source-block-twice", "table-of-an-unknown-group"),
    ),
    Mutant(
        "select-destination-tables",
        "core/select.py",
        '    _check_tables(route.plan.dst, request.dst, "dst")\n',
        "",
        sabotage("destination-block-out-of-range", "destination-block-twice"),
    ),
    Mutant(
        "select-unknown-group",
        "core/select.py",
        "        if group is None:\n",
        "        if False:\n",
        sabotage("table-of-an-unknown-group"),
    ),
    Mutant(
        "select-block-range",
        "core/select.py",
        "int(ids.max()) >= group.num_blocks:",
        "int(ids.max()) > group.num_blocks:",
        sabotage("source-block-out-of-range", "destination-block-out-of-range"),
    ),
    Mutant(
        "select-block-twice",
        "core/select.py",
        "if (ordered[1:] == ordered[:-1]).any():",
        OFF,
        sabotage("destination-block-twice"),
    ),
    Mutant(
        "select-block-of-another-group",
        "core/select.py",
        "pools[group.pool].append(ids)",
        "pools[name].append(ids)",
        sabotage("block-of-another-group-in-the-same-pool"),
    ),
    Mutant(
        "select-need-missing",
        "core/select.py",
        "if name not in request.need:",
        OFF,
        sabotage("group-whose-need-is-not-stated"),
    ),
    Mutant(
        "select-need-kept",
        "core/select.py",
        "    if both := intersect(need, kept):\n        raise",
        "    if False:\n        raise",
        sabotage("tokens-both-needed-and-kept"),
    ),
    Mutant(
        "select-begun-cells",
        "core/select.py",
        "up = size - 1 if tail is Tail.PARTIAL else 0",
        "up = 0",
        requirement("beyond", "test_opaque_blocks_move_as_they_are_or_not_at_all"),
    ),
    Mutant(
        "select-incomplete-cells",
        "core/select.py",
        "up = size - 1 if tail is Tail.PARTIAL else 0",
        "up = size - 1",
        requirement("r002", "test_mixed_kinds_in_one_group_are_exact"),
    ),
    Mutant(
        "select-table-missing",
        "core/select.py",
        "        if table is None:\n",
        "        if False:\n",
        sabotage("source-table-missing"),
    ),
    Mutant(
        "select-start-inside-a-cell",
        "core/select.py",
        "        if rest:\n",
        "        if False:\n",
        sabotage("table-that-starts-inside-a-cell"),
    ),
    Mutant(
        "select-start-out-of-turn",
        "core/select.py",
        "        if self.first % period:\n",
        "        if False:\n",
        sabotage("table-that-starts-out-of-turn"),
    ),
    Mutant(
        "select-two-slots",
        "core/select.py",
        "if self.group.addressing is not Addressing.TABLE and len(self.block_ids) != 1:",
        OFF,
        sabotage("two-slots-for-one-state"),
    ),
    Mutant(
        "select-ring-short",
        "core/select.py",
        "if need[-1].stop - need[0].start > self.num_cells:",
        OFF,
        sabotage("ring-shorter-than-the-need"),
    ),
    Mutant(
        "select-table-short",
        "core/select.py",
        "if missing := subtract(need, (has,)):",
        "if missing := ():",
        (
            *sabotage("source-table-short", "source-table-starts-too-late"),
            *requirement("r002", "test_a_short_source_list_fails_alone"),
        ),
    ),
    Mutant(
        "select-hole",
        "core/select.py",
        "        if (ids == HOLE).any():\n",
        "        if False:\n",
        sabotage("hole-in-the-source-table", "hole-in-the-destination-table"),
    ),
    # -- select: the right bytes
    Mutant(
        "select-kept-stays",
        "core/select.py",
        "free = subtract(dst.touched(need), (*need, *dst.kept(kept, need)))",
        "free = subtract(dst.touched(need), need)",
        requirement("r002", "test_a_prefix_hit_reads_the_missing_tail"),
    ),
    Mutant(
        "select-zeros",
        "core/select.py",
        "    zeros += (_spread(bundle, *segment) for bundle in lane.blanks for segment in blank)\n",
        "",
        requirement("beyond", "test_any_ratio_and_any_layout_at_once"),
    ),
    Mutant(
        "select-both-sides-edges",
        "core/select.py",
        "edges, other = src.edges(span), dst.edges(span)",
        "edges, other = src.edges(span), src.edges(span)",
        (
            *requirement("r001", "test_remote_blocks_may_be_larger_or_smaller"),
            *requirement("r002", "test_groups_of_unequal_block_sizes_are_exact"),
        ),
    ),
    Mutant(
        "select-first-token",
        "core/select.py",
        "self.first, rest = divmod(table.first_token, tokens_per_cell)",
        "self.first, rest = divmod(0, tokens_per_cell)",
        requirement("r003", "test_each_layer_says_whose_block_ids_it_uses"),
    ),
    Mutant(
        "select-own-table",
        "core/select.py",
        "table = tables.get(group.name)",
        "table = tables.get(next(iter(tables)))",
        requirement("r003", "test_each_layer_says_whose_block_ids_it_uses"),
    ),
    Mutant(
        "select-array-arithmetic",
        "core/select.py",
        "    pattern = bundle.pattern(shape)\n",
        "    pattern = [bundle.pattern(shape) for _ in src_ids][0]\n",
        requirement("r002", "test_the_hot_path_is_array_arithmetic"),
    ),
    Mutant(
        "select-neighbours-on-both-sides",
        "core/select.py",
        "(np.diff(src_ids) != 1) | (np.diff(dst_ids) != 1)",
        "(np.diff(dst_ids) != 1)",
        requirement("beyond", "test_blocks_are_merged_only_where_both_sides_touch"),
    ),
    Mutant(
        "select-whole-blocks",
        "core/select.py",
        "if whole.all():",
        "if True:",
        requirement("beyond", "test_blocks_are_merged_only_where_both_sides_touch"),
    ),
    Mutant(
        "select-counts-runs",
        "core/select.py",
        "return sum(len(runs) for runs in self.reads.values())",
        "return len(self.reads)",
        requirement("beyond", "test_what_a_request_will_move_is_counted"),
    ),
    # -- request: what is needed
    Mutant(
        "need-of-a-window",
        "core/request.py",
        "oldest = max(0, num_tokens - group.window) if group.window else 0",
        "oldest = 0",
        requirement("r002", "test_a_prefix_hit_and_a_window_are_cut_per_group"),
    ),
    Mutant(
        "need-without-the-kept",
        "core/request.py",
        "recent = Span(max(oldest, num_kept), max(oldest, num_kept, num_tokens))",
        "recent = Span(oldest, num_tokens)",
        requirement("r002", "test_a_prefix_hit_reads_the_missing_tail"),
    ),
    Mutant(
        "need-of-a-state-is-never-trimmed",
        "core/request.py",
        "return (Span(0, 1),) if num_tokens else ()",
        "return (Span(0, 1),) if num_tokens and not num_kept else ()",
        requirement("r002", "test_a_prefix_hit_reads_the_missing_tail"),
    ),
    # -- models: descriptions made offline
    Mutant(
        "describe-groups-share-regions",
        "models/describe.py",
        "return most if most < 1.5 * fewest else fewest",
        "return most",
        (
            *requirement("r003", "test_fewer_tensors_than_layers"),
            *requirement("r001", "test_kimi_linear_is_seven_tensors"),
        ),
    ),
    Mutant(
        "describe-widest-page",
        "models/describe.py",
        "widest = max(self._page_bytes(pages, tp_rank) for _, pages in bundles)",
        "widest = min(self._page_bytes(pages, tp_rank) for _, pages in bundles)",
        requirement("r001", "test_kda_and_mla_are_exact_at_unequal_tp", "test_kimi_linear_is_seven_tensors"),
    ),
    Mutant(
        "describe-region-extent",
        "models/describe.py",
        "sizes[region] = max(sizes[region], num_bytes(tree))",
        "sizes[region] = max(sizes[region], num_bytes(tree) - 1)",
        requirement("r001", "test_a_tensor_is_as_long_as_its_longest_view"),
    ),
    Mutant(
        "describe-one-region-per-layer",
        "models/describe.py",
        'bundles.append((f"{POOL}.{i}" if self.is_shared else page.name, [page]))',
        'bundles.append((f"{POOL}.{group}.{i}" if self.is_shared else page.name, [page]))',
        requirement("r003", "test_memory_is_registered_once_per_allocation"),
    ),
    Mutant(
        "describe-kernel-of-another-engine",
        "models/describe.py",
        "return in_kernel_blocks(order, self._cells(page.cache, kernel))",
        "return in_kernel_blocks(order, self._cells(page.cache, 2 * kernel))",
        requirement("r002", "test_kernel_blocks_per_block_differ_between_peers"),
    ),
    Mutant(
        "describe-aliases",
        "models/describe.py",
        "aliases[layer.shares].append(layer.name)",
        "pass",
        requirement("r003", "test_layers_that_share_a_cache_are_one_state"),
    ),
    Mutant(
        "describe-block-per-group",
        "models/describe.py",
        "chosen = topology.block_of.get(bucket, cache.tokens_per_block or topology.block)",
        "chosen = cache.tokens_per_block or topology.block",
        requirement("r002", "test_block_size_is_per_group"),
    ),
    Mutant(
        "describe-turns-divide",
        "models/describe.py",
        '            raise SpecError(f"a turn of {each} cells does not divide a block")\n',
        "            break\n",
        requirement("r001", "test_a_division_that_does_not_come_out_even_is_an_error"),
    ),
    Mutant(
        "order-tiles-divide",
        "models/order.py",
        "        if size % tiled:\n",
        "        if False:\n",
        (
            *requirement("r002", "test_kernel_blocks_that_do_not_divide_are_refused"),
            *requirement("r001", "test_a_division_that_does_not_come_out_even_is_an_error"),
        ),
    ),
    Mutant(
        "order-kernel-blocks",
        "models/order.py",
        "return (*order[:at], TOKEN, *_capped(order[at:], num_tokens))",
        "return order",
        requirement("r002", "test_kernel_blocks_per_block_differ_between_peers"),
    ),
    Mutant(
        "order-sizes",
        "models/order.py",
        "            return node.count * node.pitch\n",
        "            return node.count * node.pitch + 2 * (node.axis == 'head')\n",
        requirement("r003", "test_sizes_come_from_the_description"),
    ),
    Mutant(
        "families-unknown",
        "models/families.py",
        "    if kind not in FAMILIES:\n",
        "    if False:\n",
        requirement("r002", "test_an_unknown_kind_is_a_clear_error"),
    ),
    Mutant(
        "families-deepseek-v4-row",
        "models/families.py",
        'row = (dim + config.integer("qk_rope_head_dim"), 8, "fp8 rows, ue8m0 scales")',
        'row = (dim + config.integer("qk_rope_head_dim"), 4, "fp8 rows, ue8m0 scales")',
        requirement("r002", "test_a_deepseek_v4_deployment_is_planned"),
    ),
    Mutant(
        "cache-group-of-its-own",
        "models/cache.py",
        'Dim("group", groups, SPREAD)',
        'Dim("group", groups, EVEN)',
        requirement("r002", "test_state_is_sharded_by_its_own_description"),
    ),
    Mutant(
        "cache-state-cut-by-heads",
        "models/cache.py",
        'ssm = Part("ssm", (Dim("head", v_heads, EVEN)',
        'ssm = Part("ssm", (Dim("head", v_heads)',
        requirement("r001", "test_state_scales_with_tp_and_mla_does_not"),
    ),
    Mutant(
        "cache-indexer-scales",
        "models/families.py",
        "4 * -(-width // 128)",
        "2 * -(-width // 128)",
        requirement("r000", "test_the_indexer_is_whole_and_of_its_own_size"),
    ),
    # -- explain
    Mutant(
        "explain-names-layers-together",
        "core/explain.py",
        'f"dst {plan.dst_rank} <- src {src_rank}  {name_together(names)}  {box}"',
        'f"dst {plan.dst_rank} <- src {src_rank}  {names[0]}  {box}"',
        requirement("beyond", "test_a_verdict_and_a_picture_without_an_engine"),
    ),
)

GUARD = """
import os
import pytest


def pytest_sessionstart(session):
    try:
        import kvferry
    except Exception as error:
        pytest.exit(f"the mutant does not import: {error!r}", returncode=9)
    if not kvferry.__file__.startswith(os.environ["KVFERRY_MUTANT"]):
        pytest.exit(f"another kvferry was imported: {kvferry.__file__}", returncode=9)
"""
"""A pytest plugin that makes sure of whose code is tested."""


class Bench:
    """A copy of the package in which one line at a time is broken."""

    def __init__(self, folder: Path) -> None:
        self.package = folder / "src" / "kvferry"
        shutil.copytree(SRC / "kvferry", self.package, ignore=shutil.ignore_patterns("__pycache__"))
        (folder / "src" / "mutant_guard.py").write_text(GUARD)

    def run(self, tests: Iterable[str]) -> subprocess.CompletedProcess[str]:
        """Run tests against the copy."""
        command = [sys.executable, "-m", "pytest", "-q", "-rf", "--no-header", "--tb=no"]
        command += ["-p", "no:cacheprovider", "-p", "mutant_guard", *tests]
        env = os.environ | {
            "PYTHONPATH": str(self.package.parent),
            "PYTHONDONTWRITEBYTECODE": "1",  # two mutants of one second and size must not share bytecode
            "KVFERRY_MUTANT": str(self.package),
        }
        return subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )

    def try_mutant(self, mutant: Mutant) -> tuple[bool, str]:
        """Whether the break was noticed, and what to say of it."""
        path = self.package / mutant.file
        text = path.read_text(encoding="utf-8")
        if text.count(mutant.old) != 1:
            return False, f"its text occurs {text.count(mutant.old)} times in {mutant.file}"
        path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        try:
            done = self.run(mutant.tests)
        except subprocess.TimeoutExpired:
            return False, f"its tests ran for more than {TIMEOUT_S} s"
        finally:
            path.write_text(text, encoding="utf-8")
        if done.returncode == 0:
            return False, "SURVIVED"
        if done.returncode == 1:
            red = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("FAILED ")]
            green = [
                test for test in mutant.tests if not any(n == test or n.startswith(f"{test}[") for n in red)
            ]
            return not green, f"NOT NOTICED by {', '.join(green)}" if green else "caught"
        last = (done.stdout + done.stderr).strip().splitlines()[-3:]
        return False, f"pytest ended with {done.returncode}: {' / '.join(last)}"


def check_all(mutants: Sequence[Mutant]) -> int:
    """Try every mutant; the number of those that were not caught."""
    with tempfile.TemporaryDirectory(prefix="kvferry-mutants-") as folder:
        benches: SimpleQueue[Bench] = SimpleQueue()
        for i in range(WORKERS):
            benches.put(Bench(Path(folder) / str(i)))
        bench = benches.get()
        done = bench.run(sorted({test for mutant in mutants for test in mutant.tests}))
        benches.put(bench)
        if done.returncode:
            print(f"the tests fail before anything is broken:\n{done.stdout}{done.stderr}", file=sys.stderr)
            return len(mutants)

        def attempt(mutant: Mutant) -> tuple[Mutant, bool, str, float]:
            bench = benches.get()
            started = time.monotonic()
            try:
                caught, note = bench.try_mutant(mutant)
            finally:
                benches.put(bench)
            return mutant, caught, note, time.monotonic() - started

        missed = 0
        width = max(len(mutant.name) for mutant in mutants)
        with ThreadPoolExecutor(WORKERS) as pool:
            for mutant, caught, note, seconds in pool.map(attempt, mutants):
                missed += not caught
                print(f"{mutant.name:<{width}}  {mutant.file:<20} {seconds:4.1f} s  {note}", flush=True)
        return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="mutants to try; all of them by default")
    parser.add_argument("--list", action="store_true", help="say what there is, and try nothing")
    arguments = parser.parse_args()
    known = {mutant.name: mutant for mutant in MUTANTS}
    if unknown := set(arguments.names) - known.keys():
        parser.error(f"no mutant {', '.join(sorted(unknown))}")
    chosen = [known[name] for name in arguments.names] or list(MUTANTS)
    if arguments.list:
        for mutant in chosen:
            print(
                f"{mutant.name}\n    {mutant.file}: {mutant.old.strip()}\n    becomes: {mutant.new.strip()}"
            )
        return 0
    started = time.monotonic()
    missed = check_all(chosen)
    print(f"{len(chosen)} mutants, {len(chosen) - missed} caught, {time.monotonic() - started:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
