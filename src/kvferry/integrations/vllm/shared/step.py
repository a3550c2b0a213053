"""What the scheduler tells every worker in one step."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvferry.core.request import BlockTable
from kvferry.core.span import Spans
from kvferry.endpoint.invitation import Invitation
from kvferry.runtime import Released
from kvferry.wire.ticket import Ticket


@dataclass(frozen=True)
class Load:
    """A request that has blocks, and what each worker must fetch into them."""

    request_id: str
    ticket: Ticket | None
    """None: there is none, or the request has ended."""
    tables: dict[str, BlockTable] = field(default_factory=dict)
    need: dict[str, Spans] = field(default_factory=dict)
    kept: dict[str, Spans] = field(default_factory=dict)
    refusal: str = ""
    """Why it cannot be fetched."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What happened since the last step. A worker takes it in this order."""

    released: list[Released] = field(default_factory=list)
    """Our requests that are read, or whose lease is over: nobody is to be given their bytes any more."""
    dropped: list[tuple[str, Ticket | None]] = field(default_factory=list)
    """Requests that ended, or need no load: whatever is held or under way for them is given up; a ticket that
    was not used is declined. Before what is new: its ticket, or its name, may come again."""
    known: list[tuple[str, Ticket]] = field(default_factory=list)
    """Requests that wait for blocks: their tickets are held meanwhile."""
    loads: list[Load] = field(default_factory=list)
    invitation: Invitation | None = None
    """In the first step of a producer: where its workers join."""
    generation: int = 0
    """The start of the lease authority whose requests are released; 0 if there is none."""
    is_prefilling: bool = False
    """Whether this step computes a prompt for another engine, which may be offered when the step ends."""
