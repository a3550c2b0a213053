"""The shared secret of a fleet, and the keys derived from it."""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NoReturn

from kvferry.errors import SpecError

MIN_BYTES = 16
"""128 bits."""
MAX_SECRETS = 2
"""The new and the old one, during a rotation."""
MIN_CHARACTERS = 22
"""128 bits, written as base64."""
MIN_DISTINCT = 8
"""Distinct characters of a text: random ones have more."""

_DRAWN = re.compile(r"[A-Za-z0-9+/_-]+=*")


class Purpose(StrEnum):
    """The purposes of derived keys."""

    CHANNEL = "control channel"
    TICKETS = "ticket seal"
    FINGERPRINT = "fingerprint"


Keys = Mapping[Purpose, bytes]


class Secret:
    """The shared secret of a fleet, kept as derived keys, from which it cannot be computed.

    Neither ``repr`` nor a pickle contains it. During a rotation there are two secrets: the first is used,
    both are accepted.
    """

    __slots__ = ("_keys",)

    def __init__(self, *values: bytes) -> None:
        if not 1 <= len(values) <= MAX_SECRETS:
            raise SpecError(f"expected one secret, or two during a rotation, got {len(values)}")
        self._keys = tuple(map(_keys_of, values))

    @classmethod
    def from_text(cls, text: str) -> Secret:
        """Random secrets from a file or variable: hexadecimal or base64, one per line."""
        drawn = [line.strip() for line in text.strip().splitlines()]
        for line in drawn or [""]:
            is_drawn = _DRAWN.fullmatch(line) and len(set(line)) >= MIN_DISTINCT
            if not is_drawn or len(line.rstrip("=")) < MIN_CHARACTERS:
                raise SpecError(
                    "a secret must be random: at least 32 hexadecimal or 22 base64"
                    " characters (128 bits); create one with `kvferry keygen`"
                )
        return cls(*(line.encode() for line in drawn))

    def key(self, purpose: Purpose) -> bytes:
        """The 32-byte key in use for a purpose."""
        return self._keys[0][purpose]

    def keys(self, purpose: Purpose) -> tuple[bytes, ...]:
        """The accepted keys; the first is in use."""
        return tuple(keys[purpose] for keys in self._keys)

    def change_to(self, other: Secret) -> None:
        """Replace the keys, for all users of this object."""
        self._keys = other._keys

    def refresh(self) -> None:
        """Check the source of the secret for a new one; subclasses implement this."""

    def __repr__(self) -> str:
        return "Secret(…)"

    def __reduce__(self) -> NoReturn:
        raise SpecError("a secret cannot be copied or pickled: read it from its file in each process")


def _keys_of(value: bytes) -> Keys:
    if len(value) < MIN_BYTES:
        raise SpecError(
            f"a secret needs at least {MIN_BYTES} bytes (128 bits), got {len(value)}:"
            " create one with `kvferry keygen`"
        )
    return {
        purpose: hmac.digest(value, b"kvferry 1\0" + purpose.value.encode(), "sha256") for purpose in Purpose
    }


SET_A_SECRET = "set KVFERRY_SECRET_FILE to the same secret on both engines (`kvferry keygen` creates one)"


@dataclass(frozen=True, slots=True)
class Trust:
    """The peers that an engine accepts. Without a secret: engines of its own host, over loopback, only.

    >>> Trust().is_one_host, Trust(Secret(bytes(16))).is_one_host, Trust(insecure=True).is_one_host
    (True, False, False)
    """

    secret: Secret | None = None
    """Accepts engines with the same secret on any host; messages are encrypted and authenticated."""
    insecure: bool = False
    """Accepts every peer, without authentication. For closed networks only."""
    authorities: tuple[str, ...] = ()
    """If not empty: the only source engines that this engine connects to. ``tcp://10.0.0.7`` means every port
    of that host."""

    def __post_init__(self) -> None:
        if not isinstance(self.secret, Secret | None):
            raise SpecError("expected a Secret: read it with kvferry.endpoint.secret_source.secret_from_file")
        if self.secret is not None and self.insecure:
            raise SpecError("secret and insecure are both set: remove one of them")
        for address in self.authorities:
            if "://" not in address:
                raise SpecError(f"authorities must be addresses such as tcp://10.0.0.7:5555, got {address!r}")

    @property
    def is_one_host(self) -> bool:
        """Whether only engines of this host are accepted."""
        return self.secret is None and not self.insecure

    @property
    def ticket_key(self) -> bytes:
        return self.secret.key(Purpose.TICKETS) if self.secret is not None else b""

    @property
    def ticket_keys(self) -> tuple[bytes, ...]:
        """The accepted keys of ticket seals; none without a secret."""
        return self.secret.keys(Purpose.TICKETS) if self.secret is not None else ()

    def check_listen(self, address: str) -> None:
        if self.is_one_host and not is_loopback(address):
            raise SpecError(
                f"{address} is reachable from other hosts, and this engine has no secret: set"
                " KVFERRY_SECRET_FILE (`kvferry keygen` creates a secret), listen on tcp://127.0.0.1:*,"
                " or set insecure"
            )

    def may_call(self, authority: str) -> bool:
        """Whether the list of authorities allows this one."""
        host, _, _ = authority.rpartition(":")
        return not self.authorities or authority in self.authorities or host in self.authorities


@lru_cache(maxsize=1024)
def is_loopback(address: str) -> bool:
    """Whether only this host can connect to an address. Cached, since every ticket needs it.

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
