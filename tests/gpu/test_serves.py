"""Many clients of a server, and the processes that serve, without vLLM."""

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.e2e.harness import EngineError, until
from tests.gpu.clients import Reply, Served, ask_all
from tests.gpu.pairs import Wrong
from tests.gpu.report import text
from tests.gpu.results import Outcome, Result, Results
from tests.gpu.servers import Server, Servers
from tests.gpu.serves import check, compared, figures

MANY = 60.0
"""Seconds that no machine needs."""


class Streams(BaseHTTPRequestHandler):
    """As vLLM streams: the prompt backwards; an empty prompt is refused, one of 9 breaks off."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = body["prompt"]
        self.send_response(200 if prompt else 500)
        self.end_headers()
        for token in reversed(prompt):
            event = {"error": "gone"} if prompt == [9] else {"choices": [{"token_ids": [token]}]}
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        """Nobody listens."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Streams) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_clients_note_each_token_and_each_failure(url):
    pytest.importorskip("aiohttp")
    prompts = [[number, number + 1, number + 2] for number in range(20)] + [[], [9], [1, 2]]
    served = ask_all(url, prompts, 3, 8)
    assert [reply.tokens for reply in served.replies[:20]] == [tuple(p[::-1]) for p in prompts[:20]]
    assert all(len(reply.seconds) == 3 and not reply.problem for reply in served.replies[:20])
    assert served.elapsed >= max(reply.seconds[-1] for reply in served.replies[:20])
    assert [reply.problem for reply in served.replies[20:]] == [
        "500: data: [DONE]\n\n",
        "ValueError: gone",
        "2 of 3 tokens came",
    ]


def test_a_server_that_is_not_there_is_a_failure(url):
    pytest.importorskip("aiohttp")
    (reply,) = ask_all("http://127.0.0.1:1", [[1]], 1, 1).replies
    assert reply.problem


def test_figures():
    replies = tuple(Reply((1, 2, 3), (n / 100, n / 100 + 0.01, n / 100 + 0.04)) for n in range(1, 101))
    found = figures(Served((*replies, Reply((), (), "502: no")), 10.0))
    assert (found["requests"], found["failed"], found["problems"]) == (101, 1, ["502: no"])
    assert found["requests_per_second"] == 10
    assert found["first_token_p50_ms"] == pytest.approx(500)
    assert found["first_token_p99_ms"] == pytest.approx(990)
    assert found["per_token_p99_ms"] == pytest.approx(20)
    assert figures(Served((Reply((), (), "x"),), 1.0))["per_token_p50_ms"] is None


ROW = {
    **figures(Served((Reply((1, 2), (0.1, 0.2)),), 1.0)),
    "requests": 16,
    "prompt_tokens": 1600,
    "loaded_tokens": 1584,
    "sample": 4,
    "sample_tokens": 40,
    "equal": 4,
    "equal_tokens": 40,
    "equal_under_load": 4,
    "different_answers": 4,
    "as_others_tokens": 0,
    "sample_problems": [],
}


@pytest.mark.parametrize(
    ("change", "is_exact", "why"),
    [
        ({"failed": 1, "problems": ["502: no"]}, False, "1 of 16 requests failed: 502: no"),
        ({"loaded_tokens": 1500}, False, "computed again"),
        ({"sample_problems": ["502: gone"]}, False, "a request of the sample failed: 502: gone"),
        ({"different_answers": 1}, False, "proves nothing"),
        ({"equal": 3, "equal_tokens": 35}, True, "3 of 4 answers"),
        ({"equal_under_load": 3}, True, "under load 3"),
        ({"equal": 0, "equal_tokens": 19}, False, "19 of 40 tokens"),
        (
            {"equal": 0, "equal_tokens": 19, "as_others_tokens": 39},
            False,
            "39 tokens are the other connector's",
        ),
        ({"equal": 3, "equal_tokens": 39, "as_others_tokens": 40}, True, "3 of 4 answers"),
    ],
)
def test_what_is_wrong_says_how(change, is_exact, why):
    check("kvferry", ROW, is_exact=True)
    with pytest.raises(Wrong, match=why):
        check("kvferry", ROW | change, is_exact=is_exact)


