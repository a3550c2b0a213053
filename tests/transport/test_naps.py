"""How long the thread of an agent does not look at what is under way."""

from hypothesis import given
from hypothesis import strategies as st

from kvferry.transport.agent_thread import LONGEST_NAP, NAP_SHARE, SHORTEST_NAP, next_nap


@given(st.floats(0, 2))
def test_an_end_is_seen_at_most_a_small_share_later_than_it_came(ends_after):
    waited = 0.0
    while waited < ends_after:
        waited += next_nap(waited)
    late = waited - ends_after
    assert late <= max(NAP_SHARE * ends_after, SHORTEST_NAP) + 1e-9
    assert late <= LONGEST_NAP + 1e-9


@given(st.floats(0, 3600), st.floats(0, 3600))
def test_naps_grow_with_the_wait_and_have_bounds(one, other):
    naps = [next_nap(waited) for waited in sorted((one, other))]
    assert SHORTEST_NAP <= naps[0] <= naps[1] <= LONGEST_NAP
