"""``kvferry status --http``: a page that can only be read, by those whom it is meant for."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile

import pytest

from kvferry.cli.status.page import MAX_CONNECTIONS, StatusServer, page, policy, served
from kvferry.cli.status.reported import ReportedSource, SeenLease
from kvferry.cli.status.watched import Look, Watched
from kvferry.endpoint import SourceEngine

EVIL = "<img src=x onerror=alert(1)>"
SOURCE = ReportedSource(
    name=EVIL,
    host="gpu-17",
    pid=7,
    up_seconds=100.0,
    address="tcp://10.0.0.7:34683",
    ranks="4/4",
    num_offered=3,
    num_being_read=1,
    pinned_bytes=1024.0,
    leases=(SeenLease("request-1", 20, "", None),),
    counts={"offered": 100.0},
    byte_counts={"granted": 0.0},
)


@pytest.fixture
def server():
    server = StatusServer("127.0.0.1", 0, 1.0)
    with served(server) as show:
        show(Watched().then(0.0, {"place": Look(SOURCE)}), 0.0)
        yield server


def call(server, path="/", method="GET", host=None):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.putrequest(method, path, skip_host=host is not None)
    if host:
        connection.putheader("Host", host)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, answer.headers, answer.read()
    connection.close()
    return found


def test_the_page_and_its_numbers(server):
    status, headers, body = call(server)
    assert (status, body) == (200, page())
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    status, headers, body = call(server, "/board.json")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    shown = json.loads(body)
    assert (shown["summary"], shown["every"]) == ("1 source engine, 0 destination ranks", 1.0)
    assert shown["tables"][0]["rows"][0][0] == EVIL
    status, _, body = call(server, "/status.json")
    assert json.loads(body)["engines"][0]["leases"][0]["seconds_left"] is None
    status, headers, body = call(server, "/board.json", "HEAD")
    assert (status, body) == (200, b"")
    assert int(headers["Content-Length"]) > 0


def test_it_can_only_be_read(server):
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        status, headers, _ = call(server, "/", method)
        assert (status, headers["Allow"]) == (405, "GET, HEAD")
    assert call(server, "/", "TRACE")[0] == 501
    for path in ("/etc/passwd", "/../page.py", "http://127.0.0.1/"):
        assert call(server, path)[0] == 404


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "a b", ""])
def test_a_name_of_somebody_else_s_is_not_answered(server, host):
    """DNS rebinding: a foreign page lets its own name point here, and asks."""
    status, _, body = call(server, "/board.json", host=host)
    assert status == 421
    assert b"gpu-17" not in body


@pytest.mark.parametrize("host", ["127.0.0.1:1", "localhost:9000", "[::1]:80", "10.0.0.7", "LOCALHOST"])
def test_an_address_is_answered(server, host):
    assert call(server, host=host)[0] == 200


def test_names_of_peers_are_text_and_nothing_else():
    text = page().decode()
    for way_in in ("innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "DOMParser"):
        assert way_in not in text
    assert "://" not in text  # it calls nobody else
    assert len(page()) < 20_000


def test_a_browser_runs_only_what_is_on_the_page(server):
    _, headers, _ = call(server)
    rules = headers["Content-Security-Policy"]
    assert rules == policy(page())
    assert "default-src 'none'" in rules
    assert "unsafe" not in rules
    assert "Access-Control-Allow-Origin" not in headers
    for name in ("Cache-Control", "X-Content-Type-Options", "Referrer-Policy"):
        assert headers[name]


def test_callers_that_say_nothing_are_bounded_and_do_not_stay(server, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("kvferry.cli.status.page.CALLER_SECONDS", 0.5)
        where = ("127.0.0.1", server.server_port)
        silent = [socket.create_connection(where) for _ in range(MAX_CONNECTIONS + 8)]
        for each in silent:  # those that are too many at once, the others when they have dawdled
            each.settimeout(60)
            assert each.recv(1) == b""
            each.close()
    assert call(server)[0] == 200


def test_other_hosts_see_it_only_if_they_are_meant_to(cli):
    ran = cli("status", "--http", "0.0.0.0:0")
    assert (ran.code, ran.out) == (2, "")
    assert "say --allow-remote" in ran.err
    ran = cli("status", "--http", "0.0.0.0:0", "--allow-remote", "--count", "1", "--every", "0.1")
    assert ran.code == 0
    assert "warning: whoever can reach 0.0.0.0:0 sees" in ran.err


def test_an_address_that_makes_no_sense(cli):
    assert "--http 8080: a host and a port are needed" in cli("status", "--http", "8080").err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = cli("status", "--http", f"127.0.0.1:{port}")
    assert ran.code == 2
    assert f"--http 127.0.0.1:{port}: Address already in use" in ran.err


def test_a_real_engine_is_on_the_page():
    with tempfile.TemporaryDirectory(prefix="kvf") as folder:
        env = {**os.environ, "TMPDIR": folder}
        argv = [sys.executable, "-m", "kvferry", "status", "--http", "127.0.0.1:0", "--every", "0.1"]
        with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=env) as process:
            assert process.stderr
            line = process.stderr.readline()
            address = line.split("http://")[1].split("/")[0]
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(tempfile, "tempdir", folder)
                engine = SourceEngine("prefill", 1)
            try:
                seen = ""
                while "prefill" not in seen:
                    connection = http.client.HTTPConnection(address, timeout=60)
                    connection.request("GET", "/status.json")
                    seen = connection.getresponse().read().decode()
                    connection.close()
            finally:
                engine.close()
                process.send_signal(signal.SIGINT)
            assert process.wait() == 0
            assert process.stderr.read() == ""
