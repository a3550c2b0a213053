"""The example as people run it: real ``vllm serve``, real HTTP, a proxy in front.

``serve.sh`` runs twice, which makes two servers that prefill and two that decode, of unequal block sizes:
two data-parallel engines on each side of one router. The router is our proxy, and vLLM's own toy proxy,
unchanged. What is right is what one server answers alone.
"""

import contextlib
import hashlib
import importlib.util
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen
from uuid import uuid4

import pytest

pytestmark = pytest.mark.slow
for module in ("vllm", "nixl"):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed", allow_module_level=True)

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "vllm"
SECONDS = 1200.0
"""Nothing takes longer, on a busy machine."""

VLLM_SOURCES = "KVFERRY_VLLM_SOURCES"
"""Names the folder of vLLM's source distribution, for its toy proxy; without it the file is fetched."""
TOY_PROXY = "tests/v1/kv_connector/nixl_integration/toy_proxy_server.py"
SDIST_SHA256 = "d2c957d5eee3d0985012151315ddc62cbe0cd368fc96a5fc3510438d9dddf2ad"
FETCH_SDIST = """
import sys
from pip._internal.commands import create_command
from pip._vendor.packaging.specifiers import SpecifierSet

command = create_command("download")
options, _ = command.parse_args(["--no-binary=:all:"])
with command.main_context():
    session = command.get_default_session(options)
    finder = command._build_package_finder(options, session)
    found = finder.find_best_candidate("vllm", SpecifierSet("==0.32.0")).best_candidate
    sys.stdout.buffer.write(session.get(found.link.url_without_fragment).content)
"""
"""By the indexes that pip knows. ``pip download`` would build the package to read its name."""


# ------------------------------------------------------------------------------------------- questions


@dataclass(frozen=True, slots=True)
class Ask:
    """A request, and where it goes."""

    path: str
    body: dict[str, Any]

    @classmethod
    def prompt(cls, num_tokens: int, **more: Any) -> "Ask":
        """A completion; the tiny model's tokens are bytes."""
        text = "".join(f"{num_tokens} bottles and {number} cups, " for number in range(num_tokens))
        return cls("/v1/completions", {"prompt": text[:num_tokens], "max_tokens": 12, **more})

    @classmethod
    def chat(cls, *contents: str, **more: Any) -> "Ask":
        messages = [{"role": "user", "content": content} for content in contents]
        return cls("/v1/chat/completions", {"messages": messages, "max_completion_tokens": 12, **more})


STREAM = {"stream": True, "stream_options": {"include_usage": True}}
EIGHT = (
    Ask.prompt(5),
    Ask.prompt(64, **STREAM),
    Ask.prompt(131, min_tokens=8, n=1),
    Ask.prompt(300, **STREAM),
    Ask.prompt(700, max_tokens=40, **STREAM),
    Ask("/v1/completions", {"prompt": [7 * index % 256 for index in range(97)], "max_tokens": 12}),
    Ask.chat("How deep is the Styx?", "And how wide?"),
    Ask.chat("Does a ferry pay for the road? " * 9, min_tokens=3, **STREAM),
)
"""Shorter than a block, on the edge of one, many blocks; at once and streaming; text, tokens and chat."""
NUM_PROMPT_TOKENS = sum(len(ask.body["prompt"]) for ask in EIGHT[:6]) + sum(
    len(f"user: {message['content']}\n") for ask in EIGHT[6:] for message in ask.body["messages"]
)
"""A token is a byte, and ``serve.sh`` has the chat template."""


class Refused(Exception):
    """An HTTP error, or an error in the middle of a stream: its code and its text."""


