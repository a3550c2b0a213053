"""Every socket that kvferry listens at, and every stream that it reads, is sent bytes that are wrong.

    python -m tests.fuzz.listeners 600              all of them, in turns, for ten minutes
    python -m tests.fuzz.listeners 60 streams       one of them

Each runs against processes of its own. While it is fuzzed, good loads (or requests) must go on, no byte of
the cache may be seen or changed, and the process may not grow.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import secrets
import select
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from kvferry.transport.exports import receive_descriptors
from kvferry.transport.stream_frames import HELLO, MAGIC
from kvferry.wire.secret import Purpose, Secret
from tests.fuzz.decoders import corpus
from tests.fuzz.mutations import mutated
from tests.hostile import zmtp
from tests.hostile.source_process import CANARY
from tests.hostile.world import MAX_STARVED_SECONDS, MORE_MEMORY, MORE_MIB, Fared, World, environment

CONNECT_SECONDS = 2.0
HOST = "127.0.0.1"

Try = Callable[[random.Random], None]
"""Does something bad once, within a fraction of a second."""


class CacheSeen(AssertionError):
    """Bytes of the cache came to somebody who has no ticket."""


@dataclass(frozen=True)
class Fuzzed:
    """What came of fuzzing one listener."""

    name: str
    num_tries: int
    seconds: float
    fared: Fared

    def __str__(self) -> str:
        fared = self.fared
        return (
            f"{self.name:22} {self.num_tries:8} tries in {self.seconds:4.0f} s; {fared.num_loads} good,"
            f" longest {fared.starved_seconds:.2f} s apart, {len(fared.errors)} failed;"
            f" {fared.grown_mib:+} MiB (peak {fared.peak_mib:+}), {fared.num_files} files"
            f" {'' if fared.is_fine else '  NOT FINE'}"
        )


def no_cache_in(data: bytes) -> None:
    if CANARY in data:
        raise CacheSeen(f"{data[:200]!r}")


def connected(address: str) -> socket.socket:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), CONNECT_SECONDS)


def say_and_hear(caller: socket.socket, pick: random.Random, data: bytes) -> None:
    """In as many pieces as it likes; what comes back is looked at; the end is of one of three kinds."""
    with caller, suppress(OSError):
        for _ in range(pick.randrange(1, 4)):
            at = pick.randrange(len(data) + 1)
            caller.sendall(data[:at])
            data = data[at:]
        caller.sendall(data)
        caller.settimeout(pick.choice((0.0, 0.001, 0.02)))
        with suppress(OSError):
            no_cache_in(caller.recv(1 << 16))
        match pick.randrange(3):
            case 0:
                caller.shutdown(socket.SHUT_WR)
            case 1:  # a reset
                caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            case _:
                pass


# ---------------------------------------------------------------------------------------------- ZeroMQ

CURVE_GREETING = zmtp.GREETING[:12] + b"CURVE".ljust(20, b"\0") + bytes(32)
CURVE_HELLO = b"\x04\xc8\x05HELLO\x01\x00" + bytes(72) + bytes(range(32)) + bytes(8) + bytes(80)
CURVE_INITIATE = b"\x06" + struct.pack(">Q", 257) + b"\x08INITIATE" + bytes(248)
READY = b"\x05READY" + zmtp.property_of(b"Socket-Type", b"DEALER") + zmtp.property_of(b"Identity", b"a name")
COMMANDS = (
    b"\x04\x07\x04PING\x00\x01",
    b"\x04\x05\x04PONG",
    b"\x04\x07\x05ERROR\x00",
    b"\x04\x0a\x09SUBSCRIBE",
    b"\x04" + bytes([len(READY)]) + READY,
)


def zmtp_bytes(pick: random.Random, messages: list[bytes]) -> bytes:
    """A conversation that is legal up to a point."""
    frames = [
        *(zmtp.frame(pick.choice(messages), has_more=pick.random() < 0.2) for _ in range(pick.randrange(4))),
        *pick.sample(COMMANDS, pick.randrange(3)),
    ]
    pick.shuffle(frames)
    parts = [
        pick.choice((zmtp.GREETING, CURVE_GREETING)),
        pick.choice((COMMANDS[-1], CURVE_HELLO + CURVE_INITIATE, b"")),
        *frames,
    ]
    match pick.randrange(8):
        case 0:
            return pick.randbytes(pick.randrange(1, 2000))
        case 1:
            return b"".join(parts)
        case 2:
            return b"".join(parts)[: pick.randrange(1, 400)]
        case 3:  # an old ZMTP
            return mutated(pick, pick.choice((b"\x01\x00", b"\xff" + bytes(8) + b"\x7f\x01\x05\x00\x00")))
        case _:
            chosen = pick.randrange(len(parts))
            parts[chosen] = mutated(pick, parts[chosen], CURVE_HELLO)
            return b"".join(parts)


def fuzz_zmtp(address: str, kind: str) -> Try:
    """Callers that speak ZMTP badly."""
    messages = corpus(kind)

    def one(pick: random.Random) -> None:
        with suppress(OSError):
            say_and_hear(connected(address), pick, zmtp_bytes(pick, messages))

    return one


def server_key(secret_file: str) -> bytes:
    key = Secret.from_text(Path(secret_file).read_text(encoding="ascii")).key(Purpose.CHANNEL)
    return bytes(zmq.curve_public(z85.encode(key)))


class MemberFuzz:
    """Callers that may talk, and say legal messages that were changed."""

    def __init__(self, address: str, kind: str, secret_file: str) -> None:
        self._address, self._messages, self._secret_file = address, corpus(kind), secret_file
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None

    def __call__(self, pick: random.Random) -> None:
        if self._socket is None or pick.random() < 0.01:
            if self._socket is not None:
                self._socket.close(0)
            self._socket = self._new()
        message = pick.choice(self._messages)
        if pick.random() < 0.9:
            message = mutated(pick, message, pick.choice(self._messages))
        frames = [message] if pick.random() < 0.95 else [message, b"", message]
        with suppress(zmq.Again):
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        with suppress(zmq.Again):
            while True:
                no_cache_in(self._socket.recv(zmq.NOBLOCK))
        time.sleep(0.0005)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close(0)
        self._context.term()

    def _new(self) -> zmq.Socket[bytes]:
        caller: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        caller.setsockopt(zmq.LINGER, 0)
        if self._secret_file:
            caller.curve_serverkey = server_key(self._secret_file)
            caller.curve_publickey, caller.curve_secretkey = zmq.curve_keypair()
        caller.connect(f"tcp://{self._address}")
        return caller


# --------------------------------------------------------------------------------------------- streams


class StreamFuzz:
    """Callers of the stream port: junk, names that nobody was told, names in pieces, and silence."""

    def __init__(self, address: str) -> None:
        self._address, self._silent = address, list[socket.socket]()

    def __call__(self, pick: random.Random) -> None:
        hello = HELLO.pack(MAGIC, pick.randbytes(16))
        data = pick.choice(
            (
                hello,
                hello[: pick.randrange(len(hello))],
                hello + pick.randbytes(pick.randrange(1, 2000)),
                mutated(pick, hello),
                pick.randbytes(pick.randrange(1, 5000)),
                zmtp.GREETING,
            )
        )
        with suppress(OSError):
            caller = connected(self._address)
            if pick.random() < 0.3:
                caller.sendall(data[: pick.randrange(len(hello))])
                self._silent.append(caller)
            else:
                say_and_hear(caller, pick, data)
        if len(self._silent) > 300:
            self.close()

    def close(self) -> None:
        for caller in self._silent:
            caller.close()
        self._silent.clear()


class BadLine:
    """Between a source's streams and its reader: changes what it passes on."""

    def __init__(self, streams: str) -> None:
        self._streams = streams
        self._server = socket.create_server((HOST, 0))
        self.address = f"tcp://{HOST}:{self._server.getsockname()[1]}"
        self.seed = 0
        self._open: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def cut(self) -> None:
        """Close what is open."""
        while self._open:
            with suppress(OSError):
                self._open.pop().shutdown(socket.SHUT_RDWR)  # its thread closes it

    def close(self) -> None:
        self.cut()
        self._server.shutdown(socket.SHUT_RDWR)  # closing alone would leave the thread in accept()
        self._server.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                reader, _ = self._server.accept()
                threading.Thread(target=self._pass_on, args=(reader,), daemon=True).start()

    def _pass_on(self, reader: socket.socket) -> None:
        pick = random.Random(self.seed)
        with reader, suppress(OSError), connected(self._streams) as source:
            self._open += [reader, source]
            while ready := select.select([reader, source], [], [], 10)[0]:
                if reader in ready:
                    if not (data := reader.recv(1 << 16)):
                        return
                    source.sendall(data)
                if source in ready:
                    if not (data := source.recv(pick.choice((1, 13, 100, 1 << 16)))):
                        return
                    if pick.random() < 0.3:
                        data = mutated(pick, data)
                    reader.sendall(data)
                    if pick.random() < 0.02:
                        return


