"""What ``make serve`` says of its answers: equal, different, not moved, or none at all."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ASK = Path(__file__).parents[1] / "examples" / "vllm" / "ask.py"
TOKENS = [7, 8, 9]


class Server(ThreadingHTTPServer):
    """A server that speaks as vLLM does, as far as ``ask.py`` listens."""

    def __init__(self, tokens: list[int], status: int = 200, decode: "Server | None" = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.tokens, self.status, self.decode = tokens, status, decode
        self.num_moved = 0
        """Prompt tokens that a decode server has received."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.answer(json.dumps({"data": [{"id": "tiny"}]}))
        else:
            by = 'vllm:prompt_tokens_by_source_total{engine="0",source="%s"} %d.0\n'
            self.answer(by % ("external_kv_transfer", self.server.num_moved) + by % ("local_compute", 0))

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.decode is not None:
            self.server.decode.num_moved += 60
        if self.server.status != 200:
            self.answer("the decode server failed")
        elif asked.get("stream"):
            events = [{"choices": [{"text": "x", "token_ids": [token]}]} for token in self.server.tokens]
            self.answer("".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n")
        else:
            choice = {"message": {"content": "xyz"}, "token_ids": self.server.tokens}
            self.answer(json.dumps({"choices": [choice]}))

    def answer(self, text: str) -> None:
        self.send_response(self.server.status if self.command == "POST" else 200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(server: Server) -> Iterator[str]:
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server.url
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ask(proxy_tokens: list[int], *, status: int = 200, moves: bool = True) -> tuple[int, str]:
    """The exit status, and the last line."""
    decode = Server([])
    with (
        serving(Server(proxy_tokens, status, decode if moves else None)) as proxy,
        serving(Server(TOKENS)) as prefill,
        serving(decode) as decode_url,
    ):
        command = [sys.executable, str(ASK), proxy, prefill, decode_url]
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert ran.stderr == ""
    return ran.returncode, ran.stdout.splitlines()[-1]


def test_equal_tokens_of_moved_prompts_are_good():
    status, line = ask(TOKENS)
    assert status == 0
    assert line.startswith("EQUAL: all 6 tokens equal those of one server alone; ")
    assert line.endswith("kvferry moved 120 prompt tokens, 0 were computed again")


def test_one_other_token_fails():
    status, line = ask([7, 8, 10])
    assert status == 1
    assert line.startswith("DIFFERENT: ")
    assert line.endswith("was answered with tokens [7, 8, 10], by one server alone with [7, 8, 9]")


def test_no_token_fails():
    assert ask([])[0] == 1


def test_equal_tokens_prove_nothing_if_nothing_was_moved():
    status, line = ask(TOKENS, moves=False)
    assert status == 1
    assert line.startswith("NOT MOVED: ")


def test_an_error_is_the_last_line():
    status, line = ask(TOKENS, status=502)
    assert status == 1
    assert line.startswith("NO ANSWER: HTTP Error 502")
    assert line.endswith("the decode server failed")
