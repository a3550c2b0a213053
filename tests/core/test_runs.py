import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry import Runs, coalesce
from kvferry.core.runs import NO_RUNS, REGION_SHIFT, place
from kvferry.core.state import MAX_BYTES


@st.composite
def runs(draw):
    """Runs apart at the destination, in any order; neighbours often touch on one side or on both."""
    made, src, dst = [], draw(st.integers(0, 9)), 0
    for _ in range(draw(st.integers(0, 12))):
        size = draw(st.integers(1, 4))
        made.append((src, dst, size))
        dst += size + draw(st.sampled_from([0, 0, 0, 2]))
        src += size + draw(st.sampled_from([0, 0, 0, 3, -size]))
    made = draw(st.permutations(made))
    return [np.array(column, dtype=np.int64) for column in (zip(*made, strict=True) if made else ([],) * 3)]


def copied(src, dst, num_bytes):
    triples = zip(src.tolist(), dst.tolist(), num_bytes.tolist(), strict=True)
    return {d + i: s + i for s, d, n in triples for i in range(n)}


@given(runs())
def test_coalesce_copies_the_same_bytes(columns):
    merged = coalesce(*columns)
    assert copied(merged.src, merged.dst, merged.num_bytes) == copied(*columns)
    assert merged.total_bytes == int(columns[2].sum())


@given(runs())
def test_coalesced_runs_are_maximal_and_sorted_by_destination(columns):
    merged = coalesce(*columns)
    ends = set(
        zip((merged.src + merged.num_bytes).tolist(), (merged.dst + merged.num_bytes).tolist(), strict=True)
    )
    assert not ends & set(zip(merged.src.tolist(), merged.dst.tolist(), strict=True))
    assert merged.dst.tolist() == sorted(merged.dst.tolist())


@given(runs())
def test_coalescing_twice_changes_nothing(columns):
    once = coalesce(*columns)
    assert list(coalesce(once.src, once.dst, once.num_bytes)) == list(once)


def test_coalesce_leaves_its_input_alone():
    columns = [np.array([8, 0]), np.array([8, 0]), np.array([8, 8])]
    assert list(coalesce(*columns)) == [(0, 0, 0, 0, 16)]
    assert [column.tolist() for column in columns] == [[8, 0], [8, 0], [8, 8]]


def test_runs_of_two_regions_never_merge():
    end_of_first = place(0, MAX_BYTES - 8)
    merged = coalesce(np.array([0, 8]), np.array([end_of_first, place(1, 0)]), np.array([8, 8]))
    assert list(merged) == [(0, 0, 0, MAX_BYTES - 8, 8), (0, 8, 1, 0, 8)]


def test_a_run_shows_its_regions_and_offsets():
    assert place(3, 5) == (3 << REGION_SHIFT) + 5
    runs = Runs(np.array([place(1, 7)]), np.array([place(2, 9)]), np.array([4]))
    assert list(runs) == [(1, 7, 2, 9, 4)]
    assert (len(NO_RUNS), NO_RUNS.total_bytes) == (0, 0)
