"""Orders of a block, cut into kernel blocks."""

import pytest

from kvferry import SpecError
from kvferry.layout.order import Tile, in_kernel_blocks

TILED = ("block", "token", "head", Tile("token", 4), Tile("channel", 2))


def test_tiles_of_tokens_stay_inside_a_kernel_block():
    """Sixteen tokens in tiles of four are four tiles; tiles of channels have no say."""
    assert in_kernel_blocks(TILED, 16) == (
        *("block", "token", Tile("token", 4), "head"),
        *(Tile("token", 4), Tile("channel", 2)),
    )


def test_a_kernel_block_is_a_whole_number_of_tiles():
    with pytest.raises(SpecError, match="kernel blocks of 6 tokens cannot be split into tiles of 4"):
        in_kernel_blocks(TILED, 6)
