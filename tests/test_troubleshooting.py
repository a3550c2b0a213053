"""The symptoms on the page are what the code prints: a message that is changed must change there too."""

import ast
import re
from pathlib import Path

import pytest

from kvferry.errors import Code
from kvferry.runtime import FailureCode

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
OURS, _, FOREIGN = PAGE.partition("## Messages from other software")
OPERATE = (ROOT / "docs" / "operate.md").read_text(encoding="utf-8")
GOOD_START = OPERATE.partition("## Log lines of a healthy start")[2].partition("## ")[0]
CODES = {*Code, *FailureCode}
METRICS = ("vllm:kvferry_", "kvferry_")
ELSEWHERE = {"dtype", "encoding", "expired", "kvferry plan", "kv_transfer_params"}
"""Names that are not messages."""


def texts() -> str:
    """Every string of the package; what is put into a string where it runs is left out."""
    trees = (ast.parse(path.read_bytes()) for path in sorted((ROOT / "src").rglob("*.py")))
    strings = (n.value for t in trees for n in ast.walk(t) if isinstance(n, ast.Constant))
    return "\n".join(s for s in strings if isinstance(s, str))


TEXTS = texts()


def symptoms(text: str) -> list[str]:
    """What stands in the first column of the page's tables, as it is seen."""
    cells = (line.split(" | ")[0] for line in text.splitlines() if line.startswith("| "))
    quoted = [each for cell in cells for each in re.findall(r"`([^`]+)`", cell)]
    return [each for each in quoted if each not in ELSEWHERE and not each.startswith(METRICS)]


def is_said(symptom: str) -> bool:
    """Whether every part of a symptom, between names and numbers, stands in the code."""
    parts = [part.strip(" :,") for part in symptom.split("…")]
    return symptom in CODES or all(part in TEXTS for part in parts if len(part) > 1)


def test_a_symptom_that_nobody_prints_is_noticed():
    assert is_said("the secret file … cannot be read")
    assert not is_said("the secret file … cannot be eaten")


@pytest.mark.parametrize("symptom", [*symptoms(OURS), *symptoms(GOOD_START)])
def test_a_symptom_is_printed_by_the_code(symptom):
    assert is_said(symptom)


def test_there_are_enough_of_them():
    assert len(symptoms(OURS)) > 30
    assert len(symptoms(GOOD_START)) == 4
    assert "refused message number …: …" in symptoms(FOREIGN)
    assert is_said("refused message number …: …")
