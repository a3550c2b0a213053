"""The secret that engines of one fleet share, and the keys that are made of it."""

from __future__ import annotations

import hmac
import re
from typing import NoReturn

from kvferry.errors import SpecError

MIN_BYTES = 16
"""128 bits: fewer can be guessed."""
MIN_CHARACTERS = 22
"""128 bits, written as base64."""
MIN_DISTINCT = 8
"""Different characters in a text: fewer were typed, not drawn."""

_DRAWN = re.compile(r"[A-Za-z0-9+/_-]+=*")


class Secret:
    """Known to all engines that may talk to each other, and to nobody else. Never shown: not by ``repr`` or
    ``str``, not in a pickle.

    >>> secret = Secret(bytes(range(16)))
    >>> secret, f"{secret}"
    (Secret(…), 'Secret(…)')
    >>> secret.key("tickets") == Secret(bytes(range(16))).key("tickets") != secret.key("channel")
    True
    >>> Secret(b"open sesame")
    Traceback (most recent call last):
    kvferry.errors.SpecError: a secret has at least 16 bytes (128 bits), got 11: `kvferry keygen` makes one
    """

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        if len(value) < MIN_BYTES:
            raise SpecError(
                f"a secret has at least {MIN_BYTES} bytes (128 bits), got {len(value)}:"
                " `kvferry keygen` makes one"
            )
        self._value = value

    @classmethod
    def from_text(cls, text: str) -> Secret:
        """A secret as a file or a variable has it: drawn at random, in hexadecimal or base64.

        >>> Secret.from_text("correct horse battery staple")
        Traceback (most recent call last):
        kvferry.errors.SpecError: a secret is drawn at random, not made up: ... `kvferry keygen` makes one
        """
        drawn = text.strip()
        is_drawn = _DRAWN.fullmatch(drawn) and len(set(drawn)) >= MIN_DISTINCT
        if not is_drawn or len(drawn.rstrip("=")) < MIN_CHARACTERS:
            raise SpecError(
                "a secret is drawn at random, not made up: at least 32 hexadecimal or 22 base64 characters"
                " (128 bits); `kvferry keygen` makes one"
            )
        return cls(drawn.encode())

    def key(self, purpose: str) -> bytes:
        """The 32 bytes for one purpose. From one key nobody learns another, nor the secret."""
        return hmac.digest(self._value, b"kvferry 1\0" + purpose.encode(), "sha256")

    def __repr__(self) -> str:
        return "Secret(…)"

    def __reduce__(self) -> NoReturn:
        raise SpecError("a secret is not copied or pickled: each process reads it where it is kept")
