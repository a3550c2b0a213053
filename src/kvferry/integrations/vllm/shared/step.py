"""What the scheduler tells every worker in one step, and what the workers tell the scheduler."""

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
    """A request that has blocks, and what each worker must fetch into them."""

    request_id: str
    tickets: tuple[Ticket, ...] = ()
    """In order of preference; none: there is none, or the request has ended."""
    tables: dict[str, BlockTable] = field(default_factory=dict)
    need: dict[str, Spans] = field(default_factory=dict)
    kept: dict[str, Spans] = field(default_factory=dict)
    early: frozenset[str] = frozenset()
    """Groups that can be read while the prompt is computed."""
    refusal: str = ""
    """Why it cannot be fetched."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What happened since the last step. A worker takes it in this order."""

    released: list[Released] = field(default_factory=list)
    """Our requests that are read, or whose lease is over: nobody is to be given their bytes any more."""
    unclaimed: list[Released] = field(default_factory=list)
    """As ``released``, of claims, and of prefills that go on: vLLM frees no blocks under these names."""
    dropped: list[tuple[str, tuple[Ticket, ...]]] = field(default_factory=list)
    """Requests that ended, or need no load: whatever is held or under way for them is given up; tickets that
    were not used are declined. Before what is new: its ticket, or its name, may come again."""
    known: list[tuple[str, tuple[Ticket, ...]]] = field(default_factory=list)
    """Requests that wait for blocks: their tickets are held meanwhile."""
    loads: list[Load] = field(default_factory=list)
    invitation: Invitation | None = None
    """In the first step of a producer: where its workers join."""
    generation: int = 0
    """The start of the lease authority whose requests are released; 0 if there is none."""
    is_for_others: bool = False
    """Whether what the device writes may be read by another engine when this step ends: the step computes a
    prompt for one, or a claim waits for it."""
    number: int = 0
    """Of a step that computes prompts that are read meanwhile; else 0."""


@dataclass
class StepNews(KVConnectorWorkerMetadata):
    """What workers say with the output of a step."""

    number: int
    """Of the step; it has ended on the device when this arrives. 0 if nobody wants to know."""
    num_workers: Counter[str]
    """Claims of which workers send nothing any more: how many workers, by name."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> StepNews:
        if not isinstance(other, StepNews):
            return self
        return StepNews(max(self.number, other.number), self.num_workers + other.num_workers)
