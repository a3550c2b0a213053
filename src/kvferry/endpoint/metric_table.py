"""Every metric, once: name, kind, help and labels. What is exposed, documented and drawn comes from here.

Machines count by name (``kvferry.runtime.figures``); here is what a name means, and what one load adds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum

from kvferry.errors import SpecError
from kvferry.runtime.figures import NO_WAY, Figures
from kvferry.runtime.values import Record
from kvferry.wire.messages import Outcome

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
BYTES = tuple(float(4**n) for n in range(6, 19))
RUNS = tuple(float(4**n) for n in range(11))


class MetricKind(StrEnum):
    COUNTER = "counter"
    """It only grows: things that happened."""
    GAUGE = "gauge"
    """How things stand now; summed over the ranks that share a registry."""
    HISTOGRAM = "histogram"
    """One number for each load."""


class MetricSide(StrEnum):
    SOURCE = "source"
    DESTINATION = "destination"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric.

    >>> LOADS.exposed, LOAD_BYTES.exposed, LEASES.labels
    ('kvferry_loads_total', 'kvferry_load_bytes', (('state', '`offered` or `being-read`'),))
    """

    name: str
    kind: MetricKind
    side: MetricSide
    help: str
    """One line, without a full stop."""
    labels: tuple[tuple[str, str], ...] = ()
    """(name, what its values are)."""
    buckets: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if (self.kind is MetricKind.HISTOGRAM) != bool(self.buckets):
            raise SpecError(f"metric {self.name}: a histogram has buckets, and nothing else has")

    @property
    def label_names(self) -> tuple[str, ...]:
        """The names of its labels, in the order of their values."""
        return tuple(name for name, _ in self.labels)

    @property
    def exposed(self) -> str:
        """Its name where Prometheus reads it: a counter gets an ending."""
        return f"{self.name}_total" if self.kind is MetricKind.COUNTER else self.name


_COUNTER, _GAUGE, _HISTOGRAM = MetricKind
_SOURCE, _DESTINATION, _BOTH = MetricSide
_CODE = ("code", "a failure's code")

# -- a source engine --------------------------------------------------------------------------------

OFFERS = Metric("kvferry_offers", _COUNTER, _SOURCE, "Requests that were offered: each has a ticket")
LEASES = Metric(
    "kvferry_leases",
    _GAUGE,
    _SOURCE,
    "Requests whose blocks are pinned",
    (("state", "`offered` or `being-read`"),),
)
PINNED_BYTES = Metric(
    "kvferry_pinned_bytes", _GAUGE, _SOURCE, "Bytes of the blocks that are pinned, over all ranks"
)
LEASES_ENDED = Metric(
    "kvferry_leases_ended",
    _COUNTER,
    _SOURCE,
    "Leases that ended: the blocks are the engine's own again",
    (("reason", "`read`, `declined`, `failed`, `expired` or `withdrawn`"),),
)
GRANTS = Metric(
    "kvferry_grants", _COUNTER, _SOURCE, "Leases granted, each to one rank of a destination engine"
)
GRANTED_BYTES = Metric(
    "kvferry_granted_bytes",
    _COUNTER,
    _SOURCE,
    "Bytes of the blocks of requests that a destination engine began to read",
)
DENIALS = Metric("kvferry_denials", _COUNTER, _SOURCE, "Leases that were asked for and not granted", (_CODE,))
RENEWALS = Metric(
    "kvferry_renewals",
    _COUNTER,
    _SOURCE,
    "Leases that readers asked to renew",
    (("answer", "`kept`, or `ended`: it was over already"),),
)
UNHEARD_RELEASES = Metric(
    "kvferry_unheard_releases",
    _GAUGE,
    _SOURCE,
    "Releases that a rank of the engine has not confirmed yet",
)

# -- a destination ----------------------------------------------------------------------------------

