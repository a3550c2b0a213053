"""Bugs to plant into the runtime: what somebody might write some day, and the simulation must find."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from kvferry.core import manifest
from kvferry.core.identity import IdentityCheck
from kvferry.core.runs import REGION_SHIFT, Runs
from kvferry.core.select import Selection
from kvferry.core.select import select as real_select
from kvferry.endpoint import destination as endpoint
from kvferry.endpoint import posted_reads as selecting
from kvferry.endpoint.destination import Destination
from kvferry.endpoint.load_digest import LoadDigest
from kvferry.endpoint.posted_reads import PostedReads
from kvferry.endpoint.source import GrowingOffer, SourceEngine
from kvferry.runtime.active_fetches import ActiveFetches
from kvferry.runtime.authority import Authority
from kvferry.runtime.digest_checks import DigestChecks
from kvferry.runtime.fetch_job import FetchJob
from kvferry.runtime.lease import Offers
from kvferry.runtime.lease import _RankGrant as RankGrant
from kvferry.runtime.reader import Reader
from kvferry.runtime.values import Send
from kvferry.wire.messages import Outcome
from kvferry.wire.ticket import Ticket
from tests.support.simulation import Law, Trouble
from tests.support.simulation.boards import SimulatedBoard, SimulatedBoards
from tests.support.simulation.engines import SimulatedSource


@dataclass(frozen=True)
class PlantedBug:
    """How to break the runtime, and which laws that breaks."""

    name: str
    plant: Callable
    """Called with pytest's ``monkeypatch``."""
    laws: frozenset[Law]
    troubles: frozenset[Trouble] | None = None
    """What has to go wrong for it to do harm; None: whatever a seed draws."""


def reuse_before_quiescence(patch):
    """A load that fails is reported at once, though reads of it are under way."""
    real = ActiveFetches.fail

    def fail(self, now, job, failure):
        for transfer in job.in_flight:
            self.transfers.pop(transfer, None)
        job.in_flight = set()
        return real(self, now, job, failure)

    patch.setattr(ActiveFetches, "fail", fail)


def wrong_request_in_a_release(patch):
    real = Authority._end

    def end(self, now, lease, reason):
        others = [other for other in self._leases.values() if other is not lease]
        return real(self, now, others[0] if others else lease, reason)

    patch.setattr(Authority, "_end", end)


def shrinking_lease(patch):
    def extend(self, now, lease):
        lease.deadline = now + self._timing.lease / 4

    patch.setattr(Authority, "_extend", extend)


def settle_without_capability(patch):
    """Whoever knows the names can settle."""
    patch.setattr(RankGrant, "is_shown", lambda self, token: True)


def effects_out_of_order(patch):
    """Each effect is carried out by a thread of its own."""
    real = Destination._carry_out

    def carry_out(self, effects):
        for effect in effects:
            self._workers.submit(object(), partial(real, self, [effect]))

    patch.setattr(Destination, "_carry_out", carry_out)


def changed_selection(change):
    """Runs that differ from what ``select`` chose."""

    def plant(patch):

        def select(route, request, **kwargs):
            selection = real_select(route, request, **kwargs)
            reads = {rank: product.runs for rank, product in selection.products.items()}
            rank, runs = next(iter(reads.items()), (0, None))
            if runs is None or len(runs) < 2:
                return selection
            return Selection.of(reads | {rank: change(runs)}, selection.blank.runs)

        patch.setattr(selecting, "select", select)

    return plant


def stale_slack(patch):
    def clear(self, post):
        self._put(partial(self._end, post.clear, ""))
        return ""

    patch.setattr(PostedReads, "_clear", clear)


def failed_reads_count(patch):
    real = ActiveFetches.ended
    patch.setattr(ActiveFetches, "ended", lambda self, now, transfer, error: real(self, now, transfer, ""))


def forged_tickets_count(patch):
    """Nobody looks at what proves a ticket."""
    patch.setattr(Offers, "is_own", lambda self, ticket: True)
    patch.setattr(endpoint, "refusal", lambda ticket, trust, host: None)


