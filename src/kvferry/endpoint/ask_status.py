"""Ask a source engine at its address how it is, as a reader would talk to it."""

from __future__ import annotations

import json
import time
from typing import Any

from kvferry.channel import Channel, Received
from kvferry.errors import SpecError
from kvferry.wire.messages import (
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    AskStatus,
    Rejected,
    StatusAnswer,
    decode_from_authority,
    encode,
)
from kvferry.wire.secret import Secret

ANSWER_SECONDS = 5.0
AGAIN_SECONDS = 1.0


def ask_status(address: str, secret: Secret | None, seconds: float = ANSWER_SECONDS) -> dict[str, Any]:
    """What the engine at an address says; raises SpecError if it says nothing, or no."""
    channel = Channel(secret=secret, max_bytes=MAX_MESSAGE_BYTES)
    until, again = time.monotonic() + seconds, 0.0
    try:
        while (now := time.monotonic()) < until:
            if now >= again:
                channel.send(address, encode(AskStatus(PROTOCOL)))
                again = now + AGAIN_SECONDS
            for received in channel.wait(min(until, again) - now):
                if isinstance(received, Received):
                    return _answer(address, received.data)
    finally:
        channel.close()
    hint = "does it have this secret?" if secret else "if it has a secret, set KVFERRY_SECRET_FILE"
    raise SpecError(f"{address} did not answer within {seconds:g} s: does the engine run? And {hint}")


def _answer(address: str, data: bytes) -> dict[str, Any]:
    match decode_from_authority(data):
        case StatusAnswer(report):
            answer = json.loads(report)
            if isinstance(answer, dict):
                return answer
        case Rejected(_, detail):
            raise SpecError(f"{address}: {detail}")
        case _:
            pass
    raise SpecError(f"{address} answered something else: is it a source engine of kvferry's?")
