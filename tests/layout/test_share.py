"""What one rank holds of a page."""

import pytest

from kvferry.core.span import Span
from kvferry.errors import SpecError
from kvferry.layout.pages import Item, Page, RankShare, k_and_v, num_cells, opaque_block, values_then_scales

BF16 = Item.of("bf16")
PAGE = Page(k_and_v(8, (64, 64), (BF16, BF16)))
K = PAGE.part("k")
DIGITS = {"head": [(2, 4096)], "token": [(16, 256)], "channel": [(64, 2)]}


def test_a_rank_holds_its_heads_and_the_whole_of_what_is_not_cut():
    assert RankShare(1, 4).held(K) == {"head": Span(2, 4), "channel": Span(0, 64)}


def test_the_axes_start_where_the_rank_does_and_are_sorted():
    axes = RankShare(3, 4).axes(PAGE, K, DIGITS)
    assert [(name, axis.start, axis.size) for name, axis in axes] == [
        ("channel", 0, 64),
        ("head", 6, 2),
        ("token", 0, 16),
    ]


def test_ranks_that_take_turns_hold_every_other_token():
    (_, tokens) = RankShare(0, 4, turn=1, num_turns=2).axes(PAGE, K, DIGITS)[-1]
    assert tokens.size == 32
    assert tokens.spans()[:2] == (Span(1, 2), Span(3, 4))


def test_turns_that_would_cut_a_cell_are_refused_with_the_place():
    page = opaque_block(4096, 1, 16, "a kernel's own")
    share = RankShare(0, 2, turn=0, num_turns=2, tokens_per_turn=1)
    with pytest.raises(SpecError, match=r"layers\.0: 1 tokens cannot be split into cells of 16"):
        share.axes(page, page.parts[0], {"token": [(1, 0)]}, "layers.0")


def test_cells_must_come_out_even():
    page = values_then_scales(128, 4, "fp8 rows, fp32 scales")
    assert num_cells(page, 64) == 64