def post(url: str, ask: Ask) -> HTTPResponse:
    """Greedy, and unless the body says otherwise with a salt of its own: no prefix cache has seen it."""
    common = {"model": "tiny", "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body = {**common, "cache_salt": uuid4().hex, **ask.body}
    return send(Request(url + ask.path, json.dumps(body).encode(), {"Content-Type": "application/json"}))


def send(request: Request) -> HTTPResponse:
    try:
        answer: HTTPResponse = urlopen(request, timeout=SECONDS)
    except HTTPError as problem:
        with problem:
            raise Refused(problem.code, problem.read().decode()) from None
    return answer


def tokens(url: str, ask: Ask) -> list[list[int]]:
    """The answer's tokens, for each choice."""
    with post(url, ask) as answer:
        if not ask.body.get("stream"):
            return [choice["token_ids"] for choice in json.load(answer)["choices"]]
        return [[token for event in events(answer) for token in streamed(event)]]


def events(answer: HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in answer:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line.removeprefix(b"data: "))


def streamed(event: dict[str, Any]) -> Iterator[int]:
    if "error" in event:
        raise Refused(event["error"]["code"], event["error"]["message"])
    for choice in event["choices"]:
        yield from choice.get("token_ids") or ()


def tokens_of_all(url: str, asks: Sequence[Ask]) -> list[list[list[int]]]:
    """All at the same time."""
    with ThreadPoolExecutor(len(asks)) as pool:
        return list(pool.map(lambda ask: tokens(url, ask), asks))


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for something that no message announces."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


# --------------------------------------------------------------------------------------------- servers


@dataclass(frozen=True, slots=True)
class Server:
    """A running ``vllm serve``."""

    group: int
    """Its process group."""
    url: str

    def metric(self, name: str, label: str = "") -> float:
        """A sum over all labels, or over those with a certain text."""
        with urlopen(f"{self.url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        matching = (line for line in lines if re.match(rf"vllm:{name}(_total)?{{", line) and label in line)
        return sum(float(line.rsplit(" ", 1)[1]) for line in matching)

    def num_fetched(self) -> float:
        return self.metric("prompt_tokens_by_source", 'source="external_kv_transfer"')

    def is_idle(self) -> bool:
        return self.metric("num_requests_running") + self.metric("num_requests_waiting") == 0


class Pair:
    """A run of ``serve.sh --stay``."""

    def __init__(self, log: Path, **env: str) -> None:
        self.log = log
        ours = {"BIN": os.path.dirname(sys.executable), "PYTHONPATH": str(ROOT / "src")}
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                # A background job of a shell ignores Ctrl-C, and hands that on.
                ["env", "--default-signal=INT", EXAMPLE / "serve.sh", "--stay"],
                env={**os.environ, "MODEL": "", "PORT": "", **ours, **env},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
            )

    def wait_ready(self) -> None:
        until(
            lambda: self.process.poll() is not None or "==> serving on" in self.log.read_text(),
            "serve.sh serves",
        )
        assert self.process.poll() is None, self.log.read_text()

    def server(self, name: str) -> Server:
        said = rf"==> {name} \(process group (\d+)\) is ready on port (\d+)"
        ((group, port),) = re.findall(said, self.log.read_text())
        return Server(int(group), f"http://127.0.0.1:{port}")

    def end(self, number: int) -> int:
        self.process.send_signal(number)
        return self.process.wait(SECONDS)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    logs = tmp_path_factory.mktemp("serve")
    both = (
        Pair(logs / "64to32.log"),
        Pair(logs / "32to64.log", PREFILL_ARGS="--block-size 32", DECODE_ARGS="--block-size 64"),
    )
    try:
        for pair in both:
            pair.wait_ready()
        yield both
    finally:
        for pair in both:
            if pair.process.poll() is None:
                pair.end(signal.SIGTERM)


@pytest.fixture(scope="module")
def prefill(pairs):
    return [pair.server("prefill") for pair in pairs]


@pytest.fixture(scope="module")
def decode(pairs):
    return [pair.server("decode") for pair in pairs]


@pytest.fixture(scope="module")
def expected(prefill):
    """What one server answers alone, one question at a time."""
    return [tokens(prefill[0].url, ask) for ask in EIGHT]


@contextlib.contextmanager
def running(*command: str, log: Path, health: str, port_after: str) -> Iterator[str]:
    """A router, and its address. The port is its last argument, after some text."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = str(probe.getsockname()[1])
    url = f"http://127.0.0.1:{port}"
    with (
        log.open("wb") as sink,
        subprocess.Popen([*command, f"{port_after}{port}"], stdout=sink, stderr=sink) as router,
    ):
        try:
            until(lambda: router.poll() is not None or answers(url + health), f"{command[1]} answers")
            assert router.poll() is None, log.read_text()
            yield url
        finally:
            router.terminate()


def answers(url: str) -> bool:
    """Whether anything answers there, good or bad."""
    try:
        with urlopen(url, timeout=5):
            return True
    except HTTPError as problem:
        problem.close()
        return True
    except OSError:
        return False


def proxy(prefill: Sequence[str], decode: Sequence[str], log: Path) -> contextlib.AbstractContextManager[str]:
    servers = [f"--{kind}={url}" for kind, urls in (("prefill", prefill), ("decode", decode)) for url in urls]
    command = (sys.executable, "-m", "kvferry", "proxy", *servers)
    return running(*command, log=log, health="/live", port_after="--listen=127.0.0.1:")


@pytest.fixture(scope="module")
def router(prefill, decode, tmp_path_factory):
    """Our proxy, before all four servers."""
    log = tmp_path_factory.mktemp("router") / "proxy.log"
    with proxy([s.url for s in prefill], [s.url for s in decode], log) as url:
        yield url


# ---------------------------------------------------------------------------------------------- cases


def test_the_script_says_that_the_answers_are_one_servers_own(pairs):
    """And that the decode servers had fetched all of both prompts."""
    for pair in pairs:
        said = r"EQUAL: all 32 tokens equal .* kvferry moved [1-9]\d+ prompt tokens, 0 were computed again\n"
        assert re.search(said, pair.log.read_text())


def test_its_client_is_not_content_with_equal_tokens(prefill, decode):
    """Where nothing was moved they are equal without kvferry."""
    command = [sys.executable, EXAMPLE / "ask.py", prefill[0].url, prefill[0].url, decode[0].url]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert ran.returncode == 1
    assert ran.stdout.splitlines()[-1].startswith("NOT MOVED: the tokens are equal, but")


def test_eight_requests_at_a_time(router, decode, expected):
    """R002-15: servers of a kind take turns, and every token of every prompt is fetched."""
    before = [server.num_fetched() for server in decode]
    assert tokens_of_all(router, EIGHT) == expected
    fetched = [server.num_fetched() - then for server, then in zip(decode, before, strict=True)]
    assert min(fetched) > 0
    assert sum(fetched) == NUM_PROMPT_TOKENS


def test_eight_requests_through_vllms_own_proxy(prefill, decode, expected, toy_proxy, tmp_path):
    """Unchanged: what routes for vLLM's connector routes for kvferry."""
    command = [sys.executable, str(toy_proxy)]
    for kind, servers in (("prefiller", prefill), ("decoder", decode)):
        command += [f"--{kind}-hosts", *("127.0.0.1" for _ in servers)]
        command += [f"--{kind}-ports", *(server.url.rpartition(":")[2] for server in servers)]
    before = sum(server.num_fetched() for server in decode)
    log = tmp_path / "toy.log"
    with running(*command, log=log, health="/healthcheck", port_after="--port=") as url:
        assert tokens_of_all(url, EIGHT) == expected
    assert sum(server.num_fetched() for server in decode) - before == NUM_PROMPT_TOKENS


def test_what_the_caches_hold_already_is_not_fetched(router, prefill, decode, expected):
    """Prefix caching on both sides: the same questions again and again."""
    asks = [Ask(ask.path, {**ask.body, "cache_salt": "the same"}) for ask in EIGHT]
    before = sum(server.num_fetched() for server in decode)
    for _ in range(3):
        assert tokens_of_all(router, asks) == expected
    for servers in (prefill, decode):
        assert all(server.metric("prefix_cache_hits") > 0 for server in servers)
    assert sum(server.num_fetched() for server in decode) - before < 3 * NUM_PROMPT_TOKENS


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2, "temperature": 0.7, "seed": 5},
        {"prompt": ["One prompt.", "Another."]},
        {"prompt_logprobs": 1},
        {"echo": True, "logprobs": 1},
    ],
    ids=["n", "prompts", "prompt_logprobs", "echo"],
)
def test_what_does_not_fit_one_ticket_is_for_the_decode_server_alone(router, prefill, more):
    ask = Ask.prompt(80, **more)
    assert tokens(router, ask) == tokens(prefill[0].url, ask)


