"""What happened in a simulated world, told in plain words when somebody wants to read it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import NamedTuple

from kvferry.errors import SpecError
from kvferry.wire.messages import decode_from_authority, decode_to_authority
from tests.support.simulation.timeline import Timeline

MAX_SHOWN = 160
"""Characters of a message that are shown."""


class Happening(NamedTuple):
    """Somebody did something, or something was done to it."""

    when: float
    who: str
    what: str
    details: tuple[object, ...]

    def __str__(self) -> str:
        return f"{self.when:10.4f} s  {self.who}: {' '.join(map(str, (self.what, *self.details)))}"


class SentMessage(NamedTuple):
    """A message was given to the network."""

    when: float
    sender: str
    receiver: str
    data: bytes
    fate: str

    def __str__(self) -> str:
        return f"{self.when:10.4f} s  {self.sender} -> {self.receiver}: {_message(self.data)} ({self.fate})"


@dataclass(slots=True)
class Trace:
    """Every event, in order. Nothing is put into words before ``lines`` is called: most runs find nothing."""

    timeline: Timeline
    events: list[Happening | SentMessage] = field(default_factory=list)

    def add(self, who: str, what: str, *details: object) -> None:
        """Something happened; ``details`` follow in words."""
        self.events.append(Happening(self.timeline.now, who, what, details))

    def message(self, sender: str, receiver: str, data: bytes, fate: str) -> None:
        """A message was given to the network."""
        self.events.append(SentMessage(self.timeline.now, sender, receiver, data, fate))

    def lines(self, last: int | None = None) -> list[str]:
        """The events, or the last ones, one per line."""
        return [str(event) for event in (self.events if last is None else self.events[-last:])]

    def digest(self) -> str:
        """The same for two runs that went the same way."""
        return hashlib.sha256("\n".join(self.lines()).encode()).hexdigest()


def _message(data: bytes) -> str:
    for decode in (decode_to_authority, decode_from_authority):
        try:
            return f"{decode(data)!r:.{MAX_SHOWN}}"
        except SpecError:
            continue
    return f"junk of {len(data)} bytes"
