"""``kvferry status --watch``: what is seen of engines that come, go, stop and count."""

import io
import os
import pty
import signal
import subprocess
import sys
import tempfile
import threading
import time

import pytest
from rich.console import Console

from kvferry.cli.status.asking import EngineAsker
from kvferry.cli.status.reported import (
    FORGET_SECONDS,
    LATE_SECONDS,
    WINDOW_SECONDS,
    Look,
    Watched,
    reported,
)
from kvferry.cli.status.shown import draw, lines, tables, warnings
from kvferry.endpoint import SourceEngine
from kvferry.endpoint.status import open_status, read_status, sockets
from kvferry.errors import SpecError
from tests.cli.reported_engines import DESTINATION, SOURCE


def replace(known, **changes):
    return {**known, **changes}


def later(engine, seconds, **counts):
    return replace(engine, up_seconds=engine["up_seconds"] + seconds, **counts)


def watched(*looks):
    """What is known after looks at one or several places, one second apart."""
    known = Watched()
    for now, look in enumerate(looks):
        known = known.then(float(now), look)
    return known


def drawn(known, now, *, max_rows=5, width=80):
    page = io.StringIO()
    Console(width=width, file=page, highlight=False).print(draw(known, now, max_rows, "every 1 s"))
    return page.getvalue()


def test_rates_are_what_grew_over_the_engine_s_own_time():
    more = later(DESTINATION, 2.0, counts={"read direct": 16.0, "read packed": 5.0, "expired": 1.0})
    more = replace(more, byte_counts={"direct": 5000.0, "packed": 50.0})
    (engine,) = watched({"a": Look(DESTINATION)}, {"a": Look(more)}).engines.values()
    assert engine.per_second == {"read direct": 3.0, "read packed": 0.0, "expired": 0.5}
    assert engine.bytes_per_second == {"direct": 2000.0, "packed": 0.0}


def test_one_look_is_no_rate():
    (engine,) = watched({"a": Look(DESTINATION)}).engines.values()
    assert engine.per_second == engine.bytes_per_second == {}


def test_rates_are_those_of_the_window():
    """One load each second, and then none: the rate falls to nothing within the window, and no later."""
    looks = [later(DESTINATION, s, counts={"read direct": 10.0 + min(s, 20)}) for s in range(41)]
    rates = []
    for n in range(2, 41):
        (engine,) = watched(*({"a": Look(look)} for look in looks[:n])).engines.values()
        rates.append(engine.per_second["read direct"])
        assert len(engine.history) <= WINDOW_SECONDS + 2
    assert rates[:19] == [pytest.approx(1.0)] * 19
    assert 0 < rates[24] < 1
    assert rates[-1] == 0


@pytest.mark.parametrize(
    "anew",
    [
        replace(DESTINATION, up_seconds=1.0, counts={"read direct": 1.0}),
        replace(DESTINATION, pid=9, up_seconds=60.0, counts={"read direct": 1.0}),
    ],
    ids=["younger", "another process"],
)
def test_an_engine_that_was_started_anew_counts_from_its_start(anew):
    (engine,) = watched({"a": Look(DESTINATION)}, {"a": Look(anew)}).engines.values()
    assert engine.per_second == {}
    (engine,) = watched(
        {"a": Look(DESTINATION)}, {"a": Look(anew)}, {"a": Look(later(anew, 1, counts={"read direct": 3.0}))}
    ).engines.values()
    assert engine.per_second == {"read direct": 2.0}


def test_an_engine_that_is_gone_is_shown_for_a_while():
    known = watched({"a": Look(DESTINATION)}, {})
    (engine,) = known.engines.values()
    assert engine.is_gone
    assert engine.per_second == {}
    assert list(warnings(known, 5.0)) == [
        "GONE  destination decode#cae5fac399751f5c rank 0 (gpu-18, process 8), for 5 s: it has ended",
    ]
    assert "Destinations" not in drawn(known, 5.0)
    assert known.then(FORGET_SECONDS + 1, {}).engines == {}


def test_an_engine_that_came_back_elsewhere_takes_the_place_of_the_one_that_is_gone():
    back = replace(DESTINATION, pid=9, up_seconds=0.5)
    known = watched({"a": Look(DESTINATION)}, {}, {"b": Look(back)})
    assert list(known.engines) == ["b"]


def test_one_that_does_not_answer_is_not_gone_and_counts_on_when_it_does():
    silent = {"a": Look(error="no answer yet")}
    known = watched({"a": Look(DESTINATION)}, *[silent] * 100)
    assert next(warnings(known, 100.0)).startswith("NO ANSWER  destination decode#")
    known = known.then(101.0, {"a": Look(later(DESTINATION, 100.0, counts={"read direct": 110.0}))})
    (engine,) = known.engines.values()
    assert engine.per_second["read direct"] == 1.0
    assert list(warnings(known, 101.0)) == []