def test_models_and_health(router, prefill, decode):
    with urlopen(f"{router}/v1/models") as answer:
        assert [model["id"] for model in json.load(answer)["data"]] == ["tiny"]
    with urlopen(f"{router}/health") as answer:
        assert json.load(answer) == {
            "prefill": {"ready": len(prefill), "servers": len(prefill)},
            "decode": {"ready": len(decode), "servers": len(decode)},
        }


def test_a_server_describes_itself_for_a_plan(prefill, decode):
    def plan(src: Server, dst: Server) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kvferry", "plan", "--src", src.url, "--dst", dst.url, "--json"]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    ran = plan(*prefill)
    assert ran.returncode == 0, ran.stderr
    ends = json.loads(ran.stdout)
    assert {*ends["src"]["groups"].values()} == {64}
    assert {*ends["dst"]["groups"].values()} == {32}
    ran = plan(prefill[0], decode[0])
    assert ran.returncode == 2
    assert f"{decode[0].url}: it returned no ticket" in ran.stderr


def test_a_refusal_is_passed_on(router):
    with pytest.raises(Refused, match=r"404.*`mouse` does not exist"):
        tokens(router, Ask.prompt(9, model="mouse"))
    with pytest.raises(Refused, match=r"400.*not JSON"):
        send(Request(f"{router}/v1/completions", b"{"))
    with pytest.raises(Refused, match=r"400.*not a JSON object"):
        send(Request(f"{router}/v1/completions", b"[]"))


