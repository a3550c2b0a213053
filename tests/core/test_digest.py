"""The digest of a load: one value for the same cells, wherever they lie; another if anything went wrong."""

from __future__ import annotations

import hashlib
import os
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry import Plan, RequestError, Slack, Span, SpecError, lower, plan, prove, select
from kvferry.core.box import Box
from kvferry.core.digest import CHUNK_TOKENS, DigestPart, DigestSide, cells_of, differences, digest_parts
from kvferry.testing import oracle
from kvferry.testing.strategies import cases, engines, requests
from tests.core.planted_faults import FAULTS, PAIRS, Loaded, carry_out, dst_side, memory_of, src_side

IS_LONG = "KVFERRY_LAW_EXAMPLES" in os.environ
NUM_EXAMPLES = int(os.environ["KVFERRY_LAW_EXAMPLES"]) // 20 if IS_LONG else 100
NUM_FAULTS = 10_000 if IS_LONG else 400
MASK = (1 << 64) - 1
STEP = 0x9E3779B97F4A7C15


# -- the slow way: what the digest is, item by item, in Python's own numbers ----------------------------


def slow_key(seed: int, name: str, coordinate: int) -> int:
    number = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
    salt = stirred(number + seed * STEP)
    return stirred(coordinate * STEP + salt) | 1


def stirred(value: int) -> int:
    value &= MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = ((value ^ value >> shift) * factor) & MASK
    return value ^ value >> 31


