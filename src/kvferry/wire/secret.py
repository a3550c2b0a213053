"""The secret that engines of one fleet share, and the keys that are made of it."""

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
"""128 bits: fewer can be guessed."""
MAX_SECRETS = 2
"""While a fleet changes its secret: the new one, and the old one."""
MIN_CHARACTERS = 22
"""128 bits, written as base64."""
MIN_DISTINCT = 8
"""Different characters in a text: fewer were typed, not drawn."""

_DRAWN = re.compile(r"[A-Za-z0-9+/_-]+=*")


class Purpose(StrEnum):
    """What keys are made for."""

    CHANNEL = "control channel"
    TICKETS = "ticket seal"
    FINGERPRINT = "fingerprint"


Keys = Mapping[Purpose, bytes]


class Secret:
    """Known to all engines that may talk to each other, and to nobody else.

    It keeps the keys for each purpose, and not the secret that they were made of. From one key nobody learns
    another, nor the secret. Nothing of it is shown: not by ``repr`` or ``str``, not in a pickle.

    While a fleet changes its secret there are two. The first is used, both are accepted.
    """

    __slots__ = ("_keys",)

    def __init__(self, *values: bytes) -> None:
        if not 1 <= len(values) <= MAX_SECRETS:
            raise SpecError(f"one secret is expected, or two during a rotation; got {len(values)}")
        self._keys = tuple(map(_keys_of, values))

    @classmethod
    def from_text(cls, text: str) -> Secret:
        """Secrets as a file or a variable has them: drawn at random, hexadecimal or base64; one per line."""
        drawn = [line.strip() for line in text.strip().splitlines()]
        for line in drawn or [""]:
            is_drawn = _DRAWN.fullmatch(line) and len(set(line)) >= MIN_DISTINCT
            if not is_drawn or len(line.rstrip("=")) < MIN_CHARACTERS:
                raise SpecError(
                    "a secret must be random: at least 32 hexadecimal or 22 base64"
                    " characters (128 bits); `kvferry keygen` makes one"
                )
        return cls(*(line.encode() for line in drawn))

    def key(self, purpose: Purpose) -> bytes:
        """The 32 bytes that are used for one purpose."""
        return self._keys[0][purpose]

    def keys(self, purpose: Purpose) -> tuple[bytes, ...]:
        """Those that are accepted for it; the first is used."""
        return tuple(keys[purpose] for keys in self._keys)

    def change_to(self, other: Secret) -> None:
        """Use other keys from now on, wherever this secret is known."""
        self._keys = other._keys

    def refresh(self) -> None:
        """Look where it came from for another one, now and then."""

    def __repr__(self) -> str:
        return "Secret(…)"

    def __reduce__(self) -> NoReturn:
        raise SpecError("a secret is not copied or pickled: each process reads it where it is kept")


def _keys_of(value: bytes) -> Keys:
    if len(value) < MIN_BYTES:
        raise SpecError(
            f"a secret has at least {MIN_BYTES} bytes (128 bits), got {len(value)}:"
            " `kvferry keygen` makes one"
        )
    return {
        purpose: hmac.digest(value, b"kvferry 1\0" + purpose.value.encode(), "sha256") for purpose in Purpose
    }


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
        return self.secret.key(Purpose.TICKETS) if self.secret is not None else b""

    @property
    def ticket_keys(self) -> tuple[bytes, ...]:
        """What tickets may be sealed with; none where there is no secret."""
        return self.secret.keys(Purpose.TICKETS) if self.secret is not None else ()

    def check_listen(self, address: str) -> None:
        if self.is_one_host and not is_loopback(address):
            raise SpecError(
                f"{address} is reachable from other hosts, and this engine has no secret: set one"
                " (KVFERRY_SECRET_FILE; `kvferry keygen` makes one), listen at tcp://127.0.0.1:*, or set"
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
