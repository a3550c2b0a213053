"""Conversations: offers of decode servers for the turns that they answered, for the prefill of the next turn.

An offer is found by the beginning of a prompt, not by the client. A wrong one does no harm: the engines
compare the tokens, and compute the rest.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import msgspec

from kvferry.proxy.answers import TEXT, Answer, Message
from kvferry.proxy.bodies import NULL, TRUE, BodyRejected, Fields, fields_in
from kvferry.proxy.metrics import ProxyMetrics
from kvferry.proxy.servers import ModelServer

MAX_OFFERS_BYTES, MAX_OFFER_BYTES = 128 * 2**20, 2**20
"""Limits of all offers and of one. For 16,000 tokens it has about 10 KiB, and is kept under two keys."""
ENTRY_BYTES = 500
"""Of an entry without its offer."""
MAX_PROMPT_BYTES, MAX_OBJECTS, MAX_MESSAGES = 4 * 2**20, 1 << 16, 1 << 12
"""Larger prompts are not examined: all other requests would wait."""
PIECE_BYTES = 1024
"""A prompt of text or token ids is compared in pieces of this length."""
MESSAGES = msgspec.json.Decoder(list[Message])


class ConversationTurn:
    """A turn of a conversation, identified by digests of the beginnings of its prompt."""

    def __init__(self, body: Fields) -> None:
        self.offer: Fields = {}
        """Of an earlier turn."""
        self.keys: list[bytes] = []
        """The digests, of the shortest beginning first."""
        self._rest, self._has_token_ids = b"", False
        # Requests with different salts share nothing, in vLLM's prefix cache and here.
        seed = [body.get(name, NULL) for name in ("model", "cache_salt")]
        self._hasher = hashlib.blake2b(msgspec.json.encode(seed), digest_size=16)

    def add_prompt(self, prompt: bytes, *, is_chat: bool) -> None:
        """Raises MsgspecError for an unexpected form."""
        if is_chat:
            self._add(message.written() for message in islice(MESSAGES.decode(prompt), MAX_MESSAGES))
        elif prompt[:1] == b"[":
            self._has_token_ids = True
            self._add_text(_token_ids(prompt))
        else:
            self._add_text(TEXT.decode(prompt).encode())

    def add_answer(self, answer: Answer) -> None:
        """The next turn's prompt begins with this prompt and answer."""
        if answer.is_chat:
            content = msgspec.Raw(msgspec.json.encode("".join(answer.texts)))
            self._add([Message("assistant", content).written()])
        elif self._has_token_ids:
            self._add_text(b"," + _token_ids(b",".join(answer.token_ids)))
        else:
            self._add_text("".join(answer.texts).encode())

    def _add_text(self, text: bytes) -> None:
        text = self._rest + text
        end = len(text) - len(text) % PIECE_BYTES
        self._rest = text[end:]
        self._add(text[at : at + PIECE_BYTES] for at in range(0, end, PIECE_BYTES))

    def _add(self, texts: Iterable[bytes]) -> None:
        for text in texts:
            self._hasher.update(text)
            self.keys.append(self._hasher.digest())


def _token_ids(text: bytes) -> bytes:
    return text.translate(None, b"[] \t\r\n")


@dataclass(frozen=True, slots=True)
class Offer:
    """The ``kv_transfer_params`` of a decode server's answer."""

    server: ModelServer
    num_losses: int
    """The server's count when it answered: a server that was lost since has forgotten it."""
    transfer: bytes

    @property
    def num_bytes(self) -> int:
        return ENTRY_BYTES + len(self.transfer)


class Conversations:
    """The latest offers within the limit of memory."""

    def __init__(self, metrics: ProxyMetrics, *, is_on: bool) -> None:
        self._metrics, self._is_on = metrics, is_on
        self._offers: OrderedDict[bytes, Offer] = OrderedDict()
        """The most recently used last."""
        self._num_bytes = 0

    def begin(self, body: Fields) -> ConversationTurn | None:
        """A turn, with the offer for the longest known beginning of its prompt."""
        is_chat = body.get("prompt", NULL) == NULL
        prompt = bytes(body.get("messages" if is_chat else "prompt", NULL))  # type: ignore[call-overload]
        if not self._is_on or len(prompt) > MAX_PROMPT_BYTES or prompt.count(b"{") > MAX_OBJECTS:
            return None
        turn = ConversationTurn(body)
        try:
            turn.add_prompt(prompt, is_chat=is_chat)
        except (msgspec.MsgspecError, RecursionError):
            return None  # a server reports the error
        known = (key for key in reversed(turn.keys) if key in self._offers)
        turn.offer = next(filter(None, map(self._found, known)), {})
        del turn.keys[:-1]
        self._metrics.turns.labels("hit" if turn.offer else "miss").inc()
        return turn

    def end(self, turn: ConversationTurn, answer: Answer, server: ModelServer) -> None:
        """Keep the offer of a server's answer for the next turn."""
        offer = bytes(answer.transfer)
        try:
            is_offer = fields_in(offer).get("do_remote_decode") == TRUE and len(offer) <= MAX_OFFER_BYTES
        except BodyRejected:
            return
        if not is_offer:
            return
        keys = {*turn.keys}
        if answer.is_known:
            turn.add_answer(answer)
            keys.update(turn.keys[-1:])
        for key in keys:
            self._keep(key, Offer(server, server.num_losses, offer))

    def _found(self, key: bytes) -> Fields:
        offer = self._forget(key)
        if offer.num_losses != offer.server.num_losses:
            return {}
        self._keep(key, offer)
        return fields_in(offer.transfer)

    def _keep(self, key: bytes, offer: Offer) -> None:
        if key in self._offers:
            self._forget(key)
        self._offers[key] = offer
        self._num_bytes += offer.num_bytes
        while self._num_bytes > MAX_OFFERS_BYTES:
            self._forget(next(iter(self._offers)))
        self._metrics.offers.set(len(self._offers))

    def _forget(self, key: bytes) -> Offer:
        offer = self._offers.pop(key)
        self._num_bytes -= offer.num_bytes
        self._metrics.offers.set(len(self._offers))
        return offer
