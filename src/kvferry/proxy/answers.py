"""Answers of decode servers: transfer fields are removed for the client, and kept for the next turn."""

from __future__ import annotations

import msgspec
from msgspec import Raw

from kvferry.proxy.bodies import NULL, TRANSFER, BodyRejected, fields_in

EVENT_DATA, EVENT_END = b"data: ", b"\n\n"
QUOTE, NO_CALLS = b'"', (NULL, Raw(b"[]"))
MAX_PARTS = 1 << 17
"""The text of an answer with more parts is not compared."""
TEXT = msgspec.json.Decoder(str)


class Message(msgspec.Struct):
    role: str = ""
    content: Raw = NULL
    tool_calls: Raw = NULL

    @property
    def text(self) -> str | None:
        """None if the content is not plain text."""
        return TEXT.decode(self.content) if bytes(memoryview(self.content)[:1]) == QUOTE else None

    def written(self) -> bytes:
        """The same bytes for all spellings of a message."""
        text, calls = self.text, NULL if self.tool_calls in NO_CALLS else self.tool_calls
        return msgspec.json.encode([self.role, self.content if text is None else text, calls])


class Choice(msgspec.Struct):
    text: str = ""
    token_ids: Raw = NULL
    message: Message | None = None
    delta: Message | None = None


class Part(msgspec.Struct):
    choices: list[Choice]


PART = msgspec.json.Decoder(Part)


class Answer:
    """An answer, as far as it has arrived."""

    def __init__(self, *, is_compared: bool) -> None:
        """``is_compared``: whether its text is needed."""
        self.transfer = NULL
        self.texts: list[str] = []
        self.token_ids: list[bytes] = []
        self.is_chat, self.is_known = False, is_compared
        """``is_known``: whether the collected text is complete."""

    def take(self, payload: bytes) -> bytes:
        """A whole answer, or the data of an event, without its transfer fields."""
        if TRANSFER.encode() not in payload:
            return payload
        try:
            fields = fields_in(payload)
        except BodyRejected:  # it is no completion
            return payload
        if (transfer := fields.pop(TRANSFER, NULL)) != NULL:
            self.transfer = transfer  # type: ignore[assignment]
        try:
            for choice in PART.decode(payload).choices:
                self._add(choice)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self.is_known = False
        return msgspec.json.encode(fields)

    def take_events(self, events: bytes) -> bytes:
        """The same for whole events: vLLM 0.33 has transfer fields in the last one, 0.32 in none."""
        if TRANSFER.encode() not in events:
            return events
        return EVENT_END.join(
            EVENT_DATA + self.take(event.removeprefix(EVENT_DATA)) if event.startswith(EVENT_DATA) else event
            for event in events.split(EVENT_END)
        )

    def _add(self, choice: Choice) -> None:
        message = choice.message or choice.delta
        self.is_chat |= message is not None
        self.is_known &= len(self.texts) < MAX_PARTS and (message is None or message.tool_calls in NO_CALLS)
        if self.is_known:
            self.texts.append(choice.text if message is None else message.text or "")
            self.token_ids.append(bytes(choice.token_ids))
