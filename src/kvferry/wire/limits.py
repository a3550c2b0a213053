"""How long the texts of peers may be: they end up in logs, in metrics and in memory."""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvferry.errors import SpecError

MAX_NAME = 256
MAX_REQUEST_ID = 1024
MAX_WORDS = 4000

Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
"""What a peer calls itself, or something of its own."""
RequestId = Annotated[str, msgspec.Meta(max_length=MAX_REQUEST_ID)]
"""What an engine calls a request; its clients may have chosen it."""
Words = Annotated[str, msgspec.Meta(max_length=MAX_WORDS)]
"""What a peer has to say to people."""


def check_name(what: str, text: str, longest: int = MAX_NAME) -> None:
    """Refuse a name of our own that no peer would read."""
    if not text or len(text) > longest:
        raise SpecError(f"{what} has 1 to {longest} characters, got {len(text)}")
