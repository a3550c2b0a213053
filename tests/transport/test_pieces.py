"""A product in pieces for chunks: every byte is in one of them, and each is as short as it has to be."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvferry.core.product import Product, Term
from kvferry.core.runs import Runs
from kvferry.transport import pack
from kvferry.transport.pack import dst_of, pieces, src_of

MAX_ROWS = 3
LENGTHS = st.sampled_from([0, 1, 4, 8, 31, 32, 33, 64])


@st.composite
def terms(draw: st.DrawFn) -> Term:
    """Runs of one length as often as of several."""
    alike = st.tuples(LENGTHS, st.integers(0, 8)).map(lambda told: [told[0]] * told[1])
    lengths = draw(alike | st.lists(LENGTHS, max_size=8))
    num_pairs = draw(st.integers(0, 8))
    at = 100 * np.array(draw(st.permutations(range(len(lengths)))), np.int64)
    steps = 1000 * np.array([draw(st.permutations(range(num_pairs))) for _ in range(2)], np.int64)
    return Term(Runs(at, at[::-1], np.array(lengths, np.int64)), steps.reshape(2, num_pairs))


def bytes_of(some: list[Term]) -> list[tuple[int, int]]:
    """Where every byte comes from, and where it goes to."""
    return [
        (src + i, dst + i)
        for term in some
        for _, src, _, dst, num_bytes in term.runs()
        for i in range(num_bytes)
    ]


@given(st.lists(terms(), max_size=3), st.sampled_from([1, 8, 32, 33, 100]))
def test_every_byte_is_in_one_piece_and_every_piece_fits(some: list[Term], chunk_bytes: int) -> None:
    before, pack.MAX_ROWS = pack.MAX_ROWS, MAX_ROWS
    try:
        made = [*pieces(Product(tuple(some)), chunk_bytes)]
    finally:
        pack.MAX_ROWS = before
    parts = [part for piece in made for part in piece]
    assert sorted(bytes_of(parts)) == sorted(bytes_of(some))
    for piece in made:
        assert 0 < sum(part.total_bytes for part in piece) <= chunk_bytes
    for part in parts:
        assert 0 < len(part.pattern) <= MAX_ROWS
        assert 0 < part.num_pairs <= MAX_ROWS
        assert part.pattern.num_bytes.all()
        for side in (src_of(part), dst_of(part)):
            assert side.num_bytes.tolist() == part.pattern.num_bytes.tolist()
            assert side.total_bytes == part.total_bytes == part.runs().num_bytes.sum()
