"""The proxy's own metrics, for Prometheus."""

from __future__ import annotations

import time
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvferry.proxy.account import RequestAccount, RequestOutcome

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class ProxyMetrics:
    """What an operator watches of a proxy."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        self._requests = counter(
            "kvferry_proxy_requests", "Requests that ended, by outcome", ["path", "outcome"]
        )
        self._seconds = Histogram(
            "kvferry_proxy_seconds",
            "Seconds from a request's arrival to: its ticket, its first byte, its end",
            ["until"],
            buckets=SECONDS,
            registry=self.registry,
        )
        self.under_way = gauge("kvferry_proxy_requests_under_way", "Requests that have not ended")
        self.aborted = counter(
            "kvferry_proxy_aborted_connections",
            "Connections that were closed: no-request, answer-not-taken, too-many",
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
            "Requests with fields that are not a client's to send, which were removed",
        )
        self.without_ticket = counter(
            "kvferry_proxy_without_ticket",
            "Requests that a decode server got without a ticket: they do not fit one, or none was given",
            ["reason"],
        )

    def count(self, account: RequestAccount) -> None:
        """A request has ended."""
        self._requests.labels(account.path, account.outcome).inc()
        moments = {"ticket": account.prefilled, "first-byte": account.first_byte}
        if account.outcome is RequestOutcome.ANSWERED:
            moments["end"] = time.monotonic()
        for name, moment in moments.items():
            if moment:
                self._seconds.labels(name).observe(account.since(moment))

    def text(self) -> bytes:
        """All of them, the way Prometheus reads them."""
        return generate_latest(self.registry)
