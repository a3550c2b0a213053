"""Memory: what a request leaves behind is gone when its lease is."""

import gc
import time
import tracemalloc

from kvferry.runtime import Timing

TIMING = Timing(lease=1.5, retry=0.1)
NUM_FETCHES = 900
BYTES_PER_FETCH = 64
"""Less than a name in a dictionary takes; more than what threads and caches come and go by: 6 to 27 KB,
however many fetches there are."""


def fetch_and_forget(pair, num_fetches):
    for _ in range(0, num_fetches, 20):
        for _ in range(20):
            pair.fetch()
        reports = pair.reports(20).values()
        assert not all(report.failure for report in reports)  # a busy machine may be late for some
        pair.engine.poll()
        pair.rank.poll()
    time.sleep(2 * TIMING.lease)
    pair.engine.poll()
    pair.rank.poll()
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def test_nothing_of_a_fetch_stays_in_memory_on_either_side(pair_of):
    pair = pair_of(source_timing=TIMING, rank_timing=TIMING, timing=TIMING)
    tracemalloc.start()
    try:
        before = fetch_and_forget(pair, 100)
        after = fetch_and_forget(pair, NUM_FETCHES)
    finally:
        tracemalloc.stop()
    assert after - before < NUM_FETCHES * BYTES_PER_FETCH
