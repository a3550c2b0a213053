"""Where a Chromium is: ``python tests/browser/chromium.py`` prints it, or says what to do."""

from __future__ import annotations

import os
import shutil
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = (
    "there is no Chromium: install one (Debian and Ubuntu: apt install chromium), or name it in"
    " KVFERRY_CHROMIUM"
)


def chromium() -> str:
    """The browser that is named in the environment, or else found on the path; empty if there is none."""
    named = os.environ.get("KVFERRY_CHROMIUM", "")
    return named or next((found for name in NAMES if (found := shutil.which(name))), "")


if __name__ == "__main__":
    print(chromium() or f"make browser: {MISSING}")
    sys.exit(not chromium())
