"""What a source engine gives to its own ranks, so that nobody else takes their places."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Invitation:
    """Where a rank joins its engine, and with what. The engine itself hands it to its ranks: by a pipe, say.

    >>> Invitation("tcp://127.0.0.1:5555", b"a secret")
    Invitation(address='tcp://127.0.0.1:5555')
    """

    address: str
    credential: bytes = field(repr=False)