def slow_sums(side: DigestSide, part: DigestPart, seed: int) -> list[int]:
    """Every byte of every cell of a part, through the oracle's own way to find it."""
    name = part.src_state if side.side == "src" else part.state
    view, state = side.rank.by_state[name], side.manifest.state_by_name[name]
    spans = dict(part.box.axes)
    longest = max(((axis.size, axis.name) for axis in state.axes), default=(0, ""))[1]
    sums: dict[int, int] = defaultdict(int)
    for (_, cell, at), region, offset in oracle.cells_of(side.manifest, view, side.tables, cells_of(part)):
        if not all(any(c in span for span in spans[axis]) for axis, c in at):
            continue
        key = slow_key(seed, "token", int(cell)) * slow_key(seed, f"state {part.src_state}", 0)
        word = 0
        for axis, coordinate in at:
            if axis == longest and state.item_bytes < 3:
                word = coordinate * state.item_bytes
                key *= slow_key(seed, axis, word // 4)
            else:
                key *= slow_key(seed, axis, coordinate)
        item = side.memory[region][offset : offset + state.item_bytes].tolist()
        for i, value in enumerate(item):
            byte_key = slow_key(seed, "byte", i // 4) if len(item) > 4 or len(item) == 3 else 1
            sums[int(cell) * state.tokens_per_cell // CHUNK_TOKENS] += key * byte_key * value << 8 * (
                (word + i) % 4
            )
    return [sums[chunk] & MASK for chunk in sorted(sums)]


def whole(planned: Plan, state: str, part: DigestPart) -> DigestPart:
    """All that the destination rank needs of a state, whoever sends it."""
    box = planned.dst.rank(planned.dst_rank).boxes[state]
    return DigestPart(state, part.src_state, box, part.cells)


@settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_both_sides_have_one_digest_whatever_they_are(data: st.DataObject) -> None:
    """RB-1. And it is what the slow way says, and the parts of a state sum up to the digest of the whole."""
    case = data.draw(cases())
    src, dst = engines(case)
    request = data.draw(requests(src, dst, case.num_tokens, case.num_kept))
    seed = data.draw(st.integers(0, 99))
    planned = plan(src, dst, case.dst_rank)
    selection = select(
        lower(prove(planned), max_runs_per_block=1 << 20), request, slack=data.draw(st.sampled_from(Slack))
    )
    random = np.random.default_rng(seed)
    sources = {rank: memory_of(src, rank, random) for rank in {piece.src_rank for piece in planned.pieces}}
    memory = memory_of(dst, case.dst_rank, random)
    carry_out(planned, selection, sources, memory)
    ours = dst_side(planned, request, memory)
    by_state: dict[str, list[int]] = {}
    wholes: dict[str, DigestPart] = {}
    parts = digest_parts(planned, request)
    for src_rank, some in parts.items():
        theirs = src_side(planned, src_rank, request, sources[src_rank])
        sums, others = ours.sums(some, seed=seed), theirs.sums(some, seed=seed)
        assert list(differences(dst, some, sums, others)) == []
        for part, each in zip(some, sums, strict=True):
            wholes[part.state] = whole(planned, part.state, part)
            by_state.setdefault(part.state, []).append(sum(each.tolist()))
        at = random.integers(len(some))
        assert sums[at].tolist() == slow_sums(theirs, some[at], seed)
    for state, numbers in by_state.items():
        (total,) = ours.sums([wholes[state]], seed=seed)
        assert sum(numbers) & MASK == sum(total.tolist()) & MASK


def test_every_planted_fault_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    """RB-1: what changes a needed byte changes the digest, which names the state; slack changes nothing."""
    random = np.random.default_rng(20261116)
    found: Counter[str] = Counter()
    harmless, loaded = 0, Loaded.of(PAIRS[0], random)
    for number in count():
        if number % 40 == 0:  # another request, over each pair of engines in turn
            loaded = Loaded.of(PAIRS[number // 40 % len(PAIRS)], random)
            assert loaded.told(loaded.memory) == set()
        memory = {name: values.copy() for name, values in loaded.memory.items()}
        plant = FAULTS[number % len(FAULTS)]
        plant(loaded, memory, random)
        changed = loaded.changed(memory)
        assert {state for state, _ in loaded.told(memory)} == changed, f"{plant.__name__}, number {number}"
        found[plant.__name__] += bool(changed)
        harmless += not changed
        if found.total() >= NUM_FAULTS:
            break
    with capsys.disabled():
        print(f"\n{found.total()} planted faults, all found: {dict(found)};", end=" ")
        print(f"{harmless} changed nothing that is needed: none was reported")
    assert min(found[plant.__name__] for plant in FAULTS) >= NUM_FAULTS // 20


def test_a_difference_names_the_state_and_its_tokens() -> None:
    loaded = Loaded.of(("gqa", "tp=1,block=64", "tp=2,block=48", 2500), np.random.default_rng(1))
    region, where = loaded.sites["layers.1.attn/v"]
    memory = {name: values.copy() for name, values in loaded.memory.items()}
    memory[region][where.offsets[1500, 0, 0]] ^= 0x80
    side = dst_side(loaded.planned, loaded.request, memory)
    ((rank, parts),) = digest_parts(loaded.planned, loaded.request).items()
    (found,) = differences(loaded.planned.dst, parts, side.sums(parts), loaded.theirs[rank])
    assert str(found) == "layers.1.attn/v, tokens [1024, 2048)"
    assert list(differences(loaded.planned.dst, parts[:1], [np.zeros(0, np.uint64)], loaded.theirs[rank][:1]))


def test_cells_that_a_rank_does_not_hold_are_refused() -> None:
    loaded = Loaded.of(PAIRS[0], np.random.default_rng(1))
    rank, (part, *_) = next(iter(digest_parts(loaded.planned, loaded.request).items()))
    side = src_side(loaded.planned, rank, loaded.request, loaded.sources[rank])
    axes = dict(part.box.axes)
    spoiled = {
        "does not hold state": replace(part, src_state="layers.99/k"),
        "does not hold head": replace(part, box=Box(tuple((axes | {"head": (Span(0, 7),)}).items()))),
        "has the axes": replace(part, box=Box(())),
        "not all in its": replace(part, cells=(Span(0, 1 << 60),)),
    }
    for complaint, wrong in spoiled.items():
        with pytest.raises((SpecError, RequestError), match=complaint):
            side.sums([wrong])
    turns = replace(part.box, axes=tuple((axes | {"token": (Span(0, 2),)}).items()), period=4)
    assert len(cells_of(replace(part, box=turns))) < len(cells_of(part))
    assert [len(one) for one in side.sums([replace(part, cells=())])] == [0]