def waits_without_a_deadline(patch):
    patch.setattr(FetchJob, "give_up_at", lambda self, timing: float("inf"))


def wrong_record(patch):
    real = Reader.selected

    def selected(self, now, handle, selection, *rest):
        effects = real(self, now, handle, selection, *rest)
        if job := self.fetches.get(handle):
            job.num_bytes += 1
        return effects

    patch.setattr(Reader, "selected", selected)


def two_rows_swapped(runs):
    src = runs.src.copy()
    src[[0, 1]] = src[[1, 0]]
    return Runs(src, runs.dst, runs.num_bytes)


def one_run_twice(runs):
    return Runs(*(np.append(column, column[0]) for column in (runs.src, runs.dst, runs.num_bytes)))


def one_run_less(runs):
    return Runs(runs.src[1:], runs.dst[1:], runs.num_bytes[1:])


def one_run_elsewhere(runs):
    """The first run goes to the beginning of its region, whoever has that."""
    dst = runs.dst.copy()
    dst[0] = dst[0] >> REGION_SHIFT << REGION_SHIFT
    return Runs(runs.src, dst, runs.num_bytes)


def another_model_is_served(patch):
    """Weights are not compared."""
    patch.setattr(manifest, "compare_identity", lambda src, dst: IdentityCheck(1, (), ()))


def digest_that_nobody_compares(patch):
    """Bytes that changed on their way count."""

    def compare(self, handle):
        self._checks.pop(handle)

    patch.setattr(DigestChecks, "compare", compare)


def digest_of_the_wrong_cells(patch):
    """A false alarm: the destination takes its own digest with other keys than it has asked for."""
    real = LoadDigest.sums

    def sums(self, tables, parts, seed):
        return real(self, tables, parts, seed + (self._side == "dst"))

    patch.setattr(LoadDigest, "sums", sums)


def lease_never_struck(patch):
    """A lease that is over still stands on the board."""
    patch.setattr(SimulatedBoard, "strike", lambda self, number: None)


def board_of_the_dead(patch):
    """The board of an authority that is gone is still believed."""

    def is_shown(self, place, number, mark):
        return place in self._boards and self._boards[place].marks.get(number) == mark

    patch.setattr(SimulatedBoards, "is_shown", is_shown)


def declined_tickets_are_left(patch):
    """A reader that does not need a ticket leaves it to another."""
    real = ActiveFetches.decline

    def decline(self, now, job, outcome=Outcome.UNREAD):
        real(self, now, job, outcome)
        told = self.settlements._by_attempt[job.attempt]
        told.message = msgspec.structs.replace(told.message, declined=None)
        return [Send(told.to, told.message)]

    patch.setattr(ActiveFetches, "decline", decline)


def one_rank_ends_a_lease(patch):
    """What one rank declines is released, whatever the others do."""
    real = Authority._settled

    def settled(self, now, lease):
        if lease.reading.is_declined:
            return self._end(now, lease, "declined")
        return real(self, now, lease)

    patch.setattr(Authority, "_settled", settled)


def watermark_ahead_of_the_device(patch):
    """When the output of a step comes back, the step that was scheduled after it counts, too."""
    real = SimulatedSource._computed

    def computed(self, prefill, stop):
        is_last = stop == prefill.content.num_tokens
        ahead = min(prefill.steps[prefill.next_step - 1], prefill.content.num_tokens - 1)
        real(self, prefill, stop if is_last else ahead)

    patch.setattr(SimulatedSource, "_computed", computed)


def a_close_is_lost(patch):
    """Readers do not hear that a lease was closed, and do not ask again whether it has grown."""
    real = Authority.grow

    def grow(self, now, ticket):
        effects = real(self, now, ticket)
        return effects if ticket.is_growing else []

    patch.setattr(Authority, "grow", grow)
    real_at = FetchJob.watch_at

    def watch_at(self, timing):
        return float("inf") if self.watch else real_at(self, timing)

    patch.setattr(FetchJob, "watch_at", watch_at)


