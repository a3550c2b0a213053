"""Bytes that are wrong, at every listener and every reader: nothing ends, grows, or keeps good loads waiting.

``SECONDS`` is how long all of them take together; ``python -m tests.fuzz.listeners`` runs longer.
"""

from __future__ import annotations

import os

import pytest

from tests.fuzz.listeners import LISTENERS, fuzz

pytestmark = pytest.mark.timed

SECONDS = float(os.environ.get("SECONDS", "36"))


@pytest.mark.parametrize("name", LISTENERS)
def test_a_listener(name: str) -> None:
    fuzzed = fuzz(name, SECONDS / len(LISTENERS))
    print(fuzzed)
    assert fuzzed.num_tries > 0
    assert fuzzed.fared.is_fine, f"{fuzzed}: {sorted({*fuzzed.fared.errors})[:3]}"
