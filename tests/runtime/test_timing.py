"""How long things wait."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from kvferry import SpecError
from kvferry.runtime import Timing

PAGE = Path(__file__).parents[2] / "docs" / "engine.md"


def test_the_page_says_what_the_waits_are_by_default():
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    said = {name: float(seconds) for name, seconds in rows}
    assert {field.name: field.default for field in fields(Timing)}.items() <= said.items()


@pytest.mark.parametrize("name", [field.name for field in fields(Timing)])
@pytest.mark.parametrize("seconds", [0, -1, 1e6, float("nan"), float("inf")])
def test_a_wait_has_an_end(name, seconds):
    with pytest.raises(SpecError, match=f"timing: {name} must be a number of seconds"):
        Timing(**{name: seconds})
