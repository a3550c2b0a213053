"""Whatever bytes arrive: an answer or an error of ours, soon, with little memory.

The corpus is what a coverage-guided fuzzer found (``make fuzz``); it is replayed here, whole and mutated.
"""

from __future__ import annotations

import time
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.decoders import DECODERS, corpus

pytestmark = pytest.mark.timed

NUM_EXAMPLES = 300
MOST_SECONDS = 2.0
MOST_MEMORY = 16 << 20
MEMORY_PER_BYTE = 400
"""A byte of msgpack can stand for an item, and an item of Python is this large, with its share of a table."""


def check(name: str, data: bytes) -> bool:
    tracemalloc.start()
    started = time.process_time()
    try:
        accepted = DECODERS[name].check(data)
        seconds, (_, peak) = time.process_time() - started, tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert seconds < MOST_SECONDS, f"{len(data)} bytes took {seconds:.1f} s"
    assert peak < MOST_MEMORY + MEMORY_PER_BYTE * len(data), f"{len(data)} bytes took {peak} bytes of memory"
    return accepted


@pytest.mark.parametrize("name", DECODERS)
def test_the_corpus(name: str) -> None:
    """Everything that was found once; and what we write ourselves is accepted."""
    assert all(check(name, seed) for seed in DECODERS[name].seeds)
    for data in corpus(name):
        check(name, data)


EXTREME = [b"\x00", b"\x7f", b"\x80", b"\xff", b"\xcf" + b"\xff" * 8, b"\xd3\x80" + b"\x00" * 7, b"\xc0"]
EXTREME += [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x91" * 2000]
EXTREME += [
    b"[" * 2000,
    b"-1",
    b"1e999",
    b"18446744073709551616",
    b"null",
    b'"\\ud800"',
    b"NaN",
    b",,",
    b"{}",
]


@st.composite
def mutated(draw: st.DrawFn, inputs: list[bytes]) -> bytes:
    """An input that was cut, repeated, spliced with another one, or has something extreme in it."""
    data = draw(st.sampled_from(inputs))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(data)))
        stop = min(len(data), at + draw(st.integers(0, 40)))
        other = draw(st.sampled_from(inputs))
        cut = draw(st.integers(0, len(other)))
        new = draw(
            st.one_of(
                st.sampled_from(EXTREME),
                st.binary(max_size=8),
                st.just(data[at:stop] * 2),
                st.just(other[cut : cut + 40]),
            )
        )
        data = data[:at] + new + data[stop:]
    return data


@pytest.mark.parametrize("name", DECODERS)
def test_mutations_of_the_corpus(name: str) -> None:
    inputs = corpus(name)

    @settings(max_examples=NUM_EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(mutated(inputs))
    def mutations(data: bytes) -> None:
        check(name, data)

    mutations()
