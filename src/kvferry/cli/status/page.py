"""``kvferry status --http``: the same tables as a small page that can only be read.

By the standard library's server: three paths and a handful of people need no package beyond those of the
command line. The page has everything in it and calls nobody but this server. A foreign page in the reader's
browser learns nothing: only hosts that no name server could have invented are answered.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

from kvferry.cli.status.board import board
from kvferry.cli.status.watch import ShowEngines, as_object
from kvferry.cli.status.watched import Watched
from kvferry.errors import SpecError

MAX_CONNECTIONS = 32
CALLER_SECONDS = 10.0
"""How long a caller may take to ask and to take what it is told, all in all."""
MAX_ROWS = 100

LOCAL_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost")


def is_loopback(host: str) -> bool:
    """Whether only this host can call an address.

    >>> is_loopback("127.0.0.1"), is_loopback("::1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() in LOCAL_NAMES


def is_our_host(header: str, name: str) -> bool:
    """Whether a request was meant for this server: its Host is an IP address, localhost, or ``name``.

    A page of somebody else's may let its own name point here (DNS rebinding), and would then be asked for
    what is shown here; it cannot name an address. Ports are not compared: they differ behind a tunnel.

    >>> is_our_host("127.0.0.1:8080", ""), is_our_host("localhost", ""), is_our_host("[::1]:80", "")
    (True, True, True)
    >>> is_our_host("evil.example", ""), is_our_host("gpu-7:80", "gpu-7"), is_our_host("", "")
    (False, True, False)
    """
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::[0-9]{1,5})?", header)
    if not found:
        return False
    host = (found[1] or found[2]).lower()
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host in (*LOCAL_NAMES, name.lower())
    return True


def page() -> bytes:
    """The page, whole."""
    return files("kvferry.cli.status").joinpath("page.html").read_bytes()


def policy(html: bytes) -> str:
    """What a browser may do with the page: its own script and style, and calls to this server."""
    (script,) = re.findall(rb"<script>(.*?)</script>", html, re.DOTALL)
    (style,) = re.findall(rb"<style>(.*?)</style>", html, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(text).digest()).decode() for text in (script, style)]
    return (
        f"default-src 'none'; script-src 'sha256-{hashes[0]}'; style-src 'sha256-{hashes[1]}';"
        " connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class StatusServer(ThreadingHTTPServer):
    """Tells what was seen last. Callers can only read, and at most so many at once."""

    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, host: str, port: int, every: float) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._host, self._every = host, every
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        html = page()
        self.headers = {"Content-Security-Policy": policy(html), **HEADERS}
        self._told: dict[str, tuple[str, bytes]] = {"/": ("text/html; charset=utf-8", html)}
        self.show(Watched(), 0.0)
        try:
            super().__init__((host, port), _Handler)
        except OSError as error:
            raise SpecError(f"--http {host}:{port}: {error.strerror or error}") from None

    @property
    def url(self) -> str:
        """What to type into a browser."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self.server_port}/"

    def show(self, known: Watched, now: float) -> None:
        """Tell this from now on."""
        shown = asdict(board(known, now, MAX_ROWS))
        shown |= {"every": self._every, "clock": time.strftime("%H:%M:%S")}
        self._told = {
            "/": self._told["/"],
            "/board.json": ("application/json", _encoded(shown)),
            "/status.json": ("application/json", _encoded(as_object(known, now))),
        }

    def told(self, path: str) -> tuple[str, bytes] | None:
        """The type and the bytes of what is at a path."""
        return self._told.get(path)

    def accepts(self, header: str) -> bool:
        """Whether a request with such a Host was meant for this server."""
        return is_our_host(header, self._host)

    def process_request(self, request: Any, client_address: Any) -> None:
        """In a thread of its own; a caller too many is sent away."""
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """One caller, from its first byte to its last; one that dawdles is cut off."""
        cut_off = threading.Timer(CALLER_SECONDS, _shut, (request,))
        cut_off.daemon = True
        cut_off.start()
        try:
            super().process_request_thread(request, client_address)
        finally:
            cut_off.cancel()
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that goes away in the middle is nobody's business."""


def _shut(request: socket.socket) -> None:
    with suppress(OSError):  # it has gone by itself
        request.shutdown(socket.SHUT_RDWR)


HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def _encoded(value: object) -> bytes:
    return json.dumps(value, default=sorted).encode()


class _Handler(BaseHTTPRequestHandler):
    server: StatusServer
    server_version, sys_version = "kvferry", ""

    def do_GET(self) -> None:
        if not self.server.accepts(self.headers.get("Host", "")):
            self._tell(421, "text/plain", b"This host is not known here: call it by its IP address.\n")
        elif told := self.server.told(self.path.partition("?")[0]):
            self._tell(200, *told)
        else:
            self._tell(404, "text/plain", b"There is only /, /board.json and /status.json.\n")

    do_HEAD = do_GET  # noqa: N815 - the server's word

    def _refuse(self) -> None:
        self._tell(405, "text/plain", b"This can only be read.\n")

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _refuse  # noqa: N815

    def _tell(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in self.server.headers.items():
            self.send_header(name, value)
        if status == 405:
            self.send_header("Allow", "GET, HEAD")
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nobody needs a line per second."""


@contextmanager
def served(server: StatusServer) -> Iterator[ShowEngines]:
    """Callers are answered while this lasts."""
    thread = threading.Thread(target=server.serve_forever, name="kvferry-status-http", daemon=True)
    thread.start()
    try:
        yield server.show
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
