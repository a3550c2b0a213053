"""The accessibility checker, which ``make browser`` installs."""

import pytest


def broken_rules(page):
    """What axe finds: each rule, how bad, and the first place."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="make browser installs axe")
    found = axe.Axe().run(page).response["violations"]
    return [(each["id"], each["impact"], each["nodes"][0]["html"][:200]) for each in found]
