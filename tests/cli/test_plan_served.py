"""``kvferry plan --src http://…``: a running server describes itself.

The engine and its messages are real; the HTTP server in front of it says what vLLM's would
(``tests/e2e/test_serve.py`` asks vLLM's own).
"""

import json
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count

import numpy as np
import pytest

from kvferry.core.sample import sample_request
from kvferry.endpoint import SourceEngine, SourceRank
from kvferry.endpoint.asking import manifest_of
from kvferry.errors import SpecError
from kvferry.models import Topology, describe
from kvferry.testing.small import small
from kvferry.transport.memory import Hub, MemoryTransport, placed
from kvferry.wire.manifest import manifest_to_json
from kvferry.wire.secret import Secret, Trust
from kvferry.wire.ticket import to_text

TRUST = Trust()


class Server(ThreadingHTTPServer):
    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.is_vllm, self.offer = True, lambda: None
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self):
        self.answer({"data": [{"id": "tiny"}]} if self.server.is_vllm else ["hello"])

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["model"] == "tiny"
        assert asked["max_tokens"] == 1
        ticket = self.server.offer() if asked["kv_transfer_params"]["do_remote_decode"] else None
        self.answer({"kv_transfer_params": ticket and {"kvferry_ticket": to_text(ticket)}})

    def answer(self, content):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def http():
    server = Server()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def engine_of(name, topology):
    return describe(small("gqa"), Topology.parse(topology), name)


def with_memory(rank):
    return replace(
        rank, regions=placed(rank, {r.name: np.zeros(r.num_bytes, np.uint8) for r in rank.regions})
    )


@pytest.fixture
def source_of():
    """Starts an engine of two ranks; returns its manifest, the engine, and what offers a request."""
    opened: list[SourceEngine | SourceRank] = []

    def make(trust=TRUST):
        manifest = engine_of("prefill", "tp=2,block=8,blocks=9")
        manifest = replace(manifest, ranks=tuple(map(with_memory, manifest.ranks)))
        engine = SourceEngine("prefill", 2, trust=trust)
        opened.append(engine)
        hub = Hub()
        for rank in manifest.ranks:
            alone = replace(manifest, ranks=(rank,))
            opened.append(SourceRank(engine.invitation, alone, MemoryTransport(hub), trust=trust))
        deadline = time.monotonic() + 20
        while not engine.is_whole:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        tables, numbers = sample_request(manifest, manifest, 32).src, count(1)
        return manifest, engine, lambda: engine.offer(f"request-{next(numbers)}", tables, 32)

    yield make
    for each in reversed(opened):
        each.close()


@pytest.fixture
def decode_file(tmp_path):
    path = tmp_path / "decode.json"
    path.write_bytes(manifest_to_json(engine_of("decode", "block=16,blocks=9")))
    return path


def test_a_running_server_is_planned(cli, http, source_of, decode_file):
    _, engine, http.offer = source_of()
    ran = cli("plan", "--src", http.url, "--dst", decode_file, "--tokens", 40, "--json")
    assert ran.code == 0
    assert ran.answer["src"]["engine"] == "prefill"
    assert ran.answer["src"]["ranks"] == [0, 1]
    assert ran.answer["src"]["groups"] == {"full": 8}
    assert engine.status()["offered"] == 0, "its blocks are free again"


def test_it_is_the_manifest_of_the_engine(source_of):
    manifest, engine, offer = source_of()
    assert manifest_of(offer(), None) == manifest
    assert engine.status()["offered"] == 0


def test_the_environment_s_secret_is_used(cli, http, source_of, decode_file, monkeypatch):
    text = bytes(range(32)).hex()
    _, _, http.offer = source_of(Trust(Secret.from_text(text)))
    with monkeypatch.context() as patch:
        patch.setattr(manifest_of, "__defaults__", (0.5,))
        ran = cli("plan", "--src", http.url, "--dst", decode_file)
    assert ran.code == 2
    assert "check that it is running, and that KVFERRY_SECRET_FILE is set here" in ran.err
    monkeypatch.setenv("KVFERRY_SECRET", text)
    assert cli("plan", "--src", http.url, "--dst", decode_file, "--tokens", 40).code == 0


def test_what_is_no_prefill_server_is_named(cli, http, decode_file):
    ran = cli("plan", "--src", http.url, "--dst", decode_file)
    assert ran.code == 2
    assert f"{http.url}: it returned no ticket" in ran.err
    http.is_vllm = False
    assert "sent no JSON object" in cli("plan", "--src", http.url, "--dst", decode_file).err


def test_an_engine_that_is_gone_is_named(source_of):
    _, engine, offer = source_of()
    ticket = offer()
    engine.close()
    with pytest.raises(SpecError, match=r"did not answer within 0\.3 s"):
        manifest_of(ticket, None, seconds=0.3)
