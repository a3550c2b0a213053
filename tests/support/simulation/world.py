"""A world of engines, made of a seed: requests come, things go wrong, and in the end all is well again."""

from __future__ import annotations

from functools import partial
from random import Random

from kvferry.core.choices import Way
from kvferry.runtime import FailureCode, Timing
from kvferry.runtime.claims import ClaimEnd
from kvferry.wire.secret import Secret, Trust
from tests.support.simulation.boards import SimulatedBoards
from tests.support.simulation.cells import MAX_TOKENS, MISFIT, WEIGHTS, Content
from tests.support.simulation.engines import SimulatedDestination, SimulatedSource, Surroundings
from tests.support.simulation.fabric import SimulatedFabric
from tests.support.simulation.growing import SimulatedPrefill
from tests.support.simulation.laws import Law, Laws, SimulatedLoad, SimulatedRequest
from tests.support.simulation.network import Network, SimulatedChannel
from tests.support.simulation.process import SimulatedHost, SimulatedProcess
from tests.support.simulation.timeline import Action, Timeline
from tests.support.simulation.trace import SentMessage, Trace
from tests.support.simulation.troubles import (
    Liar,
    Trouble,
    digest_every,
    drawn,
    forged,
    forgery,
    link_quality,
    read_quality,
)

TIMING = Timing(lease=6.0, meet=4.0, read=15.0, retry=0.5)
REQUEST_SECONDS = 0.4
"""From one request to the next, on average."""
TROUBLE_SECONDS = 2.0
"""From one trouble to the next."""
REST_SECONDS = 90.0
"""After how long a world that behaves must have come to rest."""
SERVED_SECONDS = 4.0
"""How long a load between two healthy engines may take, whatever happens to others."""
GIVEN_BACK_SECONDS = 2.0
"""How long a ticket may stay pinned between such engines that nobody needs any more; a lease lasts longer."""
GROWING_SHARE = 0.25
"""How many requests are offered while their prompts are computed."""
TOPOLOGIES = (
    "tp=1,block=4,blocks=24",
    "tp=1,block=6,blocks=16,layout=NHD",
    "tp=2,block=4,blocks=24",
    "tp=2,block=8,blocks=12,layout=NHD",
    "tp=3,block=4,blocks=24",
)


class Stranger:
    """Somebody on the network who is not of this world's engines."""

    def __init__(self, network: Network, host: SimulatedHost) -> None:
        self.name, self.host, self.is_running = "a stranger", host, True
        self.channel: SimulatedChannel = network.open(self, "")

    def do(self, action: Action) -> None:
        """What it is told leads to nothing."""
        action()


