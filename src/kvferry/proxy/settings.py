"""Addresses and limits of ``kvferry proxy``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

from kvferry.errors import SpecError


class Role(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class ProxyLimits:
    connect_seconds: float = 5.0
    """To connect to a server."""
    prefill_seconds: float = 600.0
    """Until a prefill server answers."""
    decode_seconds: float = 600.0
    """Until a decode server's first byte, and between two."""
    client_seconds: float = 60.0
    """For a client's headers, for its body, and to accept a part of the answer."""
    drain_seconds: float = 30.0
    """Time for running requests after a signal: as long as Kubernetes waits for a pod by default."""
    max_body_bytes: int = 16 * 2**20
    max_requests: int = 4096
    """Concurrent requests: more than the engines of one proxy batch, within the usual limit of files."""


@dataclass(frozen=True, slots=True)
class ProxySettings:
    host: str
    port: int
    """0: any free port."""
    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    limits: ProxyLimits = ProxyLimits()
    is_falling_back: bool = True
    """Whether decode servers compute prompts if no prefill server is reachable."""
    has_conversations: bool = True
    """Whether a decode server's offer is passed to the prefill of the next turn."""
    is_overlapping: bool = True
    """Whether decode servers read prefills while they run, if both support it."""

    def urls(self, role: Role) -> tuple[str, ...]:
        return self.prefill if role is Role.PREFILL else self.decode


def server_urls(role: Role, given: Sequence[str]) -> tuple[str, ...]:
    """The addresses of ``--prefill`` or ``--decode``, checked.

    >>> server_urls(Role.PREFILL, ["http://10.0.0.7:8100/", "https://gpu-3"])
    ('http://10.0.0.7:8100', 'https://gpu-3')
    >>> server_urls(Role.DECODE, ["10.0.0.8:8200"])
    Traceback (most recent call last):
    kvferry.errors.SpecError: --decode 10.0.0.8:8200: the address must start with http:// or https://, such as
        http://10.0.0.8:8200
    """
    urls = tuple(_server_url(f"--{role} {url}", url) for url in given)
    if not urls:
        raise SpecError(f"--{role}: no server is given; pass --{role} http://HOST:PORT at least once")
    for url in urls:
        if urls.count(url) > 1:
            raise SpecError(f"--{role} {url}: named twice; name each server once")
    return urls


def _server_url(place: str, text: str) -> str:
    if not text.startswith(("http://", "https://")):
        example = f"http://{text.rpartition('://')[2] or 'HOST:PORT'}"
        raise SpecError(f"{place}: the address must start with http:// or https://, such as {example}")
    try:
        parts = urlsplit(text)
        port = parts.port
        (parts.hostname or "").encode("idna")  # as the resolver does
    except UnicodeError:
        raise SpecError(f"{place}: a part of the host name is empty or has more than 63 characters") from None
    except ValueError as error:
        raise SpecError(f"{place}: {error}") from None
    if not parts.hostname or port == 0:
        raise SpecError(f"{place}: an address needs a host and a port, such as http://10.0.0.7:8100")
    if parts.username is not None or parts.query or parts.fragment:
        raise SpecError(f"{place}: an address must not contain a user name, '?' or '#'")
    if parts.path.rstrip("/").endswith("/v1"):
        raise SpecError(f"{place}: leave out /v1; the proxy adds it")
    return text.rstrip("/")


def listen_address(text: str) -> tuple[str, int]:
    """Host and port of ``--listen``.

    >>> listen_address("127.0.0.1:8000"), listen_address("[::]:0")
    (('127.0.0.1', 8000), ('::', 0))
    >>> listen_address("8000")
    Traceback (most recent call last):
    kvferry.errors.SpecError: --listen 8000: expected HOST:PORT, such as 127.0.0.1:8000
    """
    host, _, port = text.rpartition(":")
    is_number = port.isascii() and port.isdigit() and int(port) < 1 << 16
    is_bare_v6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not host or not is_number or is_bare_v6 or "/" in host:
        raise SpecError(f"--listen {text}: expected HOST:PORT, such as 127.0.0.1:8000")
    return host.strip("[]"), int(port)
