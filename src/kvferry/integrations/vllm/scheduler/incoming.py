"""The consumer: holds the tickets of new requests, and makes loads of them once the requests have blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm.v1.request import Request

from kvferry.endpoint.claiming import Claimant
from kvferry.endpoint.invitation import this_host
from kvferry.endpoint.metric_table import (
    READ_BACK_TOKENS,
    READ_BACKS,
    REJECTED_TICKETS,
    UNCACHED_BLOCKS,
)
from kvferry.errors import SpecError
from kvferry.integrations.vllm.scheduler.outgoing import MAX_TRANSFER, TICKET, TICKETS, TRANSFER
from kvferry.integrations.vllm.scheduler.tables import (
    UNIDENTIFIED,
    Adapters,
    BlockIds,
    Groups,
    digest,
    digest_parts_of,
    is_identified,
)
from kvferry.integrations.vllm.shared.step import Load, StepMetadata
from kvferry.log import log_of
from kvferry.runtime.claims import ClaimEnd
from kvferry.runtime.failure import address_refusal, refusal, text_refusal
from kvferry.runtime.figures import Figures, by_label
from kvferry.wire.reading import printable
from kvferry.wire.secret import Trust
from kvferry.wire.ticket import Ticket, from_text, num_common_tokens, part_at

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager


log = log_of(__name__)

FIELD = "num_cached_block"
"""Of a group's manager: request id -> index of the first block that vLLM has not registered yet."""


class PrefixCache:
    """Keeps blocks out of vLLM's prefix cache.

    It sets a private field of vLLM: ``schedule`` registers the blocks of a load, and another request can hit
    them before any connector hook runs.
    """

    def __init__(self, num_cached: Mapping[int, dict[str, int]]) -> None:
        """``num_cached``: the fields of the covered groups; empty if vLLM registers nothing."""
        self._num_cached = num_cached

    @classmethod
    def of(cls, manager: KVCacheManager, tokens_per_block: Mapping[int, int]) -> PrefixCache:
        """Cover these groups. Raises SpecError if prefix caching is on and this vLLM lacks the field."""
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
        """Whether vLLM may register a block that a load fills only partly."""
        return bool(self._num_cached)

    def keep_out(self, request_id: str, num_blocks: Mapping[int, int]) -> None:
        """Keep a request's blocks before these indices, by group, out of the prefix cache.

        Call it before the load starts. It holds until vLLM frees the request's blocks.
        """
        for index, first in num_blocks.items():
            if (num_cached := self._num_cached.get(index)) is not None:
                num_cached[request_id] = max(first, num_cached.get(request_id, 0))


def cannot_keep_out(what: str) -> SpecError:
    """The error that keeps an engine with windows and prefix caching from starting."""
    return SpecError(
        f"this vLLM has no {what}, which kvferry needs to keep partly loaded blocks of sliding windows out"
        " of the prefix cache: use a vLLM version that kvferry supports, or --no-enable-prefix-caching"
    )


MAX_TICKETS = 8

_Refused = tuple[str, str]
"""Why a ticket is not used: a code for the counter, and a message."""


@dataclass
class _Wanted:
    """A request that other engines prefill."""

    tickets: tuple[Ticket, ...]
    """In order of preference."""
    refusal: _Refused | None
    num_loadable: int
    """How many first tokens the tickets cover."""
    num_computed: int = 0
    """How many of them are already here."""


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """A soft offer of a prompt's prefix: an earlier turn of its conversation."""

    request_id: str
    ticket: Ticket
    num_common: int
    """The length of the common prefix."""
    digest: bytes
    """Of the common prefix: a granted ticket must match it."""


@dataclass(slots=True)
class _Sources:
    """The sources of a request, in order of preference, until all claims have ended."""

    found: list[_Turn | _Wanted]
    is_needed: bool
    """Whether a router relies on the load: the request fails if it cannot be loaded."""
    is_claimed: bool = False

    @property
    def tickets(self) -> list[tuple[Ticket, ...]]:
        """The usable tickets so far."""
        found = (each for each in self.found if isinstance(each, _Wanted) and not each.refusal)
        return [each.tickets for each in found if each.tickets]


def address_of(params: Mapping[str, Any]) -> str:
    """The address of the prefilling engine; empty if the router gives none."""
    host, port = params.get("remote_host"), params.get("remote_port")
    is_said = isinstance(host, str) and host.isascii() and isinstance(port, int) and 0 < port < 1 << 16
    return f"tcp://{host}:{port}" if is_said and host else ""


