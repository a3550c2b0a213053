"""What a source engine has on offer, as the engine sees it: tickets are made where they are asked for."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from itertools import count

from kvferry.core.request import BlockTable
from kvferry.errors import SpecError
from kvferry.wire.limits import MAX_REQUEST_ID, check_name
from kvferry.wire.messages import MARK_BYTES
from kvferry.wire.ticket import NOT_SAID, NotSaid, Ticket, is_proved, seal, sign, tables_to_wire


class Offers:
    """Makes, numbers and signs the tickets of one start of one source engine.

    An engine wants a ticket at once, and cannot wait for the thread that owns the leases. So tickets are made
    here, in the engine's own thread, and the lease follows: it reaches its owner before any reader can have
    seen the ticket. Every method may be called from any thread: each changes one dictionary in one step.

    >>> offers = Offers("prefill", 7, b"key", "tcp://127.0.0.1:5555", lease_ms=30_000)
    >>> ticket = offers.make("request-1", {"full": BlockTable.of([3, 4])}, 20)
    >>> ticket.ticket_id, offers.is_own(ticket), len(offers)
    (1, True, 1)
    """

    MAX_OPEN = 100_000

    def __init__(
        self,
        engine: str,
        generation: int,
        key: bytes,
        address: str,
        lease_ms: int,
        host: str = "",
        fleet_key: bytes = b"",
    ) -> None:
        """``key`` is this start's own, ``fleet_key`` that of all engines that share a secret."""
        check_name("the name of an engine", engine)
        self.engine, self.generation, self.address, self.lease_ms = engine, generation, address, lease_ms
        self._host, self._key, self.fleet_key = host, key, fleet_key
        self._open: dict[str, int] = {}
        """The ticket of each request on offer."""
        self._numbers = count(1)
        self.refusal = ""
        """Why nothing can be offered now; whoever owns the leases says so."""

    def __len__(self) -> int:
        """How many requests are on offer, or were released without the engine having heard of it yet."""
        return len(self._open)

    def make(
        self,
        request_id: str,
        tables: Mapping[str, BlockTable],
        num_tokens: int,
        digest: bytes = b"",
        held_from: int | NotSaid = NOT_SAID,
    ) -> Ticket:
        """The ticket for a request's blocks; raises SpecError if it cannot be offered."""
        if self.refusal:
            raise SpecError(self.refusal)
        if len(self._open) >= self.MAX_OPEN:
            detail = "on offer, or released and not polled: call poll, withdraw some, or shorten the lease"
            raise SpecError(f"{self.MAX_OPEN} requests are {detail}")
        check_name("the name of a request", request_id, MAX_REQUEST_ID)
        ticket_id = next(self._numbers)
        ticket = Ticket(
            self.engine,
            self.generation,
            ticket_id,
            request_id,
            self.address,
            num_tokens,
            tables_to_wire(tables),
            self.lease_ms,
            digest,
            held_from=held_from,
            host=self._host,
        )
        signed = seal(sign(ticket, self._key), self.fleet_key)
        if self._open.setdefault(request_id, ticket_id) != ticket_id:
            raise SpecError(f"request {request_id!r} is offered already")
        return signed

    def forget(self, request_id: str) -> None:
        """The engine has heard that the request is released: its name may come again."""
        self._open.pop(request_id, None)

    def mark(self, ticket_id: int) -> bytes:
        """What shows that the lease of a ticket stands: another one for each, that nobody can guess."""
        return hmac.digest(self._key, b"board\0%d" % ticket_id, "sha256")[:MARK_BYTES]

    def is_own(self, ticket: Ticket) -> bool:
        """Whether this start of this engine made a ticket, as it is."""
        is_named = (ticket.engine, ticket.generation) == (self.engine, self.generation)
        return is_named and is_proved(ticket, self._key)
