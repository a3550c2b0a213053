"""Engines of the simulated world: schedulers with pools, which reuse every block as soon as they may."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count
from random import Random

from kvferry.endpoint import Destination, SourceEngine, SourceRank
from kvferry.endpoint.claiming import Claimant
from kvferry.endpoint.invitation import Invitation
from kvferry.errors import SpecError
from kvferry.runtime import Timing
from kvferry.runtime.claims import ClaimEnd
from kvferry.wire.secret import Trust
from kvferry.wire.ticket import Ticket
from tests.support.simulation.cells import (
    DST_STALE,
    MISFIT,
    SRC_STALE,
    WEIGHTS,
    Content,
    FreeBlocks,
    NamedMemory,
    Placed,
    described,
    held_tokens,
    joined,
    wanted_tokens,
)
from tests.support.simulation.fabric import SimulatedFabric, SimulatedTransport
from tests.support.simulation.growing import (
    WAIT_SECONDS,
    SimulatedPrefill,
    early_tables,
)
from tests.support.simulation.laws import Law, Laws, RankLoad, SimulatedLoad, SimulatedRequest
from tests.support.simulation.network import Network
from tests.support.simulation.process import SimulatedHost, SimulatedProcess
from tests.support.simulation.timeline import Timeline
from tests.support.simulation.trace import Trace

LONGEST_QUEUE_SECONDS = 20.0
"""How long a request waits for blocks."""

Lie = Callable[[str, bytes], list[tuple[str, bytes]]]


class Surroundings:
    """What every engine of a world is put into."""

    def __init__(
        self,
        timeline: Timeline,
        chance: Random,
        trace: Trace,
        laws: Laws,
        network: Network,
        fabric: SimulatedFabric,
        timing: Timing,
        trust: Trust,
    ) -> None:
        self.timeline, self.chance, self.trace, self.laws = timeline, chance, trace, laws
        self.network, self.fabric, self.timing, self.trust = network, fabric, timing, trust
        self.numbers = count(1)
        """Of requests and of loads."""


class SimulatedSource:
    """A source engine: an authority, ranks, and a pool whose released blocks are overwritten at once."""

    def __init__(
        self,
        around: Surroundings,
        host: SimulatedHost,
        shape: str,
        topology: str,
        *,
        weights: str = WEIGHTS,
        lie: Lie | None = None,
        max_open: int = 0,
    ) -> None:
        self._around, self.host, self._shape, self._topology = around, host, shape, topology
        self._weights, self._lie, self._max_open = weights, lie, max_open
        self.name, self.fits = host.name, shape != MISFIT and weights == WEIGHTS
        self.manifest = described(shape, topology)
        self._credential = around.chance.randbytes(16)
        self.address = f"tcp://127.0.0.1:{5000 + next(around.numbers)}"
        self._prefills: set[SimulatedPrefill] = set()
        """Those that were begun, and have not ended."""
        self.requests: dict[int, SimulatedRequest] = {}
        """Those of this start, by ticket."""
        self._by_id: dict[str, SimulatedRequest] = {}
        self.released: dict[int, list[str]] = {}
        """What each start of this engine has released, in order."""
        self._heard: dict[int, Counter[int]] = {}
        self.ranks: list[tuple[SimulatedProcess, SourceRank, NamedMemory]] = []
        self.start_ranks()
        self.start_authority()

    @property
    def is_up(self) -> bool:
        """Whether requests can be offered."""
        return self.authority.is_alive

    @property
    def processes(self) -> list[SimulatedProcess]:
        """All of its processes that were started last."""
        return [self.authority, *(process for process, _, _ in self.ranks)]

    # -- starts and ends ---------------------------------------------------------------------------

    def start_ranks(self) -> None:
        """New processes, with memory of their own."""
        around = self._around
        self.ranks = []
        for rank in range(len(self.manifest.ranks)):
            process = SimulatedProcess(self.host, around.network, f"{self.name}/{rank}")
            memory = NamedMemory(
                self._shape, self._topology, rank, SRC_STALE, engine=self.name, weights=self._weights
            )
            transport = SimulatedTransport(around.fabric, process, memory)
            source_rank = SourceRank(
                Invitation(self.address, self._credential),
                memory.manifest,
                transport,
                trust=around.trust,
                timing=around.timing,
                edges=process.edges,
            )
            process.after_step = partial(self._poll_rank, rank, source_rank)
            self._heard[rank] = Counter()
            self.ranks.append((process, source_rank, memory))

    def start_authority(self) -> None:
        """A new start of the engine: nothing that an earlier one had on offer is any more."""
        around = self._around
        for request in self.requests.values():
            request.over_at = min(request.over_at, around.timeline.now)
        self.requests, self._by_id, self.pool = {}, {}, FreeBlocks(self.manifest)
        self._prefills.clear()
        self.authority = SimulatedProcess(self.host, around.network, self.name)
        self.engine = SourceEngine(
            self.name,
            len(self.manifest.ranks),
            listen=self.address,
            credential=self._credential,
            trust=around.trust,
            timing=around.timing,
            edges=self.authority.edges,
        )
        if self._max_open:
            self.engine._offers.MAX_OPEN = self._max_open
        self.generation = self.engine._offers.generation
        self.released[self.generation] = []
        self.authority.after_step = self._poll_authority
        channel = self.authority.channel
        assert channel is not None
        channel.on_send = lambda to, data: around.laws.promised(self.requests, self.host.clock, data)
        channel.rewrite = self._lie
        for _, _, memory in self.ranks:
            memory.words.fill(memory.stale)  # what the new start finds free is written to at once

    def kill(self, *, with_ranks: bool) -> None:
        """The authority dies, and its ranks with it, or they live on."""
        self._around.trace.add(self.name, "is killed", "with its ranks" if with_ranks else "alone")
        self.authority.kill()
        for process, _, _ in self.ranks if with_ranks else ():
            process.kill()

    def restart(self) -> None:
        """What died comes back."""
        if self.authority.is_alive:
            return
        if not self.ranks[0][0].is_alive:
            self.start_ranks()
        self.start_authority()
        self._around.trace.add(self.name, "starts again as generation", self.generation)

    # -- requests ----------------------------------------------------------------------------------

    def prefill(self, num_tokens: int) -> SimulatedRequest | None:
        """Write a request and offer it; None if there is no room now."""
        around = self._around
        if not self.authority.is_alive or self.authority.is_stopped:
            return None
        placed = self.pool.take(num_tokens)
        if placed is None:
            return None
        number = next(around.numbers)
        content = Content(number, num_tokens)
        for _, _, memory in self.ranks:
            memory.own(placed, number)
            memory.write(placed, content, held_tokens(self.manifest, num_tokens))
        request_id = f"request-{number}"
        try:
            ticket = self.engine.offer(request_id, placed.tables, num_tokens)
        except SpecError as refusal:
            around.trace.add(self.name, "cannot offer", refusal)
            self.pool.give_back(placed)
            return None
        self.authority.wake()
        return self._offered(content, ticket, placed)

    def _offered(
        self, content: Content, ticket: Ticket, placed: Placed, *, is_pinned: bool = True
    ) -> SimulatedRequest:
        request = SimulatedRequest(
            content.number,
            ticket.request_id,
            content,
            self.generation,
            ticket,
            placed,
            is_trusted=self._lie is None,
            fits=self.fits,
            source=self.processes,
            is_pinned=is_pinned,
        )
        self.requests[ticket.ticket_id] = self._by_id[ticket.request_id] = request
        self._around.trace.add(self.name, "offers", ticket.request_id, f"as ticket {ticket.ticket_id}")
        return request

    # -- prompts that are read while they are computed ------------------------------------------------

    def begin(self, prefill: SimulatedPrefill) -> None:
        """Compute a prompt from its first token on; again, if it was preempted."""
        if prefill.generation != self.generation:
            return  # the engine that was asked for it is gone
        self._prefills.add(prefill)
        prefill.num_tries += 1
        prefill.next_step, prefill.device_at = 0, self._around.timeline.now
        self._soon(prefill, 0.0, self._schedule)

    def _soon(
        self, prefill: SimulatedPrefill, seconds: float, act: Callable[[SimulatedPrefill], None]
    ) -> None:
        """Have the scheduler go on with a prefill, if it is still the one that has begun this try of it."""
        num_tries = prefill.num_tries

        def if_current() -> None:
            if self._has(prefill, num_tries):
                act(prefill)

        self._around.timeline.after(seconds, partial(self.authority.do, if_current))

    def _has(self, prefill: SimulatedPrefill, num_tries: int) -> bool:
        is_alive = prefill.generation == self.generation and self.authority.is_alive
        return is_alive and not prefill.is_over and prefill.num_tries == num_tries

    def _schedule(self, prefill: SimulatedPrefill) -> None:
        """The next step of a prefill: its blocks, its offer, and work for the device."""
        chance, at = prefill.chance, prefill.next_step
        if at >= prefill.abort_at:
            self._abort(prefill)
        elif prefill.num_preemptions and prefill.offer and chance.random() < 0.4:
            prefill.num_preemptions -= 1
            self._preempt(prefill)
        elif at < len(prefill.steps) and not self._take_blocks(prefill, prefill.steps[at]):
            self._preempt(prefill)
        elif at < len(prefill.steps) and self._is_offered(prefill):
            prefill.next_step += 1
            self._compute(prefill, prefill.steps[at - 1] if at else 0, prefill.steps[at])

    def _take_blocks(self, prefill: SimulatedPrefill, num_now: int) -> bool:
        before, content = prefill.placed, prefill.content
        more = self.pool.take(content.num_tokens, num_now, before)
        if more is None:
            return False
        for _, _, memory in self.ranks:
            memory.own(more, content.number)
        prefill.placed = joined(before, more) if before else more
        return True

    def _is_offered(self, prefill: SimulatedPrefill) -> bool:
        """Offer a prefill that begins; whether that was done."""
        assert prefill.placed is not None
        if prefill.offer is not None:
            prefill.requests[-1].placed = prefill.placed
            return True
        content = prefill.content
        name = f"prefill-{prefill.num_tries}-of-{content.number}"
        tables = early_tables(self.manifest, prefill.placed)
        try:
            prefill.offer = self.engine.open(name, tables, content.num_tokens, transfer=prefill.transfer)
        except SpecError as refusal:
            self._around.trace.add(self.name, "cannot offer", refusal)
            self._abort(prefill)
            return False
        ticket = prefill.offer.ticket
        request = self._offered(content, ticket, prefill.placed, is_pinned=False)
        prefill.requests.append(request)
        return True

    def _compute(self, prefill: SimulatedPrefill, start: int, stop: int) -> None:
        """The device writes these tokens when it has come to them; then the scheduler hears of it."""
        timeline, chance = self._around.timeline, prefill.chance
        prefill.device_at = max(prefill.device_at, timeline.now)
        prefill.device_at += chance.uniform(0.01, prefill.step_seconds)
        num_tries, ranks = prefill.num_tries, self.ranks

        def write() -> None:
            if self._has(prefill, num_tries) and prefill.placed is not None:
                for _, _, memory in ranks:
                    written = prefill.written(self.manifest, start, stop)
                    memory.write(prefill.placed, prefill.content, written)

        timeline.at(prefill.device_at, write)
        seconds = prefill.device_at - timeline.now
        self._soon(prefill, seconds + chance.uniform(0.0, 0.01), lambda one: self._computed(one, stop))
        if prefill.is_ahead:
            self._soon(prefill, chance.uniform(0.0, seconds), self._schedule)

    def _computed(self, prefill: SimulatedPrefill, stop: int) -> None:
        """The output of a step has come back."""
        num_tokens = prefill.content.num_tokens
        assert prefill.placed is not None
        if stop == num_tokens:
            self._finish(prefill)
            return
        if prefill.offer is not None:
            prefill.offer.grow(early_tables(self.manifest, prefill.placed), stop)
        if not prefill.is_ahead:
            self._schedule(prefill)

    def _finish(self, prefill: SimulatedPrefill) -> None:
        """All is computed. If its offer is over it is offered like any other, unless nobody needs it."""
        prefill.is_over, placed, content = True, prefill.placed, prefill.content
        assert placed is not None
        request = prefill.requests[-1]
        if not request.releases and prefill.offer:
            request.placed, request.is_pinned = placed, True
            request.ticket = prefill.offer.close(placed.tables)
            return
        if "declined" not in request.releases:
            try:
                ticket = self.engine.offer(
                    f"end-of-{content.number}", placed.tables, content.num_tokens, transfer=prefill.transfer
                )
            except SpecError as refusal:
                self._around.trace.add(self.name, "cannot offer", refusal)
            else:
                prefill.requests.append(self._offered(content, ticket, placed))
                return
        self._give_away(prefill)
        self.engine.refuse(prefill.transfer, "its reader does not need it")

    def _preempt(self, prefill: SimulatedPrefill) -> None:
        """Its blocks are others' at once; it begins anew when there is room, or is aborted in the end."""
        if self._around.timeline.now > prefill.began_at + WAIT_SECONDS:
            self._abort(prefill)
            return
        self._around.trace.add(self.name, "preempts", prefill.content.number)
        self._give_away(prefill)
        prefill.num_tries += 1  # what its steps would still do is nobody's
        self._soon(prefill, prefill.chance.uniform(0.0, 0.5), self.begin)

    def _abort(self, prefill: SimulatedPrefill) -> None:
        self._around.trace.add(self.name, "aborts the prefill", prefill.content.number)
        prefill.is_over = True
        self._give_away(prefill)
        self.engine.refuse(prefill.transfer, "the prefill was aborted")

    def _give_away(self, prefill: SimulatedPrefill) -> None:
        """Take the blocks of a prefill away from it and from its readers, who are not asked."""
        if prefill.offer is not None:
            prefill.offer.revoke()
            request = prefill.requests[-1]
            request.is_revoked, request.over_at = True, self._around.timeline.now
            for load in request.loads:
                load.must_succeed = False
        if prefill.placed is not None:
            for _, _, memory in self.ranks:
                memory.own(prefill.placed, 0)
            self.pool.give_back(prefill.placed)
        prefill.offer = prefill.placed = None

    def withdraw(self, request: SimulatedRequest) -> None:
        """Take an offer back."""
        if request.generation == self.generation:
            self._around.trace.add(self.name, "withdraws", request.request_id)
            self.authority.do(partial(self.engine.withdraw, request.request_id))

    def _poll_authority(self) -> None:
        for released in self.engine.poll():
            around, request = self._around, self._by_id.get(released.request_id)
            around.trace.add(self.name, "releases", released.request_id, f"({released.reason})")
            self.released[self.generation].append(released.request_id)
            if around.laws.released(self.name, request, released, self.host.clock.read()):
                assert request is not None
                if request.is_pinned:
                    for _, _, memory in self.ranks:
                        memory.own(request.placed, 0)
                    self.pool.give_back(request.placed)

    def _poll_rank(self, rank: int, source_rank: SourceRank) -> None:
        heard = self._heard[rank]
        for released in source_rank.poll():
            for generation, names in self.released.items():
                if heard[generation] < len(names) and names[heard[generation]] == released.request_id:
                    heard[generation] += 1
                    break
            else:
                if self._lie is not None:
                    continue  # it was lied to
                text = f"rank {rank} of {self.name} hears of {released.request_id!r} out of turn"
                self._around.laws.broken(Law.QUIESCENCE, text)

    # -- in the end --------------------------------------------------------------------------------

    @property
    def is_at_rest(self) -> bool:
        """Whether nothing is on offer, and every rank has heard of that."""
        num_released = len(self.released[self.generation])
        heard = (self._heard[rank][self.generation] for rank in range(len(self.ranks)))
        is_told = self._lie is not None or (
            self.engine.is_whole and all(num == num_released for num in heard)
        )
        self._prefills = {prefill for prefill in self._prefills if not prefill.is_over}
        return is_told and not self._prefills and not self.engine.num_leases

    def check_rest(self) -> None:
        """Once the world behaves: nothing is on offer, every block is free, every rank has heard of it."""
        laws = self._around.laws
        for request in self.requests.values():
            if not request.releases:
                laws.broken(Law.LIVENESS, f"{self.name} never releases {request.request_id}")
        if self._prefills:
            laws.broken(Law.LIVENESS, f"{self.name} has {len(self._prefills)} prefills under way")
        if self.engine.num_leases or self.pool.num_taken:
            num = self.pool.num_taken
            laws.broken(Law.LIVENESS, f"{self.name} keeps {self.engine.num_leases} leases, {num} blocks")
        if self._lie is not None:
            return  # its ranks may believe anything
        if not self.engine.is_whole:
            laws.broken(Law.LIVENESS, f"{self.name} is not whole in the end")
        num_released = len(self.released[self.generation])
        for rank in range(len(self.ranks)):
            if self._heard[rank][self.generation] != num_released:
                num = self._heard[rank][self.generation]
                text = f"rank {rank} of {self.name} has heard of {num} of {num_released} releases"
                laws.broken(Law.LIVENESS, text)


