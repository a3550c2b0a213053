"""Whom an engine talks to: a closed list of ways, and what each of them lets in."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from functools import lru_cache

from kvferry.errors import SpecError
from kvferry.wire.secret import Purpose, Secret

SET_A_SECRET = "set the same secret on both engines (KVFERRY_SECRET_FILE; `kvferry keygen` makes one)"


@dataclass(frozen=True, slots=True)
class Trust:
    """Whom an engine talks to. Without a secret: engines of its own host, over loopback, and nobody else.

    >>> Trust().is_one_host, Trust(Secret(bytes(16))).is_one_host, Trust(insecure=True).is_one_host
    (True, False, False)
    """

    secret: Secret | None = None
    """Engines that know it, wherever they are: what they say to each other is encrypted and proved."""
    insecure: bool = False
    """Everybody who can reach this engine, as if all of them knew a secret. For closed networks only."""
    authorities: tuple[str, ...] = ()
    """If not empty: the only addresses of source engines that this engine calls. ``tcp://10.0.0.7`` stands
    for every port of that host."""

    def __post_init__(self) -> None:
        if self.secret is not None and self.insecure:
            raise SpecError("a secret is set, and so is insecure: choose one of them")
        for address in self.authorities:
            if "://" not in address:
                raise SpecError(f"authorities are addresses such as tcp://10.0.0.7:5555, got {address!r}")

    @property
    def is_one_host(self) -> bool:
        """Whether only engines of this host are talked to."""
        return self.secret is None and not self.insecure

    @property
    def ticket_key(self) -> bytes:
        """What tickets are sealed with; empty where there is no secret."""
        return self.secret.key(Purpose.TICKETS) if self.secret is not None else b""

    @property
    def ticket_keys(self) -> tuple[bytes, ...]:
        """What tickets may be sealed with; none where there is no secret."""
        return self.secret.keys(Purpose.TICKETS) if self.secret is not None else ()

    def check_listen(self, address: str) -> None:
        """Raise unless an engine may listen there."""
        if self.is_one_host and not is_loopback(address):
            raise SpecError(
                f"{address} can be called from other hosts, and this engine has no secret: set one"
                " (KVFERRY_SECRET_FILE; `kvferry keygen` makes one), listen at tcp://127.0.0.1:*, or say"
                " insecure"
            )

    def may_call(self, authority: str) -> bool:
        """Whether the list of authorities has this one, if there is a list."""
        host, _, _ = authority.rpartition(":")
        return not self.authorities or authority in self.authorities or host in self.authorities


@lru_cache(maxsize=1024)
def is_loopback(address: str) -> bool:
    """Whether only this host can call an address.

    Remembered, because every ticket asks, in the thread of its engine's steps.

    >>> is_loopback("tcp://127.0.0.1:*"), is_loopback("tcp://[::1]:5555"), is_loopback("ipc:///run/kvferry")
    (True, True, False)
    >>> is_loopback("tcp://10.0.0.7:5555"), is_loopback("tcp://*:5555"), is_loopback("tcp://eth0:5555")
    (False, False, False)
    """
    if not address.startswith("tcp://"):
        return False
    host = address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
