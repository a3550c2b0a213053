"""README's table of peers: its judge can find fault, and the table is of the versions that the tool takes."""

import re
import zipfile
from pathlib import Path

import peers
import pytest
from peers import Copy, Package, Pair, pairs, verdict

from tests.test_sweep import PAIRS

PAIR = Pair(4, 2, 1)
RIGHT = [Copy(0, 0, 0, 0, 2), Copy(1, 0, 0, 2, 2)]


def refuse(pair):
    raise AssertionError


def test_the_pairs_are_those_of_our_own_sweep():
    assert pairs() == [Pair(*pair) for pair in PAIRS]


def test_ranks_beyond_the_heads_share_one():
    assert [peers.held(2, 4, rank) for rank in range(4)] == [[0], [0], [1], [1]]
    assert [peers.held(6, 3, rank) for rank in range(3)] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("copies", "expected"),
    [
        (RIGHT, "right"),
        (RIGHT[:1], "silently wrong"),
        ([*RIGHT[:1], Copy(1, 0, 0, 1, 2)], "silently wrong"),
        ([*RIGHT, Copy(0, 1, 0, 0, 2)], "silently wrong"),
        ([*RIGHT, Copy(0, 0, 0, 3, 2)], "silently wrong"),
        ([*RIGHT[:1], Copy(2, 0, 0, 2, 2)], "refused"),
    ],
    ids=["right", "missing", "misplaced", "past-the-source", "past-the-destination", "no-such-rank"],
)
def test_every_head_counts(copies, expected):
    assert verdict(PAIR, lambda pair: copies) == expected


def test_a_peer_that_raises_refuses():
    assert verdict(PAIR, refuse) == "refused"


def test_a_peer_that_has_changed_does_not_pass_for_one_that_refuses():
    def ask_for_more(pair):
        return pair.something_new

    with pytest.raises(AttributeError):
        verdict(PAIR, ask_for_more)


def test_functions_are_taken_out_of_a_wheel_by_name(tmp_path):
    """Nothing else of the file runs."""
    wheel = tmp_path / "peer-1.2-py3-none-any.whl"
    text = "import torch_of_theirs\nclass A:\n    def b(self): return c() + 1\ndef c() -> Missing: return 1\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("peer/a.py", text)
    package = Package(wheel)
    assert package.version == "1.2"
    assert package.take("peer/a.py", ["b", "c"]).b(None) == 2
    with pytest.raises(LookupError, match=r"peer/a\.py of version 1\.2 has no d"):
        package.take("peer/a.py", ["d"])


def test_the_table_is_of_the_versions_that_the_tool_takes():
    root = Path(__file__).parents[1]
    readme = (root / "README.md").read_text(encoding="utf-8")
    named = dict(
        re.findall(r'add_argument\("--(vllm|sglang)", default="(.*?)"', Path(peers.__file__).read_text())
    )
    rows = re.findall(r"^\| (vLLM|SGLang) (\S+?),? .*\| (\d+) \| (\d+) \| (\d+) \|$", readme, re.MULTILINE)
    assert len(rows) == 3
    for name, version, *counts in rows:
        assert version == named[name.lower()]
        assert sum(map(int, counts)) == len(PAIRS)
