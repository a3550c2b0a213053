"""By what ways are compared when two engines meet: a request of some length, between these two."""

import pytest

from kvferry import lower, plan, prove
from kvferry.core.cost import Traffic
from kvferry.core.sample import Placement, sample_request
from kvferry.core.select import select
from kvferry.endpoint.meeting import USUAL_TOKENS, usual_traffic
from kvferry.models import Topology, describe, model_named


def route_of(model: str, src: str, dst: str):
    engines = [describe(model_named(model), Topology.parse(text), text) for text in (src, dst)]
    return lower(prove(plan(engines[0], engines[1], 0)))


@pytest.mark.parametrize("model", ["llama-3.1-8b", "deepseek-v3", "qwen3-next-80b", "gemma-3-27b"])
def test_it_is_a_request_between_these_two(model):
    route = route_of(model, "tp=2,blocks=2000", "tp=1,block=32,blocks=2000")
    src, dst = route.plan.src, route.plan.dst
    request = sample_request(src, dst, USUAL_TOKENS[0], placement=Placement.SCATTERED)
    products = select(route, request).products
    assert usual_traffic(route) == {
        rank: Traffic.of([product], len(product.runs)) for rank, product in products.items()
    }


def test_short_runs_are_told_from_long_ones():
    """Heads that are split between ranks lie apart in an NHD block, and side by side in an HND one."""
    short, long = (
        usual_traffic(
            route_of("llama-3.1-8b", f"blocks=99,layout={layout}", f"tp=8,blocks=99,layout={layout}")
        )[0]
        for layout in ("NHD", "HND")
    )
    assert short.num_bytes == long.num_bytes
    assert short.average_run_bytes < long.average_run_bytes


@pytest.mark.parametrize(("blocks", "num_tokens"), [(100, 1024), (20, 256), (2, 16), (1, 16)])
def test_pools_that_are_small_have_shorter_requests(blocks, num_tokens):
    (traffic,) = usual_traffic(
        route_of("llama-3.1-8b", f"blocks={blocks}", f"layout=HND,blocks={blocks}")
    ).values()
    assert traffic.num_bytes == num_tokens * 32 * 2 * 8 * 128 * 2
