"""The proxy's own metrics, for Prometheus."""

from __future__ import annotations

import logging
import re
import time
import uuid
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

log = logging.getLogger("kvferry.proxy")

PLAIN = re.compile(r"[A-Za-z0-9._-]{1,64}")


class RequestOutcome(StrEnum):
    ANSWERED = "answered"
    """The whole answer was sent."""
    REFUSED = "refused"
    """The proxy or a server rejected the request."""
    BUSY = "busy"
    PREFILL_FAILED = "prefill-failed"
    DECODE_FAILED = "decode-failed"
    """A server failed before the first byte of the answer."""
    BROKE_OFF = "broke-off"
    """A decode server failed during its answer."""
    CLIENT_GONE = "client-gone"
    """The client disconnected, or did not accept its answer."""
    CUT_SHORT = "cut-short"
    """The proxy stopped before the request ended."""


def request_name(asked: str) -> str:
    """A unique name, with the client's name as a prefix.

    >>> request_name("order-17").startswith("order-17-"), len(request_name("no good name\\n"))
    (True, 16)
    """
    own = uuid.uuid4().hex[:16]
    return f"{asked}-{own}" if PLAIN.fullmatch(asked) else own


@dataclass(slots=True)
class RequestAccount:
    path: str
    name: str
    outcome: RequestOutcome = RequestOutcome.CLIENT_GONE
    """The default: a request whose client disconnects is cancelled."""
    status: int = 0
    """The HTTP status of the answer; 0: none."""
    prefill: str = ""
    decode: str = ""
    num_retries: int = 0
    was_seen: bool = False
    """Whether a prefill server that failed may have seen the request."""
    body_bytes: int = 0
    """Of the body, in memory."""
    started: float = field(default_factory=time.monotonic)
    prefilled: float = 0.0
    """When the ticket arrived, by the same clock; 0: never."""
    first_byte: float = 0.0

    def since(self, moment: float) -> float:
        return moment - self.started

    def line(self) -> str:
        parts = [f"{self.path} {self.status or 'no answer'} {self.outcome}", f"request {self.name}"]
        if self.prefill:
            took = f" in {self.since(self.prefilled):.3f} s" if self.prefilled else ""
            parts.append(f"prefill {self.prefill}{took}")
        if self.decode:
            first = f", first byte after {self.since(self.first_byte):.3f} s" if self.first_byte else ""
            parts.append(f"decode {self.decode}{first}")
        if self.num_retries:
            parts.append(f"{self.num_retries} {'retry' if self.num_retries == 1 else 'retries'}")
        return "; ".join((*parts, f"{self.since(time.monotonic()):.3f} s in all"))


SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class ProxyMetrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        self._requests = counter(
            "kvferry_proxy_requests", "Finished requests, by outcome", ["path", "outcome"]
        )
        self._seconds = Histogram(
            "kvferry_proxy_seconds",
            "Seconds from a request's arrival to: its ticket, its first byte, its end",
            ["until"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.under_way = gauge("kvferry_proxy_requests_under_way", "Requests in progress")
        self.aborted = counter(
            "kvferry_proxy_aborted_connections",
            "Connections closed by the proxy, by reason: no-request, answer-not-taken, too-many",
            ["reason"],
        )
        self.asked = counter(
            "kvferry_proxy_server_requests",
            "Requests to a server, by result: ok, refused, failed, unreachable",
            ["role", "server", "result"],
        )
        self.ready = gauge("kvferry_proxy_server_ready", "1 while a server is ready", ["role", "server"])
        self.retries = counter("kvferry_proxy_retries", "Requests that were sent to another server", ["role"])
        self.stripped = counter(
            "kvferry_proxy_stripped_requests",
            "Client requests from which the proxy removed fields such as kv_transfer_params",
        )
        self.without_ticket = counter(
            "kvferry_proxy_without_ticket",
            "Requests sent to a decode server without a ticket: does-not-fit, none-given, no-prefill-server",
            ["reason"],
        )
        self.turns = counter(
            "kvferry_proxy_turns",
            "Prompts looked up among the offers of earlier turns, by result: hit, miss",
            ["result"],
        )
        self.offers = gauge("kvferry_proxy_offers", "Stored offers for a next turn, by key")
        self.overlaps = counter(
            "kvferry_proxy_overlaps",
            "Requests that were sent to both servers at once, by result: ok, prefill-failed, decode-failed",
            ["result"],
        )

    def count(self, account: RequestAccount) -> None:
        self._requests.labels(account.path, account.outcome).inc()
        moments = {"ticket": account.prefilled, "first-byte": account.first_byte}
        if account.outcome is RequestOutcome.ANSWERED:
            moments["end"] = time.monotonic()
        for name, moment in moments.items():
            if moment:
                self._seconds.labels(name).observe(account.since(moment))

    def text(self) -> bytes:
        return generate_latest(self.registry)
