"""Every metric: name, kind, help and labels, for Prometheus, the documentation and the dashboard.

State machines count by name (``kvferry.runtime.figures``); ``samples_of`` counts a load.
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
    GAUGE = "gauge"
    """Summed over the ranks that share a registry."""
    HISTOGRAM = "histogram"
    """One observation per load."""


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
    """(name, description of its values)."""
    buckets: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if (self.kind is MetricKind.HISTOGRAM) != bool(self.buckets):
            raise SpecError(f"metric {self.name}: a histogram has buckets, and nothing else has")

    @property
    def label_names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.labels)

    @property
    def exposed(self) -> str:
        """Its name in Prometheus."""
        return f"{self.name}_total" if self.kind is MetricKind.COUNTER else self.name


_COUNTER, _GAUGE, _HISTOGRAM = MetricKind
_SOURCE, _DESTINATION, _BOTH = MetricSide
_CODE = ("code", "a failure's code")

# -- a source engine --------------------------------------------------------------------------------

OFFERS = Metric("kvferry_offers", _COUNTER, _SOURCE, "Requests offered, one ticket each")
SOFT_OFFERS = Metric(
    "kvferry_soft_offers",
    _COUNTER,
    _SOURCE,
    "Finished requests offered to readers without pinning blocks",
)
CLAIMS = Metric(
    "kvferry_claims",
    _COUNTER,
    _SOURCE,
    "Claims of soft offers by other engines",
    (
        (
            "outcome",
            "`granted`; `missed`: evicted; `late`: no step within 1 s; `unknown`: made before a restart",
        ),
    ),
)
LEASES = Metric(
    "kvferry_leases",
    _GAUGE,
    _SOURCE,
    "Requests whose blocks are pinned",
    (("state", "`offered` or `being-read`"),),
)
PINNED_BYTES = Metric("kvferry_pinned_bytes", _GAUGE, _SOURCE, "Bytes of pinned blocks, over all ranks")
LEASES_ENDED = Metric(
    "kvferry_leases_ended",
    _COUNTER,
    _SOURCE,
    "Leases that ended and released their blocks",
    (("reason", "`read`, `declined`, `failed`, `expired` or `withdrawn`"),),
)
GRANTS = Metric("kvferry_grants", _COUNTER, _SOURCE, "Leases granted, one per destination rank")
GRANTED_BYTES = Metric(
    "kvferry_granted_bytes",
    _COUNTER,
    _SOURCE,
    "Bytes of requests that a destination engine started to read",
)
DENIALS = Metric("kvferry_denials", _COUNTER, _SOURCE, "Lease requests denied", (_CODE,))
RENEWALS = Metric(
    "kvferry_renewals",
    _COUNTER,
    _SOURCE,
    "Lease renewals requested by readers",
    (("answer", "`kept`, or `ended` if the lease was already over"),),
)
UNHEARD_RELEASES = Metric(
    "kvferry_unheard_releases",
    _GAUGE,
    _SOURCE,
    "Releases not yet acknowledged by a rank of the engine",
)

# -- a destination ----------------------------------------------------------------------------------

LOADS = Metric(
    "kvferry_loads",
    _COUNTER,
    _DESTINATION,
    "Finished loads, one per rank and request",
    (
        ("outcome", "`read`, or a failure's code"),
        ("way", "transfer mode: `mapped`, `direct`, `packed` …; `none` if nothing was read"),
    ),
)
LOADED_BYTES = Metric("kvferry_loaded_bytes", _COUNTER, _DESTINATION, "Bytes of successful loads")
LOADED_EARLY_BYTES = Metric(
    "kvferry_loaded_early_bytes",
    _COUNTER,
    _DESTINATION,
    "Bytes of successful loads that were read while the source was still computing the prompt",
)
LOADED_RUNS = Metric("kvferry_loaded_runs", _COUNTER, _DESTINATION, "Runs of successful loads")
LOAD_BYTES = Metric(
    "kvferry_load_bytes", _HISTOGRAM, _DESTINATION, "Bytes of a successful load", buckets=BYTES
)
LOAD_RUNS = Metric("kvferry_load_runs", _HISTOGRAM, _DESTINATION, "Runs of a successful load", buckets=RUNS)
LOAD_SECONDS = Metric(
    "kvferry_load_seconds",
    _HISTOGRAM,
    _DESTINATION,
    "Duration of a load, by part",
    (("part", "`meet` (includes `plan`), `post`, `move`, `digest`, `confirm`, `total`"),),
    SECONDS,
)
LOAD_DIGESTS = Metric(
    "kvferry_load_digests",
    _COUNTER,
    _DESTINATION,
    "Loads selected for a digest comparison with the source",
    (("digest", "`equal`, `differs`, or `missing` if one side could not compute it"),),
)
REJECTED_TICKETS = Metric(
    "kvferry_rejected_tickets",
    _COUNTER,
    _DESTINATION,
    "Tickets rejected before any source engine was contacted",
    (("code", "a failure's code; in vLLM also `no-ticket`, `unreadable`, `other-prompt`, `state-too-long`"),),
)
READ_BACKS = Metric(
    "kvferry_read_backs",
    _COUNTER,
    _DESTINATION,
    "Prompts that came with a soft offer of an earlier turn",
    (
        (
            "outcome",
            "`claimed`, `cached` (in the prefix cache), `diverged` (other tokens), `denied`, `unused`",
        ),
    ),
)
READ_BACK_TOKENS = Metric(
    "kvferry_read_back_tokens",
    _COUNTER,
    _DESTINATION,
    "Prompt tokens read from the engine that decoded the previous turn",
)
UNCACHED_BLOCKS = Metric(
    "kvferry_uncached_blocks",
    _COUNTER,
    _DESTINATION,
    "Partly filled blocks of loads, excluded from vLLM's prefix cache",
)
PHASES = Metric(
    "kvferry_loads_under_way",
    _GAUGE,
    _DESTINATION,
    "Loads in progress",
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
    "Loads whose reads neither end nor fail; their blocks stay reserved",
)
READS_IN_FLIGHT = Metric("kvferry_reads_in_flight", _GAUGE, _DESTINATION, "Reads in flight on the fabric")
PEERS = Metric(
    "kvferry_peers",
    _GAUGE,
    _DESTINATION,
    "Source engines known to a destination rank",
    (("state", "`met`, `broken`, `gone`, or a step of the first contact: `greeting`, `planning` …"),),
)
RETRIES = Metric(
    "kvferry_retries",
    _COUNTER,
    _DESTINATION,
    "Messages to source engines sent again after a timeout",
    (("message", "`hello`, `lease` or `settle`"),),
)

# -- both -------------------------------------------------------------------------------------------

REFUSED_MESSAGES = Metric(
    "kvferry_refused_messages",
    _COUNTER,
    _BOTH,
    "Messages on the control channel that were dropped or rejected",
    (
        ("side", "`source` or `destination`"),
        ("why", "`behind`, `unread`, `unsent`, `frames`, `address`, or the kind of the error"),
    ),
)

METRICS = {value.name: value for value in tuple(globals().values()) if isinstance(value, Metric)}

Sample = tuple[Metric, tuple[str, ...], float]
"""A metric, its label values, and its change; for a histogram, the observed value."""

SUFFIX = "_seconds"


def refused_messages(side: MetricSide, *counts: Mapping[str, int]) -> dict[tuple[str, ...], float]:
    """Messages that an endpoint dropped or refused, by reason."""
    found: Counter[str] = Counter()
    for some in counts:
        found.update(dict(some))
    return {(REFUSED_MESSAGES.name, side.value, why): number for why, number in found.items()}


class Changes:
    """Changes of the figures of one endpoint. Gauges are changes, too, so that they add up over ranks.

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
    if record.early_bytes:
        yield LOADED_EARLY_BYTES, (), record.early_bytes
    yield LOADED_RUNS, (), record.num_runs
    yield LOAD_BYTES, (), record.num_bytes
    yield LOAD_RUNS, (), record.num_runs


PARTS = tuple(field.name.removesuffix(SUFFIX) for field in fields(Record) if field.name.endswith(SUFFIX))
"""The parts of a load's duration."""
