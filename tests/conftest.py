"""How Hypothesis runs here, and what becomes of a test that may have failed because of the machine.

``default``  fresh examples each run, kept in ``.hypothesis`` when they fail
``ci``       the same examples each run, so that a red run is a red commit
``law``      as many examples as ``KVFERRY_LAW_EXAMPLES`` says (``make law``)

``HYPOTHESIS_PROFILE`` names one. Without it ``KVFERRY_LAW_EXAMPLES`` picks ``law``, and ``CI``
picks ``ci``.
No profile has a deadline: a slow machine is not a broken law.
"""

import os
import time

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import HealthCheck, settings

from tests.stalls import STALL_SECONDS, StallWatch

law_examples = os.environ.get("KVFERRY_LAW_EXAMPLES")

settings.register_profile("default", deadline=None, print_blob=True)
settings.register_profile("ci", settings.get_profile("default"), derandomize=True)
settings.register_profile(
    "law",
    settings.get_profile("default"),
    max_examples=int(law_examples or 20_000),
    suppress_health_check=[HealthCheck.too_slow],
)

profile = "law" if law_examples else "ci" if os.environ.get("CI") else "default"
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or profile)

NUM_AGAIN = 4
NUM_TIMED = 3
"""Tries of a test marked ``timed``: a limit in seconds says what the code can do, and once is enough."""
WATCH = pytest.StashKey[StallWatch]()


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[WATCH] = StallWatch()


def pytest_sessionfinish(session: pytest.Session) -> None:
    session.config.stash[WATCH].close()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test; again, if it failed while the machine stood still, or for lack of time."""
    if not isinstance(item, pytest.Function):
        return None
    place = {"nodeid": item.nodeid, "location": item.location}
    item.ihook.pytest_runtest_logstart(**place)
    for report in reports_of(item, nextitem, NUM_AGAIN):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(**place)
    return True


def reports_of(
    item: pytest.Function, nextitem: pytest.Item | None, num_again: int
) -> list[pytest.TestReport]:
    """Of the last time that it was run."""
    began = time.monotonic()
    reports = runtestprotocol(item, log=False, nextitem=nextitem)
    if not num_again or not any(report.failed for report in reports):
        return reports
    why = why_again(item, began, num_again)
    if not why:
        return reports
    told = f"{item.nodeid} failed {why}: once more"
    waited = item.config.stash[WATCH].wait_for_calm()
    item.config.get_terminal_writer().line(f"\n{told}, after {waited:.0f} s")
    item._initrequest()
    return reports_of(item, nextitem, num_again - 1)


def why_again(item: pytest.Function, began: float, num_again: int) -> str:
    """What the machine may have had to do with a failure; empty, if nothing."""
    lost = item.config.stash[WATCH].lost_since(began)
    if lost >= STALL_SECONDS:
        return f"while this machine stood still for {lost:.1f} s"
    if item.get_closest_marker("timed") and num_again > NUM_AGAIN + 1 - NUM_TIMED:
        return "and has a limit of time"
    return ""