class LyingSource:
    """A reader is told lies by the rank that it reads: by its answers, or by its streams."""

    def __init__(self, world: World, line: BadLine, *, is_sealed: bool) -> None:
        self._world, self._line, self._is_sealed = world, line, is_sealed

    def __call__(self, pick: random.Random) -> None:
        source, seed = self._world.source, pick.getrandbits(60)
        self._line.seed = seed
        if pick.random() < 0.7:
            source.ask(f"through {self._line.address}")
        else:
            source.ask(f"lie {seed}")
        source.ask("cut")
        for _ in range(pick.randrange(1, 4)):
            error = self._world.load()
            if self._is_sealed:
                assert error != "wrong bytes", f"seed {seed}"
        source.ask("through")
        source.ask("lie")
        source.ask("cut")
        self._line.cut()


# ------------------------------------------------------------------------------------------------ HTTP


class ModelServerStub(BaseHTTPRequestHandler):
    """A server behind the proxy."""

    protocol_version = "HTTP/1.1"
    ANSWER = json.dumps({"choices": [{"text": "a"}], "kv_transfer_params": {"kvferry_ticket": "t"}}).encode()

    def handle(self) -> None:
        with suppress(OSError):  # a client that goes away is not this server's affair
            super().handle()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(self.ANSWER)))
        self.end_headers()
        self.wfile.write(self.ANSWER)

    def log_message(self, *_: object) -> None:
        pass


