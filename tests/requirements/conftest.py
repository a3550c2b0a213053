"""Engines by name, and the oracle at hand: what the tests of the requirements are written in."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from kvferry import Manifest, Plan, Request, Route, Selection, lower, plan, prove, select
from kvferry.core.sample import Placement, sample_request
from kvferry.models import Topology, describe, model_named
from kvferry.testing.oracle import check
from kvferry.testing.small import FAMILIES, small

Engine = Callable[..., Manifest]


@dataclass(frozen=True)
class Moved:
    """What one destination rank did, all of it found good by the oracle."""

    plan: Plan
    route: Route
    request: Request
    selection: Selection


def describe_engine(model: str, topology: str = "") -> Manifest:
    """A small family (with a small pool), or a model of the catalogue."""
    if model in FAMILIES:
        blocks = "" if "blocks=" in topology else "blocks=24,"
        return describe(small(model), Topology.parse(blocks + topology), model)
    return describe(model_named(model), Topology.parse(topology), model)


def move_exactly(
    src: Manifest, dst: Manifest, num_tokens: int = 37, *, num_kept: int = 0, ranks: list[int] | None = None
) -> list[Moved]:
    """Move a request to every destination rank; the oracle must find each byte where it belongs."""
    moved = []
    request = sample_request(src, dst, num_tokens, num_kept=num_kept, placement=Placement.SCATTERED)
    for rank in ranks or [rank.rank for rank in dst.ranks]:
        planned = plan(src, dst, rank)
        route = lower(prove(planned))
        selection = select(route, request)
        assert check(planned, request, selection) == [], f"destination rank {rank}"
        moved.append(Moved(planned, route, request, selection))
    return moved


@pytest.fixture
def engine() -> Engine:
    return describe_engine


@pytest.fixture
def move() -> Callable[..., list[Moved]]:
    return move_exactly