def preempted_prefills_keep_their_ticket(patch):
    """A prefill that begins anew is the same lease: reads of the blocks that it had before count."""
    kept: dict[object, Ticket] = {}
    names: dict[GrowingOffer, str] = {}
    real = SourceEngine.open

    def open_again(self, *args, transfer, **rest):
        if (ticket := kept.pop((id(self), transfer), None)) is None:
            offer = real(self, *args, transfer=transfer, **rest)
        else:
            offer = GrowingOffer(self, ticket)
            offer._next(self._offers.stage(ticket, args[1], 0))
        names[offer] = transfer
        return offer

    def revoke(self):
        kept[id(self._engine), names[self]] = self.ticket

    patch.setattr(SourceEngine, "open", open_again)
    patch.setattr(GrowingOffer, "revoke", revoke)


BUGS = (
    PlantedBug("a watermark ahead of the device", watermark_ahead_of_the_device, frozenset({Law.COVERAGE})),
    PlantedBug("a close that is lost", a_close_is_lost, frozenset({Law.LIVENESS})),
    PlantedBug(
        "a preempted prefill keeps its ticket",
        preempted_prefills_keep_their_ticket,
        frozenset({Law.COVERAGE, Law.FENCING}),
        frozenset({Trouble.SLOW_READS}),
    ),
    PlantedBug(
        "declined tickets are left",
        declined_tickets_are_left,
        frozenset({Law.LIVENESS}),
        frozenset({Trouble.ABORTS}),
    ),
    PlantedBug(
        "one rank ends a lease",
        one_rank_ends_a_lease,
        frozenset({Law.QUIESCENCE}),
        frozenset({Trouble.ABORTS, Trouble.SLOW_READS}),
    ),
    PlantedBug(
        "a lease never struck",
        lease_never_struck,
        frozenset({Law.FENCING}),
        frozenset({Trouble.STOPS, Trouble.SLOW_READS, Trouble.CLOCK_RATES}),
    ),
    PlantedBug(
        "the board of the dead",
        board_of_the_dead,
        frozenset({Law.FENCING}),
        frozenset({Trouble.AUTHORITY_DEATHS}),
    ),
    PlantedBug("reuse before quiescence", reuse_before_quiescence, frozenset({Law.QUIESCENCE})),
    PlantedBug("wrong request in a release", wrong_request_in_a_release, frozenset({Law.QUIESCENCE})),
    PlantedBug("shrinking lease", shrinking_lease, frozenset({Law.FENCING})),
    PlantedBug(
        "settle without capability", settle_without_capability, frozenset({Law.QUIESCENCE, Law.FENCING})
    ),
    PlantedBug("effects out of order", effects_out_of_order, frozenset(Law)),
    PlantedBug("a cell from another place", changed_selection(two_rows_swapped), frozenset({Law.COVERAGE})),
    PlantedBug("a cell written twice", changed_selection(one_run_twice), frozenset({Law.TILING})),
    PlantedBug("a run into others' blocks", changed_selection(one_run_elsewhere), frozenset({Law.OWNERSHIP})),
    PlantedBug("another model is served", another_model_is_served, frozenset({Law.REFUSAL})),
    PlantedBug("a run left out", changed_selection(one_run_less), frozenset({Law.COVERAGE, Law.TILING})),
    PlantedBug("stale slack", stale_slack, frozenset({Law.TILING})),
    PlantedBug("a failed read counts", failed_reads_count, frozenset({Law.COVERAGE})),
    PlantedBug("a forged ticket counts", forged_tickets_count, frozenset({Law.FAIL_CLOSED})),
    PlantedBug("a wait without a deadline", waits_without_a_deadline, frozenset({Law.LIVENESS})),
    PlantedBug(
        "a digest that nobody compares", digest_that_nobody_compares, frozenset({Law.COVERAGE, Law.FENCING})
    ),
    PlantedBug("a digest of the wrong cells", digest_of_the_wrong_cells, frozenset({Law.LIVENESS})),
    PlantedBug("a wrong record", wrong_record, frozenset({Law.ACCOUNT})),
)