class SimulatedDestination:
    """A destination engine: ranks that load requests into blocks of their pool, and hand them back."""

    def __init__(
        self,
        around: Surroundings,
        host: SimulatedHost,
        shape: str,
        topology: str,
        *,
        max_peers: int = 0,
        digest_every: int = 0,
    ) -> None:
        self._around, self.host, self._shape, self._topology = around, host, shape, topology
        self.name, self._max_peers, self._digest_every = host.name, max_peers, digest_every
        self.manifest = described(shape, topology)
        self._num_starts = 0
        self.loads: list[SimulatedLoad] = []
        """Of this start."""
        self.start()

    @property
    def is_up(self) -> bool:
        """Whether requests can be loaded."""
        return self.processes[0].is_alive

    def start(self) -> None:
        """New processes, with memory of their own, under another name."""
        around = self._around
        self._num_starts += 1
        self.reader = f"{self.name}#{self._num_starts}"
        self.loads, self.pool = [], FreeBlocks(self.manifest)
        self.processes: list[SimulatedProcess] = []
        self.memories: list[NamedMemory] = []
        self.transports: list[SimulatedTransport] = []
        self.destinations: list[Destination] = []
        self._by_handle: list[dict[int, RankLoad]] = []
        for rank in range(len(self.manifest.ranks)):
            process = SimulatedProcess(self.host, around.network, f"{self.name}/{rank}")
            memory = NamedMemory(self._shape, self._topology, rank, DST_STALE, engine=self.name)
            transport = SimulatedTransport(around.fabric, process, memory)
            destination = Destination(
                memory.manifest,
                rank,
                transport,
                reader=self.reader,
                num_ranks=len(self.manifest.ranks),
                trust=around.trust,
                timing=around.timing,
                digest_every=self._digest_every,
                edges=process.edges,
            )
            if self._max_peers:
                destination._reader.MAX_PEERS = self._max_peers
            process.after_step = partial(self._poll, rank, destination)
            self.processes.append(process)
            self.memories.append(memory)
            self.transports.append(transport)
            self.destinations.append(destination)
            self._by_handle.append({})
        self._seeking: dict[int, Callable[[ClaimEnd], None]] = {}
        """By the number of the question: what is done with its end."""
        scheduler = SimulatedProcess(self.host, around.network, f"{self.name}/scheduler")
        self.claimant = Claimant(self.name, trust=around.trust, edges=scheduler.edges)
        scheduler.after_step = self._poll_claimant
        self.scheduler, self.processes = scheduler, [*self.processes, scheduler]

    def kill(self) -> None:
        """All of its ranks die."""
        self._around.trace.add(self.name, "is killed")
        for process in self.processes:
            process.kill()

    def restart(self) -> None:
        """It comes back."""
        if not self.is_up:
            self.start()
            self._around.trace.add(self.name, "starts again as", self.reader)

    # -- loads -------------------------------------------------------------------------------------

    def seek(self, address: str, transfer: str, ended: Callable[[ClaimEnd], None]) -> None:
        """Ask a source for the ticket of a prefill that has this name, as soon as it has begun."""
        if self.is_up:
            self.scheduler.do(partial(self._seek, address, transfer, ended))

    def _seek(self, address: str, transfer: str, ended: Callable[[ClaimEnd], None]) -> None:
        number = self.claimant.find(address, transfer)
        self._seeking[number] = ended
        self._around.timeline.after(LONGEST_QUEUE_SECONDS, partial(self._give_up_seeking, number, ended))

    def _give_up_seeking(self, number: int, ended: Callable[[ClaimEnd], None]) -> None:
        """Its client has gone: a source that began anew knows nothing of a prefill, and waits for it."""
        if self._seeking.get(number) is ended:
            del self._seeking[number]
            self.scheduler.do(partial(self.claimant.cancel, number))

    def _poll_claimant(self) -> None:
        for end in self.claimant.poll():
            if ended := self._seeking.pop(end.number, None):
                ended(end)

    def load(
        self,
        request: SimulatedRequest,
        ticket: Ticket,
        *,
        is_held: bool,
        is_forged: bool = False,
        must_succeed: bool = False,
    ) -> SimulatedLoad | None:
        """SimulatedLoad a request; if it ``is_held``, it waits a while for blocks."""
        if not self.is_up:
            return None
        around = self._around
        now = around.timeline.now
        load = SimulatedLoad(request, ticket, self.reader, is_held, is_forged, must_succeed, now)
        for rank, memory in enumerate(self.memories):
            rank_load = RankLoad(next(around.numbers), load, rank, self.processes[rank], memory)
            around.laws.by_owner[rank_load.number] = rank_load
            load.ranks.append(rank_load)
        request.loads.append(load)
        self.loads.append(load)
        around.trace.add(self.name, "will hold" if is_held else "will load", request.request_id)
        if is_held:
            for rank_load in load.ranks:
                rank_load.process.do(partial(self._hold, rank_load))
            around.timeline.after(around.chance.uniform(0.0, 3.0), partial(self._supply, load))
        else:
            self._supply(load)
        return load

    def _hold(self, rank_load: RankLoad) -> None:
        handle = self.destinations[rank_load.rank].hold(rank_load.load.ticket)
        rank_load.handle = handle
        self._by_handle[rank_load.rank][handle] = rank_load

    def _supply(self, load: SimulatedLoad) -> None:
        """Give a load its blocks, as soon as there are some; not if it failed meanwhile."""
        around = self._around
        if load.reader != self.reader or load.placed is not None or any(rank.report for rank in load.ranks):
            return
        num_tokens = load.request.content.num_tokens
        load.placed = self.pool.take(num_tokens)
        if load.placed is None:
            load.must_succeed = False  # its lease may end before there is room
            if around.timeline.now < load.began_at + LONGEST_QUEUE_SECONDS:
                around.timeline.after(0.3, partial(self._supply, load))
            else:
                self._give_up(load)
            return
        num_kept = around.chance.randint(1, num_tokens - 1) if around.chance.random() < 0.25 else 0
        load.need, load.kept = wanted_tokens(self.manifest, num_tokens, num_kept)
        kept = Content(-load.request.number, num_tokens)
        for rank_load in load.ranks:
            rank_load.memory.own(load.placed, rank_load.number)
            rank_load.memory.write(load.placed, kept, load.kept)
            rank_load.process.do(partial(self._fetch, rank_load))

    def _give_up(self, load: SimulatedLoad) -> None:
        """There is no room for it: reads that hang keep their blocks."""
        if load.is_held:
            self.abort(load)
        else:
            self.loads.remove(load)

    def _fetch(self, rank_load: RankLoad) -> None:
        load = rank_load.load
        if load.placed is None or rank_load.report is not None:
            return  # its hold has failed before this could be called
        rank_load.is_supplied = True
        handle = self.destinations[rank_load.rank].fetch(
            load.ticket,
            load.placed.tables,
            load.need,
            kept=load.kept,
            held=rank_load.handle,
        )
        rank_load.handle = handle
        self._by_handle[rank_load.rank][handle] = rank_load

    def abort(self, load: SimulatedLoad, *, is_everywhere: bool = True) -> None:
        """Give a load up, on all ranks or on one."""
        self._around.trace.add(self.name, "aborts", load.request.request_id)
        for rank_load in load.ranks if is_everywhere else load.ranks[:1]:
            rank_load.process.do(partial(self._abort, rank_load))

    def _abort(self, rank_load: RankLoad) -> None:
        if rank_load.handle is not None:
            self.destinations[rank_load.rank].abort(rank_load.handle)

    def _poll(self, rank: int, destination: Destination) -> None:
        for report in destination.poll():
            laws, rank_load = self._around.laws, self._by_handle[rank].get(report.handle)
            if rank_load is None:
                laws.broken(Law.FAIL_CLOSED, f"{self.name}/{rank} reports what nobody asked for")
                continue
            outcome = report.failure or "loaded"
            self._around.trace.add(
                rank_load.process.name, "reports", rank_load.load.request.request_id, outcome
            )
            laws.reported(rank_load, report)
            self._after_report(rank_load)

    def _after_report(self, rank_load: RankLoad) -> None:
        load = rank_load.load
        if load.placed is not None:
            rank_load.memory.own(load.placed, 0)  # another request may have these from now on
            if load.is_over:
                self.pool.give_back(load.placed)
                load.after(load)
        elif not load.is_over and rank_load.report is not None:
            self.abort(load)  # its ticket could not be held: nobody waits for it any more

    # -- in the end --------------------------------------------------------------------------------

    def stuck(self) -> set[RankLoad]:
        """Parts of loads that were not reported."""
        return {rank for load in self.loads for rank in load.ranks if rank.report is None}

    def is_at_rest(self, is_final: bool) -> bool:
        """Whether all is reported but what hangs, and everybody has been told."""
        stuck = self.stuck()
        if any(is_final or all(read.has_ended for read in rank_load.reads) for rank_load in stuck):
            return False
        statuses = [destination.status() for destination in self.destinations]
        return all(not status["settling"] for status in statuses) and len(stuck) == sum(
            int(str(status["quarantined"])) for status in statuses
        )

    def check_rest(self, is_final: bool) -> None:
        """Once the world behaves: every load is reported; or quarantined, if a read of it never ended."""
        laws = self._around.laws
        stuck = self.stuck()
        for rank_load in sorted(stuck, key=lambda one: one.number):
            has_hung = any(not read.has_ended for read in rank_load.reads)
            if is_final or not has_hung:
                laws.broken(Law.LIVENESS, f"{rank_load} is never reported")
        for rank, destination in enumerate(self.destinations):
            status = destination.status()
            num_stuck = sum(1 for one in stuck if one.rank == rank)
            found = (status["quarantined"], status["settling"])
            if found != (num_stuck, 0):
                text = f"{self.name}/{rank} has {num_stuck} loads that hang, and says {status}"
                laws.broken(Law.LIVENESS, text)
        if is_final and self.pool.num_taken:
            laws.broken(Law.LIVENESS, f"{self.name} keeps {self.pool.num_taken} blocks")