def test_an_answer_that_is_a_little_late_is_no_news():
    late = {"a": Look(error="no answer yet", is_late=True)}
    known = watched({"a": Look(DESTINATION)}, {"a": Look(later(DESTINATION, 1.0))}, late)
    (engine,) = known.engines.values()
    assert (engine.error, engine.last["up_seconds"]) == ("", 51.0)
    (engine,) = known.then(LATE_SECONDS + 1, late).engines.values()
    assert "no answer yet" in engine.error


def test_somebody_who_never_answered_is_named():
    assert list(warnings(watched({"a": Look(error="no")}), 0.0)) == ["NO ANSWER  a: no"]


def test_quarantine_expiry_and_lost_sources_come_first():
    gone = replace(DESTINATION["sources"][0], state="gone", why="it does not answer")
    slow = replace(DESTINATION["sources"][0], engine="other", why="no RDMA")
    ill = replace(DESTINATION, num_quarantined=2, sources=(gone, slow))
    expired = later(SOURCE, 1.0, counts={"offered": 101.0, "ended: expired": 3.0})
    known = watched({"d": Look(ill), "s": Look(SOURCE)}, {"d": Look(ill), "s": Look(expired)})
    words = [line.partition("  ")[0] for line in warnings(known, 1.0)]
    assert words == ["QUARANTINE", "EXPIRED", "GONE", "NOTE"]


def test_ranks_of_one_engine_are_summed_by_way():
    ranks = {str(n): replace(DESTINATION, rank=n) for n in range(4)}
    more = {n: later(rank, 2.0, byte_counts={"direct": 3000.0}) for n, rank in ranks.items()}
    more = {n: replace(rank, counts={"read direct": 12.0}) for n, rank in more.items()}
    known = watched(*({n: Look(rank) for n, rank in some.items()} for some in (ranks, more)))
    found = {
        table.title.partition(":")[0].partition(",")[0]: table.rows
        for table in tables(list(known.engines.values()), [])
    }
    assert found["Rates by way"] == [("direct", "4.0", "3.91 KiB/s", "48", "11.72 KiB")]
    assert found["Peers"][0][-1] == "4"
    assert len(found["Destinations"]) == 4
    assert drawn(known, 1.0, max_rows=3).count("… and 1 more") == 2  # ranks, and loads


@pytest.mark.parametrize("width", [60, 80, 120])
def test_everything_that_matters_is_legible(width):
    busy = later(DESTINATION, 1.0, counts={"read direct": 5000.0, "no-answer": 2.0})
    busy = replace(busy, byte_counts={"direct": 123.4e9}, num_quarantined=1)
    full = later(SOURCE, 1.0, byte_counts={"granted": 1.1e12 + 2.0**40})
    known = watched({"d": Look(DESTINATION), "s": Look(SOURCE)}, {"d": Look(busy), "s": Look(full)})
    text = drawn(known, 1.0, width=width)
    assert max(map(len, text.splitlines())) <= width
    numbers = ("4990.0", "115 GiB/s", "114.93 GiB", "12.3 GiB", "1 TiB/s", "reading", "32,768", "29 s")
    assert [number for number in numbers if number not in text] == []
    heads = ("quarantined", "loads/s", "bytes/s", "offered", "pinned", "lease left", "failed: no-answer")
    assert [head for head in heads if head not in text] == []


def test_lines_for_who_has_no_terminal():
    known = watched({"d": Look(DESTINATION), "s": Look(SOURCE)})
    assert list(lines(known, 0.0)) == [
        "destination decode#cae5fac399751f5c rank 0: 1 holding, 2 reading under way, 8 reads in flight;"
        " direct 0.0 loads/s, 0 B/s; packed 0.0 loads/s, 0 B/s",
        "source prefill-with-a-rather-long-name: 3 offered, 1 being read, 12.3 GiB pinned;"
        " 0.0 offers/s, 0 B/s",
    ]


# -- with real engines ------------------------------------------------------------------------------


@pytest.fixture
def own_folder(monkeypatch, tmp_path_factory):
    """Engines of others are not looked at. A socket's address is short, and a test's folder is not."""
    tmp_path_factory.getbasetemp()  # made now, and not below this folder, which goes
    with tempfile.TemporaryDirectory(prefix="kvf") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield folder


@pytest.fixture
def engine(own_folder):
    engine = SourceEngine("prefill\x1b[2J", 1)
    yield engine
    engine.close()


