"""docs/tour.md shows real output, docs/glossary.md has the terms, docs/design.md the messages."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from kvferry.wire import messages, rank_asks

ROOT = Path(__file__).parents[1]
TOUR = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
DESIGN = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
WORDS = {
    word
    for line in re.findall(r"^\| ([^|]+) \|", GLOSSARY, re.MULTILINE)
    for word in line.replace("`", "").split(", ")
}

DESIGN_WORDS = (
    *("engine", "state", "group", "box", "need", "slack", "view", "alias", "region", "manifest", "piece"),
    *("plan", "run", "ticket", "lease", "reader", "quarantine", "src", "dst"),
)
"""The words on which the design rests."""


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", TOUR, re.MULTILINE | re.DOTALL)


def test_the_session_on_the_tour_is_real():
    session = "\n".join(blocks("pycon"))
    test = doctest.DocTestParser().get_doctest(session, {}, "tour", "docs/tour.md", 0)
    assert len(test.examples) > 20
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert "".join(said) == ""


def test_the_command_on_the_tour_is_real():
    pytest.importorskip("nixl", exc_type=ImportError)
    (session,) = blocks("console")
    command, *shown = session.splitlines()
    example = ROOT / command.removeprefix("$ python ")
    ran = subprocess.run([sys.executable, example], capture_output=True, text=True, check=True, timeout=120)
    assert sorted(ran.stdout.splitlines()) == sorted(shown)


def test_every_file_on_the_tour_exists():
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", TOUR)) - {"src/kvferry/"}
    assert len(named) > 12
    assert [path for path in sorted(named) if not (ROOT / "src" / "kvferry" / path).exists()] == []


TRACED_LOAD = """
import sys, threading, time
from kvferry import BlockTable, need_of
from kvferry.endpoint import Destination, SourceEngine, SourceRank
from kvferry.models import Topology, describe
from kvferry.transport.process import ProcessTransport
from two_processes import MODEL, NUM_TOKENS, with_memory

passed = set()

def note(frame, event, arg):
    passed.add(frame.f_code.co_filename)

def load():
    ticket = engine.offer(f"request at {time.monotonic()}", {"full": BlockTable.of(range(7))}, NUM_TOKENS)
    destination.fetch(ticket, {"full": BlockTable.of(range(4))}, need)
    while not (reports := destination.poll()):
        time.sleep(0.001)
    assert reports[0].failure is None
    while not engine.poll():
        time.sleep(0.001)

threading.setprofile(note)
src, src_memory = with_memory(describe(MODEL, Topology(block=16, blocks=8), "prefill"))
dst, dst_memory = with_memory(describe(MODEL, Topology(block=32, blocks=8, layout="NHD"), "decode"))
need = {group.name: need_of(group, NUM_TOKENS) for group in dst.groups}
engine = SourceEngine("prefill", num_ranks=1)
rank = SourceRank(engine.invitation, src, ProcessTransport())
destination = Destination(dst, 0, ProcessTransport())
load()
passed.clear()
sys.setprofile(note)
load()
sys.setprofile(None)
print(*passed, sep="\\n")
destination.close(), rank.close(), engine.close()
"""


def test_a_load_passes_no_file_that_the_tour_does_not_name():
    """The second one between two engines, over TCP, on both sides."""
    ran = subprocess.run(
        [sys.executable, "-c", TRACED_LOAD],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'examples'}", "KVFERRY_WAY": "packed"},
    )
    passed = {file.partition("/src/kvferry/")[2] for file in ran.stdout.splitlines()} - {""}
    assert len(passed) > 30
    assert passed - set(re.findall(r"`([\w/]+\.py)`", TOUR)) == set()


def test_every_word_of_the_design_is_in_the_glossary():
    assert [word for word in DESIGN_WORDS if word not in WORDS] == []


def test_every_message_is_on_the_architecture_page():
    found = [value for module in (messages, rank_asks) for value in vars(module).values()]
    structs = [each for each in found if isinstance(each, msgspec.StructMeta) and each.__struct_config__.tag]
    names = [struct.__name__ for struct in structs]
    assert len(names) > 10
    assert [name for name in names if f"`{name}`" not in DESIGN] == []


def test_the_glossary_stays_short():
    """At most 60 terms: those that a vLLM engineer would not know."""
    assert len(WORDS - {"term", "---"}) <= 60


def test_a_word_is_in_the_glossary_once():
    lines = re.findall(r"^\| ([^|]+) \| ", GLOSSARY, re.MULTILINE)
    words = [word for line in lines for word in line.split(", ") if not set(word) <= set("- ")]
    assert sorted({word for word in words if words.count(word) > 1} - {"term"}) == []
