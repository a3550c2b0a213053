"""Counters and gauges of the state machines, by metric name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod

from kvferry.core.manifest import Manifest, Rank
from kvferry.core.request import HOLE
from kvferry.wire.ticket import Ticket

Figures = Mapping[tuple[str, ...], float]
"""The counters and gauges of an endpoint: (metric, label values) to number."""

NO_WAY = "none"


def by_label(metric: str, numbers: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    """Figures of a metric with one label."""
    return {(metric, label): number for label, number in numbers.items()}


class LeaseTally:
    """The counts of one start of one source engine."""

    def __init__(self) -> None:
        self.block_bytes: Mapping[str, int] = {}
        """By group, over all ranks; empty until all ranks have joined."""
        self.claims: Counter[str] = Counter()
        self.denials: Counter[str] = Counter()
        self.renewals: Counter[str] = Counter()
        self._ended: Counter[str] = Counter()
        self.num_soft_offers = 0
        self._num_offers = self._num_grants = self._granted_bytes = 0
        self._pinned: dict[int, int] = {}
        """Bytes of each ticket that is pinned."""

    def offered(self, ticket: Ticket) -> None:
        self._num_offers += 1
        self.grown(ticket)

    def grown(self, ticket: Ticket) -> None:
        self._pinned[ticket.ticket_id] = sum(
            self.block_bytes.get(group, 0) * sum(block_id != HOLE for block_id in table.block_ids)
            for group, table in ticket.tables.items()
        )

    def granted(self, ticket: Ticket, *, is_first: bool) -> None:
        """A rank of a reader may read; ``is_first``: the first rank of it."""
        self._num_grants += 1
        self._granted_bytes += self._pinned.get(ticket.ticket_id, 0) if is_first else 0

    def ended_lease(self, ticket: Ticket, reason: str) -> None:
        self._ended[reason] += 1
        self._pinned.pop(ticket.ticket_id, None)

    def figures(self) -> Figures:
        return {
            ("kvferry_offers",): self._num_offers,
            ("kvferry_soft_offers",): self.num_soft_offers,
            ("kvferry_pinned_bytes",): sum(self._pinned.values()),
            ("kvferry_grants",): self._num_grants,
            ("kvferry_granted_bytes",): self._granted_bytes,
            **by_label("kvferry_leases_ended", self._ended),
            **by_label("kvferry_claims", self.claims),
            **by_label("kvferry_denials", self.denials),
            **by_label("kvferry_renewals", self.renewals),
        }


def block_bytes_of(manifest: Manifest) -> dict[str, int]:
    found: Counter[str] = Counter()
    for rank in manifest.ranks:
        found.update(rank_block_bytes(manifest, rank))
    return dict(found)


def rank_block_bytes(manifest: Manifest, rank: Rank) -> dict[str, int]:
    found: Counter[str] = Counter()
    for view in rank.views:
        found[view.group] += manifest.state_by_name[view.state].item_bytes * prod(
            count for count, _ in view.steps()
        )
    return dict(found)