class ProxyWorld:
    """``kvferry proxy`` in a process of its own, before a stub of a server."""

    def __init__(self, *before: str, host: str = HOST) -> None:
        self._stub = ThreadingHTTPServer((HOST, 0), ModelServerStub)
        self._stub.daemon_threads = True
        threading.Thread(target=self._stub.serve_forever, daemon=True).start()
        url = f"http://{HOST}:{self._stub.server_port}"
        command = [*before, sys.executable, "-m", "kvferry", "proxy", "--listen", f"{host}:0"]
        self._process = subprocess.Popen(
            [*command, "--prefill", url, "--decode", url], stderr=subprocess.PIPE, env=environment()
        )
        assert self._process.stderr is not None
        self._log = self._process.stderr
        found = None
        while not found:
            line = self._log.readline().decode()
            assert line, "the proxy has ended"
            found = re.search(r"listening on http://(\S+?)/v1", line)
        self.address = found[1]
        self._reading = threading.Thread(target=self._log.read, daemon=True)
        self._reading.start()
        for _ in range(20):
            assert not self.load()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def load(self) -> str:
        host, _, port = self.address.rpartition(":")
        caller = http.client.HTTPConnection(host, int(port), timeout=10)
        try:
            caller.request("POST", "/v1/completions", '{"prompt": "a"}', {"Content-Type": "application/json"})
            answer = caller.getresponse()
            answer.read()
            return "" if answer.status == 200 else f"status {answer.status}"
        except OSError as error:
            return str(error) or type(error).__name__
        finally:
            caller.close()

    def resident_mib(self) -> int:
        with suppress(OSError), open(f"/proc/{self._process.pid}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
        return 0

    @contextmanager
    def loading(self, pause: float = 0.1, *, more_mib: int = MORE_MIB) -> Iterator[Fared]:
        fared, is_over, before, peak = Fared(), threading.Event(), self.resident_mib(), 0

        def load_on() -> None:
            nonlocal peak
            good_at = time.monotonic()
            while self.is_alive:
                began = time.monotonic()
                is_last, error = is_over.is_set(), self.load()
                now, peak = time.monotonic(), max(peak, self.resident_mib())
                fared.starved_seconds = max(fared.starved_seconds, now - good_at)
                if error:
                    fared.errors.append(error)
                else:
                    fared.seconds.append(now - began)
                    good_at = now
                if is_last and (not error or now - good_at > 3 * MAX_STARVED_SECONDS):
                    return
                is_over.wait(pause)

        thread = threading.Thread(target=load_on)
        thread.start()
        try:
            yield fared
        finally:
            is_over.set()
            thread.join()
            fared.is_alive = self.is_alive
            after = self.resident_mib()
            fared.grown_mib, fared.peak_mib = after - before, peak - before
            fared.is_too_large = after > before * MORE_MEMORY + more_mib
            with suppress(OSError):
                fared.num_files = len(os.listdir(f"/proc/{self._process.pid}/fd"))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reading.join()
        self._log.close()
        self._stub.shutdown()
        self._stub.server_close()


REQUESTS = (
    b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 15\r\n\r\n{"prompt": "a"}',
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    b'f\r\n{"prompt": "a"}\r\n0\r\n\r\n',
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /metrics HTTP/1.0\r\n\r\n",
    b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: keep-alive\r\n\r\n" * 3,
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n{}",
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)


def fuzz_http(address: str) -> Try:
    def one(pick: random.Random) -> None:
        data = pick.choice(REQUESTS)
        if pick.random() < 0.9:
            data = mutated(pick, data, pick.choice(REQUESTS))
        if pick.random() < 0.1:
            data = pick.randbytes(pick.randrange(1, 3000))
        with suppress(OSError):
            say_and_hear(connected(address), pick, data)

    return one


# ------------------------------------------------------------------------------------------------ unix


class UnixFuzz:
    """Callers of a unix socket that say what they should not, or leave at once."""

    def __init__(self, address: str, is_good: Callable[[], bool]) -> None:
        self._address, self._is_good, self._num = address, is_good, 0

    def __call__(self, pick: random.Random) -> None:
        self._num += 1
        if self._num % 100 == 0:
            began = time.monotonic()
            assert self._is_good(), "a good caller was not served"
            assert time.monotonic() - began < MAX_STARVED_SECONDS
        caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        caller.settimeout(CONNECT_SECONDS)
        with suppress(OSError):
            caller.connect(self._address)
            say_and_hear(caller, pick, pick.randbytes(pick.choice((0, 1, 31, 32, 33, 64, 3000))))
        caller.close()


# -------------------------------------------------------------------------------------------- running


def hammer(one: Try, seed: int, seconds: float) -> int:
    """Again and again; each try has a seed of its own, which is named if it fails."""
    end, num_tries = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        pick = random.Random(f"{seed} {num_tries}")
        try:
            one(pick)
        except AssertionError as error:
            raise AssertionError(f"try {num_tries} of seed {seed}: {error}") from error
        num_tries += 1
    return num_tries


def secret_in(folder: str) -> str:
    path = Path(folder) / "secret"
    path.write_text(secrets.token_hex(32), encoding="ascii")
    path.chmod(0o600)
    return str(path)


def _engine(stack: ExitStack, *, is_secret: bool, **settings: str) -> tuple[World, str]:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    secret_file = secret_in(folder) if is_secret else ""
    world = World(HOST, environment(secret_file) | settings, logs=Path(folder))
    stack.callback(world.close)
    return world, secret_file


def _control(which: str, *, is_secret: bool, is_member: bool) -> Callable[[ExitStack], tuple[Any, Try]]:
    def start(stack: ExitStack) -> tuple[Any, Try]:
        world, secret_file = _engine(stack, is_secret=is_secret)
        kind = {"authority": "to-authority", "rank": "to-rank"}[which]
        address = world.addresses[which]
        if not is_member:
            return world, fuzz_zmtp(address, kind)
        member = MemberFuzz(address, kind, secret_file)
        stack.callback(member.close)
        return world, member

    return start


def _streams(stack: ExitStack) -> tuple[Any, Try]:
    world, _ = _engine(stack, is_secret=True)
    callers = StreamFuzz(world.addresses["streams"])
    stack.callback(callers.close)
    return world, callers


def _lying(*, is_secret: bool) -> Callable[[ExitStack], tuple[Any, Try]]:
    def start(stack: ExitStack) -> tuple[Any, Try]:
        world, _ = _engine(stack, is_secret=is_secret, HOSTILE_ANSWER_SECONDS="0.3")
        line = BadLine(world.addresses["streams"])
        stack.callback(line.close)
        return world, LyingSource(world, line, is_sealed=is_secret)

    return start


def _proxy(stack: ExitStack) -> tuple[Any, Try]:
    world = ProxyWorld()
    stack.callback(world.close)
    return world, fuzz_http(world.address)


def _status(stack: ExitStack) -> tuple[Any, Try]:
    world, _ = _engine(stack, is_secret=True)
    from kvferry.endpoint.status import read_status, sockets

    (path,) = (path for path in sockets() if f"-{world.source.pid}-" in path.name)
    return world, UnixFuzz(str(path), lambda: "error" not in read_status(path))


def _descriptors(stack: ExitStack) -> tuple[Any, Try]:
    world, _ = _engine(stack, is_secret=True)
    name, token = world.source.ask("descriptors").split()

    def is_good() -> bool:
        (descriptor,) = receive_descriptors(name, token, 1)
        os.close(descriptor)
        return True

    return world, UnixFuzz(f"\0{name}", is_good)


LISTENERS: dict[str, Callable[[ExitStack], tuple[Any, Try]]] = {
    "authority": _control("authority", is_secret=False, is_member=False),
    "authority-secret": _control("authority", is_secret=True, is_member=False),
    "authority-member": _control("authority", is_secret=True, is_member=True),
    "rank": _control("rank", is_secret=False, is_member=False),
    "rank-secret": _control("rank", is_secret=True, is_member=False),
    "rank-member": _control("rank", is_secret=True, is_member=True),
    "streams": _streams,
    "reader": _lying(is_secret=False),
    "reader-secret": _lying(is_secret=True),
    "proxy": _proxy,
    "status": _status,
    "descriptors": _descriptors,
}
"""What is fuzzed; ``-secret``: by those who do not know the secret, ``-member``: by those who do."""


def fuzz(name: str, seconds: float, seed: int = 0) -> Fuzzed:
    """Fuzz one listener, with good loads meanwhile."""
    with ExitStack() as stack:
        world, one = LISTENERS[name](stack)
        began = time.monotonic()
        if isinstance(one, LyingSource):
            return _fuzz_reader(name, world, one, seed, seconds)
        with world.loading(0.3) as fared:
            num_tries = hammer(one, seed, seconds)
        return Fuzzed(name, num_tries, time.monotonic() - began, fared)


def _fuzz_reader(name: str, world: World, one: LyingSource, seed: int, seconds: float) -> Fuzzed:
    """The source lies to its one reader; each lie is followed by a load without."""
    before, fared, began, num_tries = world.state(), Fared(), time.monotonic(), 0
    first = reader_mib(world)
    while time.monotonic() < began + seconds and world.reader.is_alive:
        num_tries += 1
        one(random.Random(f"{seed} {num_tries}"))
        asked = time.monotonic()
        if error := world.load():
            error = world.load()  # the first may find its stream cut
            fared.errors.append(error) if error else None
        took = time.monotonic() - asked
        fared.starved_seconds = max(fared.starved_seconds, took)
        fared.seconds += [] if error else [took]
    fared.is_alive = world.source.is_alive and world.reader.is_alive
    fared.grown_mib = reader_mib(world) - first
    fared.is_too_large = fared.grown_mib > first * 0.1 + 32
    after = world.state()
    fared.is_written, fared.num_files = after["is_written"], after["files"]
    fared.peak_mib = max(0, after["peak"] - before["rss"])
    return Fuzzed(name, num_tries, time.monotonic() - began, fared)


def reader_mib(world: World) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{world.reader.pid}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
    return 0


def main() -> int:
    seconds, names = float(sys.argv[1]), sys.argv[2:] or [*LISTENERS]
    are_fine = True
    for name in names:
        fuzzed = fuzz(name, seconds / len(names), seed=random.randrange(1 << 30))
        print(replace(fuzzed), flush=True)
        if fuzzed.fared.errors:
            print(f"    {sorted({*fuzzed.fared.errors})[:3]}", flush=True)
        are_fine &= fuzzed.fared.is_fine
    return 0 if are_fine else 1


if __name__ == "__main__":
    sys.exit(main())
