"""As a consumer: tickets of new requests are held, and become loads once the requests have blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm.v1.request import Request

from kvferry.endpoint.invitation import this_host
from kvferry.endpoint.metric_table import REJECTED_TICKETS, UNCACHED_BLOCKS
from kvferry.errors import SpecError
from kvferry.integrations.vllm.scheduler.outgoing import TICKET
from kvferry.integrations.vllm.scheduler.tables import Adapters, BlockIds, Groups, digest, is_identified
from kvferry.integrations.vllm.shared.step import Load, StepMetadata
from kvferry.runtime import Released
from kvferry.runtime.failure import refusal, text_refusal
from kvferry.runtime.figures import Figures, by_label
from kvferry.wire.secret import Trust
from kvferry.wire.ticket import Ticket, from_text

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager


FIELD = "num_cached_block"
"""Of the manager of a group: request id -> the index of the first block that vLLM has yet to register."""


class PrefixCache:
    """Keeps blocks out of vLLM's prefix cache.

    The field is private to vLLM. There is no other way: vLLM registers the blocks of a load inside
    ``schedule``, where another request can hit them before any hook of a connector runs.
    """

    def __init__(self, num_cached: Mapping[int, dict[str, int]]) -> None:
        """``num_cached``: the fields of the groups that are covered; none where nothing is registered."""
        self._num_cached = num_cached

    @classmethod
    def of(cls, manager: KVCacheManager, tokens_per_block: Mapping[int, int]) -> PrefixCache:
        """Covers these groups, by the number of tokens in their blocks.

        Raises SpecError if prefix caching is on and this vLLM has no such field.
        """
        if not tokens_per_block or not manager.enable_caching:
            return cls({})
        groups = getattr(getattr(manager, "coordinator", None), "single_type_managers", ())
        found: dict[int, dict[str, int]] = {}
        for index, num_tokens in tokens_per_block.items():
            group = groups[index] if index < len(groups) else None
            num_cached = getattr(group, FIELD, None)
            if type(num_cached) is not dict or getattr(group, "block_size", None) != num_tokens:
                raise cannot_keep_out(f"{type(group).__name__}.{FIELD} of KV cache group {index}")
            found[index] = num_cached
        return cls(found)

    @property
    def is_on(self) -> bool:
        """Whether vLLM may register a block that a load fills in part."""
        return bool(self._num_cached)

    def keep_out(self, request_id: str, num_blocks: Mapping[int, int]) -> None:
        """Never register a request's blocks before this index, by group.

        Call it before the load starts. It holds until vLLM frees the request's blocks.
        """
        for index, first in num_blocks.items():
            if (num_cached := self._num_cached.get(index)) is not None:
                num_cached[request_id] = max(first, num_cached.get(request_id, 0))


def cannot_keep_out(what: str) -> SpecError:
    """Why an engine with windows and prefix caching does not start."""
    return SpecError(
        f"this vLLM has no {what}, by which kvferry keeps partly loaded blocks of sliding windows out of the"
        " prefix cache: use a vLLM version that kvferry supports, or --no-enable-prefix-caching"
    )


_Refused = tuple[str, str]
"""Why a ticket is not used: a code to count by, and words."""


@dataclass
class _Wanted:
    """A request that somebody else prefilled."""

    ticket: Ticket | None
    refusal: _Refused | None
    """Why the ticket is not used."""
    num_loadable: int
    """How many of its first tokens the ticket brings."""
    num_computed: int = 0
    """How many of them are here already."""


class Incoming:
    """The requests of a vLLM engine that come with a ticket, until they end."""

    def __init__(
        self, groups: Groups, adapters: Adapters, take_back: Callable[[Ticket], bool], trust: Trust
    ) -> None:
        """``take_back`` says whether a ticket is one of this engine's own, which then pins nothing more."""
        self._groups, self._adapters, self._take_back = groups, adapters, take_back
        self._trust, self._host = trust, this_host()
        self._wanted: dict[str, _Wanted] = {}
        """Those that have no blocks yet."""
        self._live: dict[str, Ticket | None] = {}
        """All of them, with the ticket that each uses."""
        self._known: list[tuple[str, Ticket]] = []
        self._loads: list[Load] = []
        self._dropped: list[tuple[str, Ticket | None]] = []
        self._rejected: Counter[str] = Counter()
        """Tickets that were not used, by why."""
        self._cache = PrefixCache({})
        self._num_kept_out = 0
        self._held_from: dict[str, int] = {}
        """Of requests whose first loaded blocks were filled in part."""

    def bind(self, cache: PrefixCache) -> None:
        self._cache = cache

    @property
    def figures(self) -> Figures:
        """The counters of what no worker has seen: tickets, and blocks kept out of the prefix cache."""
        return {
            **by_label(REJECTED_TICKETS.name, self._rejected),
            (UNCACHED_BLOCKS.name,): self._num_kept_out,
        }

    def new_request(self, request: Request) -> None:
        """A request is known: hold its ticket from now on, however long it waits."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return
        wanted = self._wanted[request.request_id] = self._read(request, params)
        used = self._live[request.request_id] = None if wanted.refusal else wanted.ticket
        if used is not None:
            self._known.append((request.request_id, used))

    def _read(self, request: Request, params: dict[str, Any]) -> _Wanted:
        most = self._groups.num_loadable(request.num_prompt_tokens)
        ticket = self._ticket(params)
        if not isinstance(ticket, Ticket):
            return _Wanted(None, ticket, most)
        if refused := self._refusal(request, ticket, most):
            return _Wanted(ticket, refused, most)
        if self._take_back(ticket) or ticket in self._live.values():
            # Our own prefill, or one that several answers to one prompt share (n > 1): what our prefix cache
            # does not have is computed.
            return _Wanted(None, None, 0)
        return _Wanted(ticket, None, min(most, ticket.num_tokens))

    def _ticket(self, params: dict[str, Any]) -> Ticket | _Refused:
        """The ticket, or why there is none. It is proved before it is read, and before anybody is called."""
        text = params.get(TICKET)
        if not isinstance(text, str):
            return "no-ticket", f"kv_transfer_params carry no ticket ({TICKET}): did kvferry prefill it?"
        if refused := text_refusal(text, self._trust):
            return refused.code.value, str(refused)
        try:
            ticket = from_text(text)
        except SpecError as error:
            return "unreadable", str(error)
        refused = refusal(ticket, self._trust, self._host)
        return (refused.code.value, str(refused)) if refused else ticket

    def _refusal(self, request: Request, ticket: Ticket, most: int) -> _Refused | None:
        try:
            is_same = ticket.digest == digest(request, ticket.num_tokens, self._adapters)
        except SpecError as error:
            return "other-prompt", str(error)
        if not is_identified(request) or not is_same:
            return "other-prompt", self._difference(request, ticket)
        if self._groups.has_state and ticket.num_tokens > most:
            return (
                "state-too-long",
                f"the recurrent state behind the ticket includes {ticket.num_tokens} tokens, but at most"
                f" {most} tokens of this prompt may be loaded",
            )
        return None

    def _difference(self, request: Request, ticket: Ticket) -> str:
        """What a ticket was made for, as far as can be told: it has one digest of prompt and adapter."""
        adapter = request.lora_request
        if adapter is None:
            return "the ticket was made for another prompt, or with a LoRA adapter: this request has none"
        bare = copy(request)
        bare.lora_request = None
        if ticket.digest == digest(bare, ticket.num_tokens, self._adapters):
            return f"the ticket was made without a LoRA adapter: this request has {adapter.lora_name}"
        return f"the ticket was made for another prompt, or for another LoRA adapter than {adapter.lora_name}"

    def matched(self, request: Request, num_computed: int) -> tuple[int, bool]:
        """How many tokens a ticket brings beyond those that are here already.

        A ticket that cannot be used counts as if it could: only a worker can fail a request.
        """
        wanted = self._wanted.get(request.request_id)
        if wanted is None:
            return 0, False
        wanted.num_computed = num_computed
        count = wanted.num_loadable - num_computed
        return (count, True) if count > 0 else (0, False)

    def allocated(self, request: Request, block_ids: BlockIds, num_external: int) -> None:
        """The request has blocks. A ticket is good for one load; one that is not needed is returned."""
        wanted = self._wanted.pop(request.request_id, None)
        if wanted is None:
            return
        (request.kv_transfer_params or {})["do_remote_prefill"] = False
        if wanted.refusal is not None:
            self._rejected[wanted.refusal[0]] += 1
        if not num_external:
            self._give_back(request.request_id, wanted.ticket)
            return
        refusal = wanted.refusal[1] if wanted.refusal else ""
        load = Load(request.request_id, wanted.ticket, refusal=refusal)
        num_tokens = wanted.num_computed + num_external
        self._loads.append(self._filled(load, block_ids, num_tokens, wanted.num_computed))

    def _filled(self, load: Load, block_ids: BlockIds, num_tokens: int, num_kept: int) -> Load:
        """The load, of whole blocks; vLLM will register them. Blocks that stay partial are kept out."""
        tables = self._groups.tables(block_ids, num_tokens)
        said = load.ticket.held_from if load.ticket else None
        held_from = said if isinstance(said, int) and self._cache.is_on else None
        filling = self._groups.filling(tables, num_tokens, num_kept, held_from)
        self._cache.keep_out(load.request_id, self._groups.by_index(filling.partial))
        if self._cache.is_on:
            self._num_kept_out += sum(map(len, filling.partial.values()))
        if filling.held_from:
            self._held_from[load.request_id] = filling.held_from
        return replace(load, tables=tables, need=filling.need, kept=self._groups.kept(num_kept))

    def take_held_from(self, request_id: str) -> int:
        """From which token on the load of a request that ends has left no cell of its blocks unfilled."""
        return self._held_from.pop(request_id, 0)

    def finished(self, request: Request) -> None:
        """A request has ended, loaded or not: nothing more is wanted for it.

        Also one that vLLM's front end has rejected: it comes with a prompt of one token, and ends at once.
        """
        request_id = request.request_id
        if request_id not in self._live:
            return
        wanted = self._wanted.pop(request_id, None)
        unused = [wanted.ticket] if wanted else [o.ticket for o in self._loads if o.request_id == request_id]
        self._give_back(request_id, unused[0] if unused else None)
        del self._live[request_id]
        # vLLM waits for the end of a load, also of one that need not begin any more.
        self._loads = [Load(request_id, None) if o.request_id == request_id else o for o in self._loads]

    def _give_back(self, request_id: str, ticket: Ticket | None) -> None:
        """The workers give up what they have under way for a request; a ticket that is not used ends now."""
        others = [used for other, used in self._live.items() if other != request_id]
        if ticket is not None and (ticket in others or self._take_back(ticket)):
            ticket = None
        self._known = [news for news in self._known if news[0] != request_id]
        self._dropped.append((request_id, ticket))

    def step(self, released: list[Released]) -> StepMetadata:
        step = StepMetadata(released, self._dropped, self._known, self._loads)
        self._known, self._loads, self._dropped = [], [], []
        return step

    @property
    def has_news(self) -> bool:
        return bool(self._known or self._loads or self._dropped)
