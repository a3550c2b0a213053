"""The examples run; and what the page for authors of engines says is true of the code."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from kvferry.runtime import Timing

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
PAGE = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(example):
    pytest.importorskip("nixl", exc_type=ImportError)
    ran = subprocess.run([sys.executable, example], capture_output=True, text=True, check=False, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "409600 bytes in 1600 runs; 409600 in place" in ran.stdout
    assert "the blocks of request-1 are mine again (read)" in ran.stdout


def test_the_example_is_on_the_page():
    (shown,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert shown == (ROOT / "examples" / "two_processes.py").read_text(encoding="utf-8")


def test_every_knob_is_on_the_page():
    for knob in fields(Timing):
        assert f"| `{knob.name}` | {knob.default:g} |" in PAGE
