"""Messages between the scheduler and its workers in one step."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvferry.core.request import BlockTable
from kvferry.core.span import Spans
from kvferry.endpoint.invitation import Invitation
from kvferry.runtime import Released
from kvferry.wire.ticket import Ticket


@dataclass(frozen=True)
class Load:
    """A request with allocated blocks, and the data that each worker fetches into them."""

    request_id: str
    tickets: tuple[Ticket, ...] = ()
    """In order of preference; empty if there is none, or the request has ended."""
    tables: dict[str, BlockTable] = field(default_factory=dict)
    need: dict[str, Spans] = field(default_factory=dict)
    kept: dict[str, Spans] = field(default_factory=dict)
    num_tokens: int | None = None
    """That are there afterwards."""
    refusal: str = ""
    """Why the load is rejected."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Changes since the last step, in the order in which workers apply them."""

    released: list[Released] = field(default_factory=list)
    """Own requests that have been read, or whose lease has ended: no longer served to readers."""
    unclaimed: list[Released] = field(default_factory=list)
    """As ``released``, for claims and running prefills: vLLM frees no blocks under these names."""
    dropped: list[tuple[str, tuple[Ticket, ...]]] = field(default_factory=list)
    """Requests that ended or need no load: holds and loads are aborted, and unused tickets declined. Precedes
    new requests, because a ticket or a name may recur."""
    known: list[tuple[str, tuple[Ticket, ...]]] = field(default_factory=list)
    """Requests that wait for blocks; their tickets are held meanwhile."""
    loads: list[Load] = field(default_factory=list)
    invitation: Invitation | None = None
    """In a producer's first step: the lease authority that its workers join."""
    generation: int = 0
    """The generation of the lease authority whose requests are released; 0 if there is none."""
    is_for_others: bool = False
    """Whether another engine may read the step's output when the step ends: it computes a prompt for another
    engine, or a claim waits for it."""
    number: int = 0
    """The step's number if its prompts are read while they are computed; else 0."""


@dataclass
class StepNews(KVConnectorWorkerMetadata):
    """The workers' report with the output of a step."""

    number: int
    """The step that has ended on the device; 0 if the scheduler does not need it."""
    num_workers: Counter[str]
    """Claim -> number of workers that have stopped serving it."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepNews:
        if not isinstance(other, StepNews):
            return self
        return StepNews(max(self.number, other.number), self.num_workers + other.num_workers)