def look_until(asker, condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition(looks := asker.look()):
        assert time.monotonic() < deadline, looks
        time.sleep(0.02)
    return looks


def test_what_a_real_engine_says_can_be_read(engine):
    (look,) = EngineAsker("", None).look().values()
    assert look.engine is not None
    assert look.engine["side"] == "source"
    assert look.engine["title"] == "source prefill\\x1b[2J"
    assert look.engine["address"] == engine.address
    (by_address,) = look_until(
        EngineAsker(engine.address, None), lambda looks: looks[engine.address].engine
    ).values()
    assert by_address.engine["pid"] == os.getpid()


def test_it_is_watched_as_often_as_asked_for(cli, engine):
    ran = cli("status", "--watch", "--every", "0.1", "--count", "3")
    assert (ran.code, ran.err) == (0, "")
    assert [line[9:] for line in ran.out.splitlines()] == [
        "source prefill\\x1b[2J: 0 offered, 0 being read, 0 B pinned; 0.0 offers/s, 0 B/s"
    ] * 3
    ran = cli("status", "--watch", "--every", "0.1", "--count", "1", "--json")
    assert ran.answer["engines"][0]["address"] == engine.address


@pytest.mark.usefixtures("own_folder")
def test_engines_come_go_and_come_back(cli):
    asker = EngineAsker("", None)
    known = Watched().then(0.0, asker.look())
    assert next(warnings(known, 0.0)).startswith("NONE")
    for turn in range(2):
        engine = SourceEngine("prefill", 1)
        known = known.then(1.0, look_until(asker, lambda looks: len(looks) == 1))
        assert [each.is_gone for each in known.engines.values()] == [False]
        engine.close()
        known = known.then(2.0, look_until(asker, lambda looks: not looks))
        assert [each.is_gone for each in known.engines.values()] == [True], turn


@pytest.mark.usefixtures("own_folder")
def test_a_file_that_was_named_may_appear_later():
    engine = SourceEngine("prefill", 1)
    (path,) = sockets()
    asker = EngineAsker(str(path), None)
    assert look_until(asker, lambda looks: looks[str(path)].engine)
    engine.close()
    assert look_until(asker, lambda looks: looks[str(path)].is_gone)


def test_an_engine_that_is_stopped_delays_nobody(engine):
    goes_on = threading.Event()
    opened = open_status("stopped", lambda: {"went on": goes_on.wait()})
    assert opened is not None
    try:
        asker = EngineAsker("", None)
        looks = look_until(asker, lambda looks: any(look.engine for look in looks.values()))
        for _ in range(3):
            looks = look_until(asker, lambda looks: any(look.engine for look in looks.values()))
            assert len(looks) == 2
            (stopped,) = (look for place, look in looks.items() if "stopped" in place)
            assert "no answer yet" in stopped.error
    finally:
        goes_on.set()
        opened.close()


def test_an_answer_that_makes_no_sense_is_no_bug(engine):
    (path,) = sockets()
    answer = read_status(path)
    assert reported({**answer, "unheard of": 1}) == reported(answer)
    for key in ("pid", "up_seconds", "leases", "figures", "offered"):
        for bad in ({**answer, key: [None]}, {each: answer[each] for each in answer if each != key}):
            with pytest.raises(SpecError, match="cannot parse its answer"):
                reported(bad)


HEARS_INTERRUPTS = """
import signal, sys
from kvferry.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(main())
"""
"""Where tests run in the background of a shell, SIGINT is ignored."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_terminal_is_left_as_it_was(engine, own_folder, number):
    master, slave = pty.openpty()
    env = {**os.environ, "TMPDIR": own_folder, "TERM": "xterm", "COLUMNS": "60", "LINES": "40"}
    argv = [sys.executable, "-c", HEARS_INTERRUPTS, "status", "--watch", "--every", "0.1"]
    with subprocess.Popen(argv, stdout=slave, stderr=slave, env=env) as process:
        os.close(slave)
        seen = b""
        while b"Sources: leases" not in seen:
            seen += os.read(master, 1 << 16)
        process.send_signal(number)
        while part := read_all(master):
            seen += part
        assert process.wait() == 0
    os.close(master)
    assert seen.count(b"\x1b[?1049h") == seen.count(b"\x1b[?1049l") == 1
    left = seen.partition(b"\x1b[?1049l")[2].decode()
    assert "\x1b[?25h" in seen.decode()
    assert "Sources: leases" in left
    assert "Traceback" not in left


def read_all(master):
    try:
        return os.read(master, 1 << 16)
    except OSError:  # Linux says so where the other end is closed
        return b""