LOADS = Metric(
    "kvferry_loads",
    _COUNTER,
    _DESTINATION,
    "Loads that ended, one per rank and request",
    (
        ("outcome", "`read`, or a failure's code"),
        ("way", "how the bytes came: `direct`, `mapped` …; `none` if nothing was read"),
    ),
)
LOADED_BYTES = Metric("kvferry_loaded_bytes", _COUNTER, _DESTINATION, "Bytes of loads that ended well")
LOADED_RUNS = Metric("kvferry_loaded_runs", _COUNTER, _DESTINATION, "Runs of loads that ended well")
LOAD_BYTES = Metric(
    "kvferry_load_bytes", _HISTOGRAM, _DESTINATION, "Bytes of a load that ended well", buckets=BYTES
)
LOAD_RUNS = Metric(
    "kvferry_load_runs", _HISTOGRAM, _DESTINATION, "Runs of a load that ended well", buckets=RUNS
)
LOAD_SECONDS = Metric(
    "kvferry_load_seconds",
    _HISTOGRAM,
    _DESTINATION,
    "Where the time of a load went",
    (("part", "`meet` (of it `plan`), `post`, `move`, `digest`, `confirm`, `total`"),),
    SECONDS,
)
LOAD_DIGESTS = Metric(
    "kvferry_load_digests",
    _COUNTER,
    _DESTINATION,
    "Loads whose bytes were to be compared with the source's before they count",
    (("digest", "`equal`, `differs`, or `missing`: one side could not say"),),
)
REJECTED_TICKETS = Metric(
    "kvferry_rejected_tickets",
    _COUNTER,
    _DESTINATION,
    "Tickets that were not used: nobody was called for them",
    (("code", "a failure's code; in vLLM also `no-ticket`, `unreadable`, `other-prompt`, `state-too-long`"),),
)
UNCACHED_BLOCKS = Metric(
    "kvferry_uncached_blocks",
    _COUNTER,
    _DESTINATION,
    "Blocks that a load filled only in part, kept out of vLLM's prefix cache",
)
PHASES = Metric(
    "kvferry_loads_under_way",
    _GAUGE,
    _DESTINATION,
    "Loads that have not ended",
    (
        (
            "phase",
            "`leasing`, `meeting`, `holding`, `selecting`, `reading`, `checking`, `confirming`, `failing`",
        ),
    ),
)
QUARANTINED = Metric(
    "kvferry_quarantined",
    _GAUGE,
    _DESTINATION,
    "Loads whose reads do not end: their blocks stay out of use",
)
READS_IN_FLIGHT = Metric(
    "kvferry_reads_in_flight", _GAUGE, _DESTINATION, "Reads that the fabric has not ended"
)
PEERS = Metric(
    "kvferry_peers",
    _GAUGE,
    _DESTINATION,
    "Source engines that a destination rank knows",
    (("state", "`met`, `broken`, `gone`, or a step of meeting: `greeting`, `planning` …"),),
)
RETRIES = Metric(
    "kvferry_retries",
    _COUNTER,
    _DESTINATION,
    "Messages to source engines that were sent again because no answer came",
    (("message", "`hello`, `lease` or `settle`"),),
)

# -- both -------------------------------------------------------------------------------------------

REFUSED_MESSAGES = Metric(
    "kvferry_refused_messages",
    _COUNTER,
    _BOTH,
    "Messages on the control channel that were dropped or refused",
    (
        ("side", "`source` or `destination`"),
        ("why", "`behind`, `unread`, `unsent`, `frames`, `address`, or the kind of the error"),
    ),
)

METRICS = {value.name: value for value in tuple(globals().values()) if isinstance(value, Metric)}
"""All of them, by name."""

Sample = tuple[Metric, tuple[str, ...], float]
"""A metric, the values of its labels, and by how much it changes; of a histogram: what is observed."""

SUFFIX = "_seconds"


def refused_messages(side: MetricSide, *counts: Mapping[str, int]) -> dict[tuple[str, ...], float]:
    """Messages that an endpoint dropped or refused, by why."""
    found: Counter[str] = Counter()
    for some in counts:
        found.update(dict(some))
    return {(REFUSED_MESSAGES.name, side.value, why): number for why, number in found.items()}


class Changes:
    """What has changed in the figures of one endpoint since they were last looked at.

    Gauges are told as changes, too: so they add up over ranks and processes.

    >>> changes = Changes()
    >>> [number for *_, number in changes.since({("kvferry_grants",): 3, ("kvferry_leases", "offered"): 2})]
    [3, 2]
    >>> [(metric.name, number) for metric, _, number in changes.since({("kvferry_grants",): 3})]
    [('kvferry_leases', -2)]
    """

    def __init__(self) -> None:
        self._last: Figures = {}

    def since(self, figures: Figures) -> list[Sample]:
        """The changes from the last call to these figures. A gauge that is missing is 0; a counter stays."""
        last = self._last
        gauges = {key for key in last if METRICS[key[0]].kind is MetricKind.GAUGE}
        moved = {
            key: figures.get(key, 0) - last.get(key, 0) for key in (*figures, *(gauges - figures.keys()))
        }
        counters = {key: number for key, number in last.items() if key not in gauges}
        self._last = counters | dict(figures)
        return [(METRICS[key[0]], key[1:], number) for key, number in moved.items() if number]


def samples_of(record: Record) -> Iterator[Sample]:
    yield LOADS, (record.outcome, record.way or NO_WAY), 1
    for name in PARTS:
        yield LOAD_SECONDS, (name,), getattr(record, f"{name}{SUFFIX}")
    if record.digest:
        yield LOAD_DIGESTS, (record.digest,), 1
    if record.outcome != Outcome.READ.value:
        return
    yield LOADED_BYTES, (), record.num_bytes
    yield LOADED_RUNS, (), record.num_runs
    yield LOAD_BYTES, (), record.num_bytes
    yield LOAD_RUNS, (), record.num_runs


PARTS = tuple(field.name.removesuffix(SUFFIX) for field in fields(Record) if field.name.endswith(SUFFIX))
"""Of a load's time."""
