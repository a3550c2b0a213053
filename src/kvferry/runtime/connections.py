"""Which authorities are reachable, according to the channel's connections.

::

    calling ──▶ connected ◀──▶ broken ──▶ gone ──▶ forgotten, and called again when needed
       └────────────────────────────────▶ ┘
            each returns to connected when the peer answers

The peer's network thread answers heartbeats, so a busy engine stays connected; a killed or suspended one does
not.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from kvferry.runtime.values import Peer, Timing

FOREVER = float("inf")


@dataclass(slots=True)
class _Connection:
    since: float
    """When it was called, or broke."""
    is_up: bool = False
    was_up: bool = False
    is_broken: bool = False
    """Lost, or refused by the host."""
    reason: str = ""
    """Why it counts as gone; empty if it does not."""
    may_answer: bool = False
    """Whether a gone peer may come back: not if the very first call was refused."""
    gone_until: float = FOREVER
    peers: Set[Peer] = frozenset()
    """The peers that are gone; a restarted engine may have the same address."""


class Connections:
    """Call it with events and ``now``; ``tick`` returns the addresses that are gone."""

    MAX_GONE = 1024
    """Addresses that are remembered as gone; the oldest is forgotten first."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._by_address: dict[str, _Connection] = {}

    def __len__(self) -> int:
        return len(self._by_address)

    def calling(self, now: float, address: str) -> None:
        known = self._by_address.get(address)
        if known is None or not known.reason:
            self._by_address[address] = _Connection(now)

    def connected(self, address: str) -> None:
        self._by_address[address] = _Connection(0.0, is_up=True, was_up=True)

    def broken(self, now: float, address: str) -> None:
        """A connection was lost or refused. The channel keeps calling."""
        known = self._by_address.setdefault(address, _Connection(now))
        if known.is_up:
            known.is_up, known.since = False, now
        known.is_broken = True

    def closed(self, address: str) -> None:
        known = self._by_address.get(address)
        if known is not None and not known.reason:
            del self._by_address[address]

    def gone(self, address: str) -> str:
        """Why an address counts as gone; empty if it does not."""
        known = self._by_address.get(address)
        return "" if known is None else known.reason

    @property
    def gone_addresses(self) -> list[str]:
        return [address for address, known in self._by_address.items() if known.reason]

    @property
    def gone_peers(self) -> dict[Peer, str]:
        gone = (known for known in self._by_address.values() if known.reason)
        return {peer: known.reason for known in gone for peer in known.peers}

    def is_gone(self, peer: Peer) -> bool:
        known = self._by_address.get(peer.authority)
        return known is not None and peer in known.peers

    def lost(self, address: str, peers: Set[Peer]) -> None:
        self._by_address[address].peers = peers

    def forget(self, address: str) -> None:
        self._by_address.pop(address, None)

    def is_awaited(self, address: str) -> bool:
        """Whether to keep calling a gone address: a suspended peer returns when it is resumed."""
        known = self._by_address.get(address)
        return known is not None and known.may_answer

    def has_answered(self, address: str) -> bool:
        """Whether it was ever connected."""
        known = self._by_address.get(address)
        return known is not None and known.was_up

    def tick(self, now: float) -> list[str]:
        """The addresses that are gone since the last call."""
        due = [(address, one) for address, one in self._by_address.items() if now >= self._deadline(one)]
        gone = []
        for address, one in due:
            if one.reason:
                del self._by_address[address]
            else:
                one.reason, one.gone_until = self._reason(one), now + self._timing.meet
                one.may_answer = one.was_up or not one.is_broken
                gone.append(address)
        lasting = self.gone_addresses
        for address in lasting[: max(0, len(lasting) - self.MAX_GONE)]:
            del self._by_address[address]
        return [address for address in gone if address in self._by_address]

    def _reason(self, one: _Connection) -> str:
        if one.is_broken:
            seconds = f"{self._timing.reconnect:g} s"
            same = "" if one.was_up else " and that both engines have the same secret"
            ask = f"Check that it is running{same}"
            return f"its connection broke or was refused, and was not restored within {seconds}. {ask}"
        return f"no answer for {self._timing.silence:g} s: it is suspended or disconnected"

    def _deadline(self, one: _Connection) -> float:
        if one.is_up:
            return FOREVER
        if one.reason:
            return one.gone_until
        return one.since + (self._timing.reconnect if one.is_broken else self._timing.silence)

    def next_deadline(self) -> float:
        return min(map(self._deadline, self._by_address.values()), default=FOREVER)
