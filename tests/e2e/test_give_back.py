"""A ticket that the decode engine does not need is given back at once, between live engines.

A lease lasts 30 s: nothing but giving back frees the prefill engine's blocks in time.
"""

import pytest

from tests.e2e.give_back import WAYS, Yard, is_in_the_prefix_cache, next_prefill
from tests.e2e.harness import KVFERRY, Nursery
from tests.e2e.needs import needs_vllm

pytestmark = [pytest.mark.slow, *needs_vllm]

GIVE_BACK_SECONDS = 1.0


@pytest.fixture(scope="module")
def yard(tmp_path_factory):
    with Nursery(tmp_path_factory.mktemp("give-back")) as nursery:
        yield Yard(nursery, KVFERRY)


@pytest.mark.parametrize("way", WAYS.values(), ids=lambda way: way.__name__)
def test_a_ticket_that_is_not_needed(yard, way):
    way(yard)
    print(f"given back after {yard.wait(GIVE_BACK_SECONDS):.2f} s")


def test_the_next_prefill_does_not_wait(yard):
    """There is no room for it beside a prompt that is still pinned."""
    alone = next_prefill(yard, None)
    assert next_prefill(yard, is_in_the_prefix_cache) < alone + GIVE_BACK_SECONDS