class Incoming:
    """The requests of a vLLM engine with a ticket, until they end."""

    def __init__(
        self,
        groups: Groups,
        adapters: Adapters,
        take_back: Callable[[Ticket], bool],
        trust: Trust,
        open_claimant: Callable[[], Claimant],
        *,
        is_reading_back: bool = False,
    ) -> None:
        """``take_back`` withdraws a ticket if this engine issued it, and returns whether it did."""
        self._groups, self._adapters, self._take_back = groups, adapters, take_back
        self._trust, self._host = trust, this_host()
        self._wanted: dict[str, _Wanted] = {}
        """Requests without blocks."""
        self._live: dict[str, tuple[Ticket, ...]] = {}
        """All requests, with the tickets that each uses."""
        self._known: list[tuple[str, tuple[Ticket, ...]]] = []
        self._loads: list[Load] = []
        self._dropped: list[tuple[str, tuple[Ticket, ...]]] = []
        self._rejected: Counter[str] = Counter()
        self._cache = PrefixCache({})
        self._num_kept_out = 0
        self._open_claimant, self._is_reading_back = open_claimant, is_reading_back
        self._claiming: Claimant | None = None
        self._sought: dict[int, Request] = {}
        """Requests whose prefills have not started, by query number."""
        self._sources: dict[str, _Sources] = {}
        """Of requests with soft offers, which are claimed when vLLM requests the number of matched tokens."""
        self._claims: dict[int, _Turn] = {}
        self._seeking: dict[str, int] = {}
        """The query number of each request that awaits the start of its prefill."""
        self._read_back: set[str] = set()
        """Requests with a ticket for an earlier turn, and without blocks."""
        self._read_backs: Counter[str] = Counter()
        self._num_read_back = 0
        self._held_from: dict[str, int] = {}
        """Of requests whose first loaded blocks were only partly filled."""

    def bind(self, cache: PrefixCache) -> None:
        self._cache = cache

    @property
    def figures(self) -> Figures:
        """Counters that only the scheduler has: tickets, and blocks kept out of the prefix cache."""
        return {
            **by_label(REJECTED_TICKETS.name, self._rejected),
            **by_label(READ_BACKS.name, self._read_backs),
            (READ_BACK_TOKENS.name,): self._num_read_back,
            (UNCACHED_BLOCKS.name,): self._num_kept_out,
        }

    def new_request(self, request: Request) -> None:
        """Hold a request's ticket, however long the request waits for blocks."""
        params = request.kv_transfer_params or {}
        is_needed, is_there = bool(params.get("do_remote_prefill")), TICKET in params or TICKETS in params
        can_claim = self._is_reading_back and is_identified(request)
        if not is_needed and not (can_claim and is_there):
            return
        if TRANSFER in params and not is_there:
            self._seek(request, params)
            return
        found = [self._source(request, each, is_needed, can_claim) for each in self._tickets(params)]
        sources = _Sources([each for each in found if each is not None], is_needed)
        self._sources[request.request_id] = sources
        self._settle(request, sources)

    def _settle(self, request: Request, sources: _Sources) -> None:
        """Use all usable sources, once no claim is open."""
        if any(isinstance(each, _Turn) for each in sources.found):
            return
        del self._sources[request.request_id]
        judged = [each for each in sources.found if isinstance(each, _Wanted)]
        good = [each for each in judged if each.refusal is None]
        refused = [each.refusal for each in judged if each.refusal]
        # Another sample of the prompt may have taken a ticket while claims were open.
        live = self._live.values()
        free = [each for each in good for ticket in each.tickets if not self._is_used(ticket, live)]
        if free:
            tickets = tuple(ticket for each in free for ticket in each.tickets)
            self._want(request, _Wanted(tickets, None, max(each.num_loadable for each in free)))
        elif judged and sources.is_needed:
            self._want(request, _Wanted((), None, 0) if good else judged[0])
            refused = refused[1:] if not good else refused
        for code, why in refused:
            self._rejected[code] += 1
            log.warning("%s is not loaded from one of its sources: %s", request.request_id, why)

    def _want(self, request: Request, wanted: _Wanted) -> None:
        self._wanted[request.request_id] = wanted
        used = self._live[request.request_id] = () if wanted.refusal else wanted.tickets
        if used:
            self._known.append((request.request_id, used))

    def _source(
        self, request: Request, ticket: Ticket | _Refused, is_needed: bool, can_claim: bool
    ) -> _Turn | _Wanted | None:
        """The source that a ticket represents; None if it is of no use."""
        if can_claim and isinstance(ticket, Ticket) and isinstance(ticket.parts, bytes):
            return self._turn(request, ticket)
        if is_needed or not isinstance(ticket, Ticket) or TICKETS in (request.kv_transfer_params or {}):
            return self._judged(request, ticket)
        self._take_back(ticket)  # this engine computes what its prefix cache lacks
        return None

    @property
    def _claimant(self) -> Claimant:
        if self._claiming is None:
            self._claiming = self._open_claimant()
        return self._claiming

    def _seek(self, request: Request, params: dict[str, Any]) -> None:
        """Request the ticket of a prefill that runs, or will run, on another engine."""
        address, transfer = address_of(params), params[TRANSFER]
        if request.skip_reading_prefix_cache:
            return  # vLLM computes the whole prompt in any case
        if not isinstance(transfer, str) or not 0 < len(transfer) <= MAX_TRANSFER or not address:
            why = f"{TRANSFER}, remote_host and remote_port do not identify a prefill and its engine"
            self._want(request, self._judged(request, ("no-ticket", why)))
        elif failure := address_refusal(address, self._trust):
            self._want(request, self._judged(request, (failure.code.value, str(failure))))
        else:
            number = self._seeking[request.request_id] = self._claimant.find(address, transfer)
            self._sought[number], self._live[request.request_id] = request, ()

    def _found(self, request: Request, end: ClaimEnd) -> None:
        """Process the end of a query: the prefill has started, or cannot be read."""
        ticket, is_awaited = end.ticket, self._seeking.get(request.request_id) == end.number
        if not is_awaited:
            if ticket and not self._is_wanted(ticket, request):
                self._dropped.append(("", (ticket,)))
            return
        del self._seeking[request.request_id]
        found: Ticket | _Refused
        if ticket is None:
            found = "no-ticket", f"the prefill cannot be read: {printable(end.detail)}"
        elif refused := refusal(ticket, self._trust, self._host):
            found = refused.code.value, str(refused)
        else:
            found = ticket
        self._want(request, self._judged(request, found))

    def _is_wanted(self, ticket: Ticket, ended: Request) -> bool:
        """Whether another request reads or awaits this prefill: a router may retry a decode."""
        name = (ended.kv_transfer_params or {}).get(TRANSFER)
        others = (request for request in self._sought.values() if request.request_id in self._seeking)
        is_sought = any((other.kv_transfer_params or {}).get(TRANSFER) == name for other in others)
        return is_sought or self._is_used(ticket, self._live.values())

    def _turn(self, request: Request, ticket: Ticket) -> _Turn | None:
        is_ours = self._take_back(ticket)  # then this engine computes what its prefix cache lacks
        if not isinstance(ticket.parts, bytes) or is_ours or request.skip_reading_prefix_cache:
            return None
        most = self._groups.num_loadable(request.num_prompt_tokens)
        try:
            ours = digest_parts_of(request, most, self._adapters)
        except SpecError as error:
            log.warning("%s: this engine computes the prompt: %s", request.request_id, error)
            return None
        if num_common := num_common_tokens(ours, ticket.parts):
            return _Turn(request.request_id, ticket, num_common, part_at(ours, num_common))
        self._read_backs["diverged"] += 1
        return None

    def _claim(self, request: Request, num_computed: int) -> None:
        """Claim earlier turns that exceed ``num_computed``, once; settle the sources if no claim is open."""
        sources = self._sources.get(request.request_id)
        if sources is None:
            return
        if not sources.is_claimed:
            sources.is_claimed = True
            turns = [each for each in sources.found if isinstance(each, _Turn)]
            for turn in turns:
                if turn.num_common <= num_computed:
                    self._read_backs["cached"] += 1
                    sources.found.remove(turn)
                else:
                    self._claims[self._claimant.claim(turn.ticket, turn.num_common)] = turn
        self.take_claims()
        self._settle(request, sources)

    def take_claims(self) -> None:
        """Process ended claims and queries. A granted ticket is loaded like any other."""
        for end in self._claiming.poll() if self._claiming else ():
            if request := self._sought.pop(end.number, None):
                self._found(request, end)
                continue
            self._claim_ended(self._claims.pop(end.number), end)

    def _claim_ended(self, turn: _Turn, end: ClaimEnd) -> None:
        sources, ticket = self._sources.get(turn.request_id), end.ticket
        is_awaited = sources is not None and turn in sources.found
        outcome: list[_Turn | _Wanted] = []
        if ticket is None:
            self._read_backs["denied"] += 1
            log.debug("%s: this engine computes the prompt: %s", turn.request_id, printable(end.detail))
        elif not is_awaited or ticket.digest != turn.digest or ticket.num_tokens > turn.num_common:
            self._read_backs["unused"] += 1
            self._dropped.append(("", (ticket,)))
        else:
            self._read_backs["claimed"] += 1
            self._read_back.add(turn.request_id)
            outcome = [_Wanted((ticket,), None, ticket.num_tokens)]
        if sources is not None and is_awaited:
            at = sources.found.index(turn)
            sources.found[at : at + 1] = outcome

    def _judged(self, request: Request, ticket: Ticket | _Refused) -> _Wanted:
        most = self._groups.num_loadable(request.num_prompt_tokens)
        if not isinstance(ticket, Ticket):
            return _Wanted((), ticket, most)
        if refused := self._refusal(request, ticket, most):
            return _Wanted((ticket,), refused, most)
        if self._take_back(ticket) or self._is_used(ticket, self._live.values()):
            # This engine's own prefill, or one that several samples of a prompt share (n > 1): this engine
            # computes what its prefix cache lacks.
            return _Wanted((), None, 0)
        return _Wanted((ticket,), None, min(most, ticket.num_tokens))

    def _tickets(self, params: dict[str, Any]) -> list[Ticket | _Refused]:
        texts = params.get(TICKETS) or [params.get(TICKET)]
        if not isinstance(texts, list) or len(texts) > MAX_TICKETS:
            return [("no-ticket", f"{TICKETS} is a list of at most {MAX_TICKETS} tickets")]
        return [self._ticket(text) for text in texts]

    def _ticket(self, text: object) -> Ticket | _Refused:
        """The ticket, or why it is refused. It is authenticated before it is decoded or used to connect."""
        if not isinstance(text, str):
            cure = "use kvferry on the prefill engine, and a router that passes all keys"
            return "no-ticket", f"kv_transfer_params carry no ticket ({TICKET}): {cure}"
        if refused := text_refusal(text, self._trust):
            return refused.code.value, str(refused)
        try:
            ticket = from_text(text)
        except SpecError as error:
            return "unreadable", str(error)
        refused = refusal(ticket, self._trust, self._host)
        return (refused.code.value, str(refused)) if refused else ticket

    def _refusal(self, request: Request, ticket: Ticket, most: int) -> _Refused | None:
        if not is_identified(request):
            return "other-prompt", UNIDENTIFIED
        try:
            is_same = ticket.digest == digest(request, ticket.num_tokens, self._adapters)
        except SpecError as error:
            return "other-prompt", str(error)
        if not is_same:
            ours = request.lora_request.lora_name if request.lora_request else "none"
            why = "the ticket is for another prompt, cache_salt or LoRA adapter than this request's"
            return "other-prompt", f"{why} ({ours})"
        if self._groups.has_state and ticket.num_tokens > most:
            return (
                "state-too-long",
                f"the recurrent state behind the ticket includes {ticket.num_tokens} tokens, but at most"
                f" {most} tokens of this prompt may be loaded",
            )
        return None

    @staticmethod
    def _is_used(ticket: Ticket, others: Iterable[tuple[Ticket, ...]]) -> bool:
        """Whether another request reads under the same lease, possibly at an earlier stage."""
        return any(other.lease_name == ticket.lease_name for used in others for other in used)

    def matched(self, request: Request, num_computed: int) -> tuple[int | None, bool]:
        """How many tokens the tickets add to those that are already here.

        A refused ticket counts like a usable one, because only a worker can fail a request.
        """
        self.take_claims()
        self._claim(request, num_computed)
        if request.request_id in self._sources or request.request_id in self._seeking:
            return None, False  # vLLM calls again
        wanted = self._wanted.get(request.request_id)
        if wanted is None:
            return 0, False
        wanted.num_computed = num_computed
        count = wanted.num_loadable - num_computed
        return (count, True) if count > 0 else (0, False)

    def allocated(self, request: Request, block_ids: BlockIds, num_external: int) -> None:
        """Load a request that has blocks. A ticket is valid for one load; an unneeded one is returned."""
        wanted = self._wanted.pop(request.request_id, None)
        if wanted is None:
            return
        (request.kv_transfer_params or {})["do_remote_prefill"] = False
        if request.request_id in self._read_back:
            self._read_back.discard(request.request_id)
            self._num_read_back += num_external
        if wanted.refusal is not None:
            self._rejected[wanted.refusal[0]] += 1
        if not num_external:
            self._give_back(request.request_id, wanted.tickets)
            return
        refusal = wanted.refusal[1] if wanted.refusal else ""
        load = Load(request.request_id, wanted.tickets, refusal=refusal)
        num_tokens = wanted.num_computed + num_external
        self._loads.append(self._filled(load, block_ids, num_tokens, wanted.num_computed))

    def _filled(self, load: Load, block_ids: BlockIds, num_tokens: int, num_kept: int) -> Load:
        """Complete a load. vLLM registers its whole blocks; partial ones are kept out of the prefix cache."""
        tables = self._groups.tables(block_ids, num_tokens)
        # Windows are read from one source with all of the tokens: from any of these.
        said = [each.held_from for each in load.tickets if each.num_tokens >= num_tokens]
        is_said = self._cache.is_on and said and all(isinstance(each, int) for each in said)
        held_from = max(each for each in said if isinstance(each, int)) if is_said else None
        filling = self._groups.filling(tables, num_tokens, num_kept, held_from)
        self._cache.keep_out(load.request_id, self._groups.by_index(filling.partial))
        if self._cache.is_on:
            self._num_kept_out += sum(map(len, filling.partial.values()))
        if filling.held_from:
            self._held_from[load.request_id] = filling.held_from
        kept = self._groups.kept(num_kept)
        return replace(load, tables=tables, need=filling.need, kept=kept, num_tokens=num_tokens)

    def take_held_from(self, request_id: str) -> int:
        """The token from which on an ended request's load has filled every cell of its blocks."""
        return self._held_from.pop(request_id, 0)

    def finished(self, request: Request) -> None:
        """Give up everything for a request that has ended, loaded or not.

        Includes requests that vLLM's front end rejected: they have a one-token prompt and end at once.
        """
        request_id = request.request_id
        if sources := self._sources.pop(request_id, None):
            others = [*self._live.values(), *(used for one in self._sources.values() for used in one.tickets)]
            self._dropped += [("", used) for used in sources.tickets if not self._is_used(used[0], others)]
        self._seeking.pop(request_id, None)
        self._read_back.discard(request_id)
        if request_id not in self._live:
            return
        wanted = self._wanted.pop(request_id, None)
        loads = [load.tickets for load in self._loads if load.request_id == request_id]
        self._give_back(request_id, wanted.tickets if wanted else next(iter(loads), ()))
        del self._live[request_id]
        # vLLM waits for the end of every load, even one that need not start.
        self._loads = [Load(request_id) if o.request_id == request_id else o for o in self._loads]

    def _give_back(self, request_id: str, tickets: tuple[Ticket, ...]) -> None:
        """Cancel a request's load in the workers; tickets that no other request uses end now."""
        others = [used for other, used in self._live.items() if other != request_id]
        unused = tuple(t for t in tickets if not self._is_used(t, others) and not self._take_back(t))
        self._known = [news for news in self._known if news[0] != request_id]
        self._dropped.append((request_id, unused))

    def step(self) -> StepMetadata:
        step = StepMetadata(dropped=self._dropped, known=self._known, loads=self._loads)
        self._known, self._loads, self._dropped = [], [], []
        return step

    def reset(self) -> None:
        """The model may have changed: this engine computes all requests that have no blocks yet."""
        for request_id, wanted in self._wanted.items():
            self._give_back(request_id, wanted.tickets)
            self._live[request_id] = ()
            self._wanted[request_id] = _Wanted((), None, 0)
        for sources in self._sources.values():
            unused = (used for used in sources.tickets if not self._is_used(used[0], self._live.values()))
            self._dropped += [("", used) for used in unused]
        self._sources.clear()
        self._seeking.clear()
        self._read_back.clear()

    @property
    def is_claiming(self) -> bool:
        return bool(self._claims or self._sought)

    def close(self) -> None:
        if self._claiming is not None:
            self._claiming.close()

    @property
    def has_news(self) -> bool:
        return bool(self._known or self._loads or self._dropped)