def test_a_server_that_is_not_there_is_named(prefill, decode, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as probe:
        nowhere = f"http://127.0.0.1:{probe.getsockname()[1]}"
    for missing, pair in (("prefill", (nowhere, decode[0].url)), ("decode", (prefill[0].url, nowhere))):
        with proxy(pair[:1], pair[1:], tmp_path / missing) as url:
            with pytest.raises(Refused, match=f"502.*{missing} server {nowhere}"):
                tokens(url, EIGHT[0])
            with pytest.raises(Refused, match=f'503.*"{nowhere}": false'):
                send(Request(f"{url}/health"))


def test_a_client_that_hangs_up_while_decoding_ends_the_request(router, decode):
    before = sum(server.metric("generation_tokens") for server in decode)
    with post(router, Ask.prompt(40, max_tokens=900, stream=True)) as answer:
        next(events(answer))
        assert not all(server.is_idle() for server in decode)
    until(lambda: all(server.is_idle() for server in decode), "the decode servers are idle")
    assert sum(server.metric("generation_tokens") for server in decode) - before < 900


def test_a_client_that_hangs_up_while_prefilling_reaches_no_decode_server(prefill, decode, tmp_path):
    """The prefill server sleeps, so that the client is surely gone before it answers."""
    with proxy([prefill[1].url], [decode[1].url], tmp_path / "proxy.log") as url:
        before = prefill[1].metric("request_success"), decode[1].metric("prompt_tokens")
        os.killpg(prefill[1].group, signal.SIGSTOP)
        try:
            with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as client:
                body = json.dumps({"model": "tiny", "prompt": "Too late.", "max_tokens": 3})
                head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
                client.sendall((head + body).encode())
                time.sleep(1)
        finally:
            os.killpg(prefill[1].group, signal.SIGCONT)
        assert tokens(url, EIGHT[0])
        until(prefill[1].is_idle, "the prefill server is idle")
        assert prefill[1].metric("request_success") - before[0] == 1
        assert decode[1].metric("prompt_tokens") - before[1] == len(EIGHT[0].body["prompt"])


def test_a_decode_server_that_is_killed_fails_its_own_requests_only(router, decode, prefill, expected):
    """Those under way get an error in the stream, later ones another server; the others never notice."""
    long = [Ask.prompt(40 + number, max_tokens=900, stream=True) for number in range(4)]
    with ThreadPoolExecutor(8) as pool:
        under_way = [pool.submit(tokens, router, ask) for ask in long]
        until(lambda: all(server.metric("num_requests_running") == 2 for server in decode), "two each")
        os.killpg(decode[1].group, signal.SIGKILL)
        ends = [future.exception(SECONDS) for future in under_way]
        right = [pool.submit(tokens, prefill[0].url, ask) for ask in long]
        for end, future, alone in zip(ends, under_way, right, strict=True):
            assert end or future.result() == alone.result()
    assert [type(end) for end in ends if end] == [Refused, Refused]
    assert all(re.search("502.*decode server (closed|ended)", str(end)) for end in ends if end)

    assert tokens_of_all(router, EIGHT) == expected
    with urlopen(f"{router}/health") as answer:
        assert json.load(answer)["decode"] == {"ready": 1, "servers": 2}


def test_the_script_ends_all_that_it_started(pairs, prefill, decode):
    """By Ctrl-C and by SIGTERM; one of its servers is dead already."""
    for pair, number in zip(pairs, (signal.SIGINT, signal.SIGTERM), strict=True):
        assert pair.end(number) == 128 + number
        assert pair.log.read_text().endswith("==> all ended\n")
    for server in (*prefill, *decode):
        with pytest.raises(ProcessLookupError):
            os.killpg(server.group, 0)


@pytest.fixture(scope="module")
def toy_proxy(tmp_path_factory):
    """vLLM's own, from its source distribution: the wheel has no tests."""
    if VLLM_SOURCES in os.environ:
        return Path(os.environ[VLLM_SOURCES]) / TOY_PROXY
    fetched = subprocess.run(
        [sys.executable, "-c", FETCH_SDIST], capture_output=True, check=False, timeout=SECONDS
    )
    if fetched.returncode or hashlib.sha256(fetched.stdout).hexdigest() != SDIST_SHA256:
        why = fetched.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        pytest.skip(
            f"vLLM's source distribution could not be fetched ({why}), and {VLLM_SOURCES} names no folder"
        )
    home = tmp_path_factory.mktemp("vllm")
    with tarfile.open(fileobj=io.BytesIO(fetched.stdout)) as archive:
        archive.extract(f"vllm-0.32.0/{TOY_PROXY}", home, filter="data")
    return home / "vllm-0.32.0" / TOY_PROXY