class SimulatedWorld:
    """Source and destination engines around one fabric. The first of each are healthy: nothing but their own
    requests happens to them, and whatever they do with each other must go well.
    """

    def __init__(self, seed: int, num_requests: int, troubles: frozenset[Trouble] | None = None) -> None:
        self._chance = chance = Random(f"{seed}/troubles")
        self._requests_chance = Random(f"{seed}/requests")
        digests_chance = Random(f"{seed}/digests")
        by_chance = drawn(chance, digests_chance)  # drawn in any case, so that what follows is the same
        self.troubles = by_chance if troubles is None else troubles
        self._num_requests = num_requests
        self._digest_every = digest_every(self.troubles, digests_chance)
        self.timeline = Timeline()
        self.trace = Trace(self.timeline)
        self.laws = Laws(self.timeline, self.trace)
        # On one host readers see boards, and read mapped memory: the short ways through the endpoint.
        is_one_host = Random(f"{seed}/hosts").random() < 0.5
        boards, way = SimulatedBoards(are_seen=is_one_host), Way.MAPPED if is_one_host else Way.MEMORY
        self._network = Network(self.timeline, chance, self.trace, link_quality(self.troubles), boards)
        self._fabric = SimulatedFabric(self.timeline, chance, self.laws, read_quality(self.troubles), way)
        secret = Secret(chance.randbytes(32))
        trust = Trust(secret) if chance.random() < 0.5 else Trust()
        self._around = Surroundings(
            self.timeline, chance, self.trace, self.laws, self._network, self._fabric, TIMING, trust
        )
        self._growing_chance = Random(f"{seed}/growing")
        self._requests: list[SimulatedRequest] = []
        self._is_calm = False
        self._start_engines()
        self._stranger = Stranger(self._network, self._host("elsewhere", is_healthy=False))

    def has(self, trouble: Trouble) -> bool:
        """Whether this world has such a trouble."""
        return trouble in self.troubles

    # -- engines -----------------------------------------------------------------------------------

    def _host(self, name: str, *, is_healthy: bool) -> SimulatedHost:
        return SimulatedHost(self.timeline, self._chance, name, is_healthy=is_healthy)

    def _start_engines(self) -> None:
        chance = self._chance
        self._shape = chance.choice(["one group", "window", "state"])
        max_peers = chance.randint(1, 2) if self.has(Trouble.LIMITS) else 0
        max_open = chance.randint(3, 8) if self.has(Trouble.LIMITS) else 0
        self.sources: list[SimulatedSource] = []
        self.destinations: list[SimulatedDestination] = []
        num_sources = chance.randint(1, 3) + self.has(Trouble.LIARS) + self.has(Trouble.MISFITS)
        for i in range(num_sources):
            host = self._host(f"prefill-{i}", is_healthy=not i)
            is_liar = i > 0 and i == num_sources - 1 and self.has(Trouble.LIARS)
            is_misfit = i > 0 and not is_liar and self.has(Trouble.MISFITS) and i >= num_sources - 2
            shape, weights = self._shape, WEIGHTS
            if is_misfit:
                shape, weights = chance.choice([(MISFIT, WEIGHTS), (self._shape, "of another model")])
            lie = Liar(chance) if is_liar else None
            topology = chance.choice(TOPOLOGIES)
            self.sources.append(
                SimulatedSource(
                    self._around, host, shape, topology, weights=weights, lie=lie, max_open=max_open
                )
            )
        for i in range(chance.randint(1, 3)):
            host = self._host(f"decode-{i}", is_healthy=not i)
            topology = chance.choice(TOPOLOGIES)
            self.destinations.append(
                SimulatedDestination(
                    self._around,
                    host,
                    self._shape,
                    topology,
                    max_peers=max_peers,
                    digest_every=self._digest_every,
                )
            )
        for host in self._unhealthy_hosts():
            host.is_slow = self.has(Trouble.SLOW_WORK)
            if self.has(Trouble.CLOCK_RATES):
                host.clock.run_at(chance.choice([0.5, 0.8, 1.0, 1.25, 2.0]))

    def _engines(self) -> list[SimulatedSource | SimulatedDestination]:
        return [*self.sources, *self.destinations]

    def _unhealthy_hosts(self) -> list[SimulatedHost]:
        return [engine.host for engine in self._engines() if not engine.host.is_healthy]

    # -- a run -------------------------------------------------------------------------------------

    def run(self) -> None:
        """Everything, from the first request until nothing is left to do."""
        when = 1.0  # the ranks have joined by then
        for _ in range(self._num_requests):
            when += self._requests_chance.expovariate(1 / REQUEST_SECONDS)
            self.timeline.at(when, self._request)
        trouble_at = 1.0
        while trouble_at < when:
            trouble_at += self._chance.expovariate(1 / TROUBLE_SECONDS)
            self.timeline.at(trouble_at, self._make_trouble)
        self.timeline.run_until(when + 3.0)
        self._calm_down()
        self._rest(is_final=False)
        self._fabric.let_hung_reads_end()
        self._rest(is_final=True)

    def _calm_down(self) -> None:
        """From now on the world behaves; but what hangs, hangs."""
        self.trace.add("the world", "behaves from now on")
        self._is_calm = True
        self._network.quality = link_quality(frozenset())
        self._network.cut.clear()
        self._fabric.quality = read_quality(frozenset())
        for engine in self._engines():
            engine.restart()
            engine.host.is_slow = False
            self._resume(engine.host)

    def _rest(self, *, is_final: bool) -> None:
        until = self.timeline.now + REST_SECONDS
        while self.timeline.now < until and not self._is_at_rest(is_final):
            self.timeline.run_until(self.timeline.now + 1.0)
        for source in self.sources:
            source.check_rest()
        for destination in self.destinations:
            destination.check_rest(is_final)

    def _is_at_rest(self, is_final: bool) -> bool:
        return all(source.is_at_rest for source in self.sources) and all(
            destination.is_at_rest(is_final) for destination in self.destinations
        )

    # -- requests ----------------------------------------------------------------------------------

    def _request(self) -> None:
        if self._growing_chance.random() < GROWING_SHARE:
            self._request_growing()
            return
        chance = self._requests_chance
        source, destination = chance.choice(self.sources), chance.choice(self.destinations)
        num_tokens, delay = chance.randint(2, MAX_TOKENS), chance.uniform(0.001, 0.05)
        request = source.prefill(num_tokens)
        if request is None:
            return
        self._requests.append(request)
        both = (source.host, destination.host)
        is_plain = all(host.is_healthy for host in both) and not self.has(Trouble.LIMITS)
        is_changed = not is_plain or chance.random() < 0.5
        act = partial(
            self._load, request, destination, is_held=chance.random() < 0.4, is_plain=not is_changed
        )
        if is_changed and self.has(Trouble.SHARED_TICKETS) and chance.random() < 0.3:
            others = [*self.destinations, destination]
            other = partial(self._load, request, chance.choice(others), is_held=False, is_plain=False)
            self.timeline.after(chance.choice([0.0, 0.1, 2.0, 10.0]), other)
        if is_changed and self.has(Trouble.SHARED_TICKETS) and chance.random() < 0.1:
            delay = chance.uniform(0.0, 2 * TIMING.lease)
        if is_changed and self.has(Trouble.ABORTS) and chance.random() < 0.2:
            self.timeline.after(chance.uniform(0.0, 1.0), partial(source.withdraw, request))
        self.timeline.after(delay, act)

    def _load(
        self, request: SimulatedRequest, destination: SimulatedDestination, *, is_held: bool, is_plain: bool
    ) -> None:
        chance = self._requests_chance
        ticket, is_forged = request.ticket, False
        if not is_plain and self.has(Trouble.FORGED_TICKETS) and chance.random() < 0.3:
            ticket, is_forged = forged(ticket, chance), True
        is_given_up = is_plain and self.has(Trouble.ABORTS) and chance.random() < 0.1
        must_succeed = is_plain and not is_given_up
        load = destination.load(
            request, ticket, is_held=is_held, is_forged=is_forged, must_succeed=must_succeed
        )
        if load is None:
            return
        if is_given_up:
            self.timeline.after(chance.uniform(0.0, 0.1), partial(destination.abort, load))
            self.timeline.after(GIVEN_BACK_SECONDS, partial(self._check_given_back, load))
        elif is_plain:
            self.timeline.after(SERVED_SECONDS + 3.0, partial(self._check_served, load))
        elif self.has(Trouble.ABORTS) and chance.random() < 0.3:
            is_everywhere = chance.random() < 0.7
            abort = partial(destination.abort, load, is_everywhere=is_everywhere)
            self.timeline.after(chance.uniform(0.0, 1.5), abort)

    def _request_growing(self) -> None:
        """A router sends both legs at once: one engine computes a prompt, another one reads it meanwhile."""
        chance = self._growing_chance
        source, destination = chance.choice(self.sources), chance.choice(self.destinations)
        content = Content(next(self._around.numbers), chance.randint(2, MAX_TOKENS))
        both = (source.host, destination.host)
        is_plain = all(host.is_healthy for host in both) and not self.has(Trouble.LIMITS)
        is_plain = is_plain and chance.random() < 0.5
        if not source.is_up:
            return
        prefill = SimulatedPrefill.drawn(
            f"transfer-{content.number}",
            content,
            source.generation,
            self.timeline.now,
            chance,
            is_plain=is_plain or not self.troubles,
        )
        self.timeline.after(chance.uniform(0.0, 0.5), partial(source.begin, prefill))
        seek = partial(self._seek, source, destination, prefill, is_plain=is_plain)
        self.timeline.after(chance.uniform(0.0, 1.0), seek)
        if not is_plain and self.has(Trouble.SHARED_TICKETS) and chance.random() < 0.3:
            other = chance.choice(self.destinations)
            self.timeline.after(
                chance.choice([0.0, 0.5, 3.0]), partial(self._seek, source, other, prefill, is_plain=False)
            )

    def _seek(
        self,
        source: SimulatedSource,
        destination: SimulatedDestination,
        prefill: SimulatedPrefill,
        *,
        is_plain: bool,
    ) -> None:
        ended = partial(self._found, source, destination, prefill, is_plain)
        destination.seek(source.address, prefill.transfer, ended)
        if is_plain:
            self.timeline.after(SERVED_SECONDS, partial(self._check_found, prefill))

    def _found(
        self,
        source: SimulatedSource,
        destination: SimulatedDestination,
        prefill: SimulatedPrefill,
        is_plain: bool,
        end: ClaimEnd,
    ) -> None:
        """A prefill can be read; or nothing comes of it, and whoever sought it computes the prompt."""
        chance, ticket = self._growing_chance, end.ticket
        prefill.was_sought = True
        names = {(one.generation, one.ticket.ticket_id): one for one in prefill.requests}
        request = names.get((ticket.generation, ticket.ticket_id)) if ticket else None
        if ticket is None or request is None:
            return
        must_succeed = is_plain and not request.is_revoked
        load = destination.load(request, ticket, is_held=chance.random() < 0.3, must_succeed=must_succeed)
        if load is None:
            return
        load.after = partial(self._after_a_load, source, destination, prefill)
        if is_plain:
            self.timeline.after(SERVED_SECONDS + 3.0, partial(self._check_served, load))
        elif self.has(Trouble.ABORTS) and chance.random() < 0.3:
            self.timeline.after(chance.uniform(0.0, 1.5), partial(destination.abort, load))

    def _after_a_load(
        self,
        source: SimulatedSource,
        destination: SimulatedDestination,
        prefill: SimulatedPrefill,
        load: SimulatedLoad,
    ) -> None:
        """Whoever has failed may try again: a prefill that was preempted goes on under its name."""
        is_failed = any(rank.report and rank.report.failure for rank in load.ranks)
        if is_failed and load.reader == destination.reader and self._growing_chance.random() < 0.5:
            self._seek(source, destination, prefill, is_plain=False)

    def _check_found(self, prefill: SimulatedPrefill) -> None:
        if not prefill.was_sought and prefill.is_over:
            text = f"{prefill.transfer} was computed, and who sought it has not heard of it"
            self.laws.broken(Law.LIVENESS, text)

    def _check_given_back(self, load: SimulatedLoad) -> None:
        outcomes = {rank.report.record.outcome for rank in load.ranks if rank.report is not None}
        is_given_up = load.is_over and outcomes == {FailureCode.ABORTED.value}  # else it began later
        if is_given_up and not load.request.releases:
            text = f"{load.request.request_id} was given up by its one reader, and is still pinned"
            self.laws.broken(Law.LIVENESS, text)

    def _check_served(self, load: SimulatedLoad) -> None:
        if not load.is_over and load.must_succeed:
            text = f"{load.request.request_id} takes longer than {SERVED_SECONDS:g} s between healthy engines"
            self.laws.broken(Law.LIVENESS, text)

    # -- troubles ----------------------------------------------------------------------------------

    def _make_trouble(self) -> None:
        kinds: dict[Trouble, Action] = {
            Trouble.LOSS: self._cut_a_link,
            Trouble.STOPS: self._stop_somebody,
            Trouble.SOURCE_DEATHS: partial(self._kill_a_source, with_ranks=True),
            Trouble.AUTHORITY_DEATHS: partial(self._kill_a_source, with_ranks=False),
            Trouble.DESTINATION_DEATHS: self._kill_a_destination,
            Trouble.CLOCK_RATES: self._pause_a_host,
            Trouble.FORGED_MESSAGES: self._forge_messages,
        }
        some = [make for trouble, make in kinds.items() if self.has(trouble)]
        if some and not self._is_calm:
            self._chance.choice(some)()

    def _cut_a_link(self) -> None:
        ends = self._chance.sample(self._engines(), 2)
        names = frozenset(engine.name for engine in ends)
        if not all(engine.host.is_healthy for engine in ends):
            self.trace.add("the network", "is cut between", *sorted(names))
            self._network.cut.add(names)
            self.timeline.after(self._chance.uniform(0.5, 8.0), partial(self._network.cut.discard, names))

    def _stop_somebody(self) -> None:
        engine = self._chance.choice(self._engines())
        if not engine.host.is_healthy:
            process = self._chance.choice(engine.processes)
            self.trace.add(process.name, "is stopped")
            process.stop()
            self.timeline.after(self._chance.uniform(0.1, 12.0), partial(self._go_on, process))

    def _go_on(self, process: SimulatedProcess) -> None:
        self.trace.add(process.name, "goes on")
        process.resume()

    def _pause_a_host(self) -> None:
        """A virtual machine is paused: its processes and its clock stand still."""
        if hosts := self._unhealthy_hosts():
            host = self._chance.choice(hosts)
            rate = host.clock.rate
            if rate:
                self.trace.add(host.name, "is paused, with its clock")
                host.clock.run_at(0.0)
                for process in self._processes_on(host):
                    process.stop()
                self.timeline.after(self._chance.uniform(0.5, 15.0), partial(self._resume, host, rate))

    def _resume(self, host: SimulatedHost, rate: float = 1.0) -> None:
        if not host.clock.rate:
            host.clock.run_at(rate)
        for process in self._processes_on(host):
            if process.is_stopped:
                self._go_on(process)
            process.wake()  # what it waits for comes at another time than it was planned for

    def _processes_on(self, host: SimulatedHost) -> list[SimulatedProcess]:
        return [process for engine in self._engines() if engine.host is host for process in engine.processes]

    def _kill_a_source(self, *, with_ranks: bool) -> None:
        source = self._chance.choice(self.sources)
        if not source.host.is_healthy and source.is_up:
            source.kill(with_ranks=with_ranks)
            self.timeline.after(self._chance.uniform(0.0, 5.0), source.restart)

    def _kill_a_destination(self) -> None:
        destination = self._chance.choice(self.destinations)
        if not destination.host.is_healthy and destination.is_up:
            destination.kill()
            self.timeline.after(self._chance.uniform(0.0, 5.0), destination.restart)

    def _forge_messages(self) -> None:
        """A stranger has seen what was sent to an authority, and sends something like it."""
        seen = [event for event in self.trace.events[-400:] if isinstance(event, SentMessage)]
        for source in self.sources:
            for event in seen:
                if event.receiver == source.name and self._chance.random() < 0.3:
                    self._stranger.channel.send(source.address, forgery(event.data, self._chance))
