"""How Hypothesis runs here, and what becomes of a test during which the machine stood still.

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
WATCH = pytest.StashKey[StallWatch]()


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[WATCH] = StallWatch()


def pytest_sessionfinish(session: pytest.Session) -> None:
    session.config.stash[WATCH].close()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Run a test; again, if it failed while the machine stood still."""
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
    watch = item.config.stash[WATCH]
    lost = watch.lost_since(began)
    if lost < STALL_SECONDS:
        return reports
    told = f"{item.nodeid} failed while this machine stood still for {lost:.1f} s: once more"
    item.config.get_terminal_writer().line(f"\n{told}, after {watch.wait_for_calm():.0f} s")
    item._initrequest()
    return reports_of(item, nextitem, num_again - 1)