def test_answers_of_a_sample_are_compared_with_everybody_elses():
    def replies(*answers):
        return tuple(Reply(answer, ()) for answer in answers)

    quiet, alone = replies((1, 2, 3), (4, 5, 6)), replies((1, 2, 9), (4, 5, 6))
    busy, other = replies((1, 2, 3, 3), (4, 5, 6, 6)), replies((1, 2, 3), (4, 9, 9))
    assert compared(quiet, alone, busy, [other, quiet], 3) == {
        "sample": 2,
        "sample_tokens": 6,
        "equal": 1,
        "equal_tokens": 5,
        "equal_under_load": 1,
        "different_answers": 2,
        "sample_problems": [],
        "as_others_tokens": 4,
    }
    same = replies((7, 7, 7), (7, 7, 7))
    row = compared(same, alone, (Reply((), (), "502: no"), Reply((7,), ())), [], 3)
    assert (row["different_answers"], row["as_others_tokens"], row["equal_under_load"]) == (1, 0, 0)
    assert compared((Reply((), (), "502: no"),), same[:1], busy[:1], [], 3)["sample_problems"] == ["502: no"]


def test_rounding_is_no_failure_in_bf16():
    check("kvferry", ROW | {"equal": 1, "equal_tokens": 21, "equal_under_load": 0}, is_exact=False)
    parted = {"equal": 0, "equal_tokens": 1, "equal_under_load": 0, "as_others_tokens": 40}
    check("kvferry", ROW | parted, is_exact=False)


def test_the_report_has_both_connectors_side_by_side():
    rows = {"kvferry": ROW, "vllm": ROW | {"first_token_p50_ms": 123.4}}
    found = {"refused": {"another": "ValueError: no"}, "serve": rows}
    report = text(Results({}).plus(Result("serve/8b/x/y", Outcome.PASSED, found=found)), [])
    for words in ("16, 0", "4 of 4 (40 of 40)", "100.0, 100.0 ms", "123.4, 100.0 ms", "refused: ValueError"):
        assert words in report


# -- processes ---------------------------------------------------------------------------------------------

SERVE = """
import os, sys, signal
from http.server import HTTPServer, BaseHTTPRequestHandler
class Healthy(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(b"ok")
if os.fork() == 0:
    signal.pause()  # a worker that nobody ends
HTTPServer(("127.0.0.1", int(sys.argv[1])), Healthy).serve_forever()
"""


def begin(servers: Servers, code: str = SERVE) -> Server:
    return servers.start("one", [sys.executable, "-c", code], "{port}", {})


def group(pid: int) -> list[int]:
    """The processes of a group that are not dead."""
    stats = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            stats.append((int(path.parent.name), path.read_text().rpartition(")")[2].split()))
        except OSError:
            continue
    return [number for number, stat in stats if int(stat[2]) == pid and stat[0] != "Z"]


def test_all_processes_of_a_server_end_with_the_run(tmp_path):
    with Servers(tmp_path) as servers:
        server = begin(servers)
        server.wait_ready()
        until(lambda: len(group(server.process.pid)) == 2, "both run", MANY)
    until(lambda: group(server.process.pid) == [], "both have ended", MANY)
    with pytest.raises(EngineError, match="the run is over"):
        begin(servers)


def test_a_server_that_does_not_start_says_why(tmp_path):
    with Servers(tmp_path) as servers:
        server = begin(servers, "raise SystemExit('ValueError: odd')")
        started = time.monotonic()
        with pytest.raises(EngineError, match=r"one-0 does not serve: ValueError: odd"):
            server.wait_ready()
    assert time.monotonic() - started < MANY
    assert os.path.exists(tmp_path / "one-0.log")
