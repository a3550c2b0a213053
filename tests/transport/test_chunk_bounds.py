"""Blocks up to the last byte of their region may be gathered and scattered, and not one byte more."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvferry.core.manifest import Region
from kvferry.core.product import Term
from kvferry.core.runs import Runs, place
from kvferry.core.view import Ints
from kvferry.errors import TransportError
from kvferry.transport.pack import TermSide, check_room, check_term
from kvferry.transport.packed import chunk_terms
from kvferry.transport.places import Places, one_length

MEMORY = Places("ours", [Region("kv", 64, address=4096), Region("more", 64, address=8192)])
CHUNK = 1 << 20


def as_term(side: TermSide) -> Term:
    return Term(
        Runs(side.places, np.zeros_like(side.places), side.num_bytes), np.stack([side.steps, 0 * side.steps])
    )


LOOKS: dict[str, Callable[[TermSide], object]] = {
    "host": lambda side: side.rows(MEMORY),
    "check": lambda side: side.check(MEMORY),
    "reader": lambda side: check_term(as_term(side), MEMORY, MEMORY),
    "gather": lambda side: chunk_terms([side], MEMORY, CHUNK, is_gather=True),
    "scatter": lambda side: chunk_terms([side], MEMORY, CHUNK, is_gather=False),
}


@pytest.mark.parametrize("lengths", [np.array([8, 8]), one_length(8, 2)], ids=["listed", "told once"])
@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize(
    ("at", "steps", "is_inside"),
    [
        (0, [0, 56], True),
        (0, [56], True),
        (8, [-8, 48], True),
        (8, [48, -8, 0], True),
        (0, [0, 57], False),
        (0, [57], False),
        (8, [-8, 49], False),
        (8, [-9, 0], False),
        (0, [0, (1 << 63) - 1], False),
        (0, [-(1 << 63), 0], False),
        (0, [-(1 << 63), (1 << 63) - 1], False),
        (0, [0, place(1, 0)], False),  # in another region, and inside of it
        (0, [0, 1 << 47, place(1, 0)], False),
    ],
)
def test_blocks_stay_in_their_region(
    look: Callable[[TermSide], object], lengths: Ints, at: int, steps: list[int], is_inside: bool
) -> None:
    side = TermSide(np.array([at, at]), lengths, np.array(steps))
    if is_inside:
        look(side)
        return
    with pytest.raises(TransportError, match=r"out-of-bounds|unknown-region"):
        look(side)


@pytest.mark.parametrize("is_gather", [True, False])
@pytest.mark.parametrize("lengths", [[8, 8], [8, 4], [0, 8], [0, 0]])
def test_a_chunk_is_filled_from_its_first_byte_to_its_last(lengths: list[int], is_gather: bool) -> None:
    side = TermSide(np.array([0, place(1, 8)]), np.array(lengths), np.array([16, 0, 40]))
    filled = []
    for term in chunk_terms([side, side], MEMORY, CHUNK, is_gather=is_gather):
        addresses = term.prepared.addresses.reshape(2, -1)[int(is_gather)].tolist()
        steps = term.steps[int(is_gather)].tolist()
        filled += [(at + step, term.prepared.num_bytes) for at in addresses for step in steps]
    ends = [at + num_bytes for at, num_bytes in sorted(filled)]
    assert [at for at, _ in sorted(filled)] == [CHUNK, *ends][: len(filled)]
    assert ends[-1:] == [CHUNK + 2 * side.total_bytes][: len(filled)]


@pytest.mark.parametrize("is_gather", [True, False])
def test_what_was_asked_for_twice_comes_in_two_chunks(is_gather: bool) -> None:
    side = TermSide(np.array([0]), np.array([8]), np.array([16, 0]))
    for chunk in (CHUNK, 2 * CHUNK, CHUNK):
        (term,) = chunk_terms([side], MEMORY, chunk, is_gather=is_gather)
        moved = term.steps.tolist()
        assert moved[int(is_gather)] == [chunk, chunk + 8]
        assert moved[1 - is_gather] == [16, 0]


def test_lengths_whose_sum_overflows_do_not_fit() -> None:
    many = TermSide(np.zeros(1 << 17, np.int64), np.full(1 << 17, 1 << 47), np.array([0]))
    assert many.total_bytes == 0  # 2^64
    with pytest.raises(TransportError, match="too-much"):
        check_room([many], 1 << 26)
