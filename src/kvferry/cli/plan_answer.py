"""The answer of ``kvferry plan`` as values, without its display."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from kvferry.cli.asked import Asked, Billed, compared_configs, model_differences
from kvferry.cli.bill import Bill, LinkBill
from kvferry.cli.engines import Side
from kvferry.cli.link_profile import LinkProfile, Origin
from kvferry.cli.output import milliseconds, num_bytes, times
from kvferry.cli.serve_command import vllm_setting
from kvferry.core.identity import IdentityCheck, compare_identity
from kvferry.errors import Finding, KVFerryError, SpecError
from kvferry.models import Topology
from kvferry.models.describe import served_block
from kvferry.models.model import is_offline
from kvferry.models.topology import why_not_served

HEAD_MAJOR = "HND"
"""The layout with long runs per head for any split of heads over ranks."""
LARGER_BLOCKS = (64, 128)
"""Larger block sizes to try: small blocks make runs short."""
MAX_TRIALS = 24
GOOD_SPEEDUP = 2.0
"""Minimum gain for which a remedy is shown."""
GREAT_SPEEDUP = 10.0
"""Gain that ends the search for remedies with more settings."""


@dataclass(frozen=True, slots=True)
class Setting:
    side: str
    """``src`` or ``dst``."""
    key: str
    """As in a topology."""
    value: str

    @property
    def words(self) -> str:
        """The setting, and vLLM's name for it.

        >>> Setting("dst", "layout", "HND").words
        'layout=HND (vLLM: VLLM_KV_CACHE_LAYOUT=HND)'
        """
        vllm = vllm_setting(self.key, self.value)
        return f"{self.key}={self.value}" + (f" (vLLM: {vllm})" if vllm else "")


@dataclass(frozen=True)
class Cure:
    """Changed settings, and the pair planned with them."""

    settings: tuple[Setting, ...]
    src: Side
    dst: Side
    billed: Billed


def find_cure(asked: Asked, src: Side, dst: Side, slow: LinkBill) -> Cure | None:
    """The fastest settings over that link; None if the gain is too small. Stops early once it is fast."""
    # One destination rank suffices: the slowest, or, if a source rank is the slowest, the requested one.
    rank = int(slow.whose.split()[1]) if slow.whose.startswith("dst") else asked.dst_rank
    trial_of = replace(asked, dst_rank=rank)
    best, seconds = tuple[Setting, ...](), slow.seconds / GOOD_SPEEDUP
    quick = max(slow.seconds / GREAT_SPEEDUP, 2 * slow.long_run_seconds)
    for settings in _candidates(src, dst, keys=("layout", "block", "conv")):
        if best and len(settings) > len(best) and seconds <= quick:
            break
        tried = _tried(trial_of, src, dst, settings)
        # Among equals, the first: candidates are in order of preference.
        if tried and (took := tried.billed.bill.over(slow.profile).seconds) < seconds:
            best, seconds = settings, took
    return _tried(asked, src, dst, best) if best else None


def find_way(asked: Asked, src: Side, dst: Side) -> Cure | None:
    """The fewest settings with which a refused pair is proved; None if no candidate works."""
    candidates = _candidates(src, dst, keys=("dtype", "layout", "block", "conv"))
    return next(filter(None, (_tried(asked, src, dst, settings) for settings in candidates)), None)


def _tried(asked: Asked, src: Side, dst: Side, settings: tuple[Setting, ...]) -> Cure | None:
    """The pair with these settings; None if they are invalid for an engine, or the pair is refused."""
    for setting in settings:
        if setting.side == src.engine:
            src = src.with_setting(setting.key, setting.value)
        else:
            dst = dst.with_setting(setting.key, setting.value)
    try:
        billed = asked.billed(src, dst)
    except SpecError:
        return None
    return None if billed.bill.findings else Cure(settings, src, dst, billed)


def _candidates(src: Side, dst: Side, keys: Sequence[str]) -> list[tuple[Setting, ...]]:
    """Settings to try, fewest first: one side adopts the other's value, or both change to the same."""
    if src.file is not None or dst.file is not None:
        return []
    try:
        ours, theirs = (_settings(side) for side in (src, dst))
    except KVFerryError:
        return []
    has_states = any(cache.is_recurrent for layer in src.chosen_model.layers for cache in layer.caches)
    choices = [list(_choices(key, ours[key], theirs[key])) for key in keys if key != "conv" or has_states]
    found = (tuple(setting for part in combination for setting in part) for combination in product(*choices))
    return sorted(filter(None, found), key=len)[:MAX_TRIALS]


def _choices(key: str, src: str, dst: str) -> Iterator[tuple[Setting, ...]]:
    yield ()
    if src != dst:
        yield (Setting("dst", key, src),)
        yield (Setting("src", key, dst),)
    if key == "layout" and HEAD_MAJOR not in (src, dst):
        yield tuple(Setting(side, key, HEAD_MAJOR) for side in ("src", "dst"))
    if key == "block":
        for size in LARGER_BLOCKS:
            if size > max(int(src), int(dst)):
                yield tuple(Setting(side, key, str(size)) for side in ("src", "dst"))


def _settings(side: Side) -> dict[str, str]:
    """A side's changeable settings, including defaults."""
    model, topology = side.chosen_model, Topology.parse(side.topology)
    return {
        "layout": topology.layout,
        "block": str(topology.block or served_block(model, topology)),
        "conv": topology.conv,
        "dtype": topology.dtype or side.own_dtype,
    }


@dataclass(frozen=True, slots=True)
class Warned:
    code: str
    """``short-runs`` or ``not-served``."""
    message: str
    reason: str
    remedy: str
    command: str = ""
    """The command that plans the remedy."""
    link: str = ""
    seconds: float = 0.0
    long_run_seconds: float = 0.0
    cured_seconds: float = 0.0
    """With the remedy, over the same link; 0 if there is none."""


def warnings_of(
    asked: Asked, src: Side, dst: Side, billed: Billed, links: Sequence[LinkBill]
) -> Iterator[Warned]:
    yield from not_served(src, dst)
    if slow := [bill for bill in links if bill.is_slow]:
        yield _short_runs(asked, src, dst, billed, slow[0])  # one link stands for all


def not_served(src: Side, dst: Side) -> Iterator[Warned]:
    for side in (src, dst):
        if side.file is None:
            reasons = list(why_not_served(side.chosen_model, Topology.parse(side.topology)))
            if reasons:
                message = f"vLLM would not start with this --{side.engine}"
                yield Warned("not-served", message, "; ".join(reasons), "choose another tp, pp or model")


def _short_runs(asked: Asked, src: Side, dst: Side, billed: Billed, slow: LinkBill) -> Warned:
    bill, link = billed.bill, slow.profile.name
    average = num_bytes(bill.total_bytes / bill.num_runs)
    message = f"{milliseconds(1e3 * slow.seconds)} over {link}, an estimate: its runs are short"
    reason = (
        f"{bill.num_runs:,} runs of {average}; the same bytes in long runs would take"
        f" {milliseconds(1e3 * slow.long_run_seconds)}, {times(slow.slowdown)} as fast"
    )
    cure = find_cure(asked, src, dst, slow)
    if cure is None:
        remedy = _without_a_cure(asked, src, dst, billed, slow)
        return Warned("short-runs", message, reason, remedy, "", *_of(slow))
    seconds = cure.billed.bill.over(slow.profile).seconds
    gain = f"{milliseconds(1e3 * seconds)} over {link}, {times(slow.seconds / seconds)} as fast"
    remedy = f"{_sentence(cure)}: {gain}"
    command = asked.command(cure.src, cure.dst)
    return Warned("short-runs", message, reason, remedy, command, *_of(slow), seconds)


def _of(slow: LinkBill) -> tuple[str, float, float]:
    return slow.profile.name, slow.seconds, slow.long_run_seconds


def _sentence(cure: Cure) -> str:
    sides = {"src": "the source", "dst": "the destination"}
    by_setting: dict[tuple[str, str], list[str]] = {}
    for each in cure.settings:
        by_setting.setdefault((each.key, each.value), []).append(sides[each.side])
    parts = []
    for each in cure.settings:
        who = by_setting.pop((each.key, each.value), None)
        if who:
            parts.append(f"{' and '.join(who)} {each.words}")
    return f"give {', and '.join(parts)}"


def _without_a_cure(asked: Asked, src: Side, dst: Side, billed: Billed, slow: LinkBill) -> str:
    """The remedy if no settings help. Manifests have no settings to change, but equal pairs can be billed."""
    if src.file is None and dst.file is None:
        return "none: no tested layout or block size makes it twice as fast"
    equal = {
        "destination": asked.billed_between(billed.destination, billed.destination),
        "source": asked.billed_between(billed.source, billed.source),
    }
    took = {
        name: each.bill.over(slow.profile).seconds for name, each in equal.items() if not each.bill.findings
    }
    if not took or min(took.values()) > slow.seconds / 2:
        return "none: two equal engines would not be twice as fast"
    best = min(took, key=took.__getitem__)
    return (
        f"two engines with the topology of the {best} take {milliseconds(1e3 * took[best])} over"
        f" {slow.profile.name}; `kvferry diff` shows how these two differ"
    )


MAX_MODEL_DIFFERENCES = 4


@dataclass(frozen=True)
class PlanAnswer:
    """Compatibility of two engines, the cost of a request, and remedies."""

    asked: Asked
    billed: Billed
    links: tuple[LinkBill, ...]
    """The request over each kind of link; empty if the pair is refused."""
    warnings: tuple[Warned, ...]
    way: Cure | None
    """Settings with which a refused pair is proved."""
    model_differences: tuple[Finding, ...] = ()
    """Why running engines would reject each other, even if the bytes fit."""
    assumed: str = ""
    """Assumptions about settings that were not given."""
    ignored: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Ignored flags of the commands, by side: they do not affect the cache."""
    set_by_one: tuple[str, ...] = ()
    """Keys in only one of the two config.json files; they were not compared."""

    @property
    def bill(self) -> Bill:
        return self.billed.bill

    @property
    def findings(self) -> dict[Finding, list[int]]:
        """Each reason for a refusal, with the destination ranks that it affects; empty if proved."""
        ranks = list(self.billed.ranks)
        return {**self.bill.findings, **dict.fromkeys(self.model_differences[:MAX_MODEL_DIFFERENCES], ranks)}

    @property
    def num_more_findings(self) -> int:
        return self.bill.num_more + len(self.model_differences[MAX_MODEL_DIFFERENCES:])

    @property
    def bytes_fit(self) -> bool:
        """Whether the bytes could be transferred, even if the models differ."""
        return not self.bill.findings

    @property
    def identity(self) -> IdentityCheck:
        return compare_identity(self.billed.source.identity, self.billed.destination.identity)

    @property
    def model_sentence(self) -> str:
        """Whether both sides have the same model, as far as is known."""
        if self.model_differences:
            return "not the same: running engines reject each other" + (
                ", although the bytes fit" if self.bytes_fit else ""
            )
        if self.set_by_one:
            names = ", ".join(self.set_by_one[:MAX_MODEL_DIFFERENCES])
            more = len(self.set_by_one[MAX_MODEL_DIFFERENCES:])
            return (
                f"the same in the keys that both config.json files have; only one has {names}"
                f"{f' and {more} more' if more else ''}: engines reject each other unless it is the default"
            )
        check, sides = self.identity, (self.billed.source, self.billed.destination)
        if check.num_equal and not check.differing and all(is_offline(side.identity) for side in sides):
            return "the same architecture; engines compare weights and settings at first contact"
        return check.sentence

    @property
    def assumed_link(self) -> str:
        """A note on the assumed link; empty if one was named, or the pair is refused."""
        if self.asked.links or not self.links:
            return ""
        profile = self.links[0].profile
        origin = "not measured with kvferry" if profile.origin is Origin.PREDICTED else "measured"
        return f"{profile.name} is assumed ({origin}); set --link to yours. All times are estimates"

    @property
    def way_command(self) -> str:
        """The command that plans a refused pair with working settings; empty if none are known."""
        return self.asked.command(self.way.src, self.way.dst) if self.way else ""


def answer(asked: Asked, src: Side, dst: Side, profiles: Sequence[LinkProfile]) -> PlanAnswer:
    """Bill the request, and collect warnings, or search for settings that make a refused pair work."""
    billed = asked.billed(src, dst)
    differences = model_differences(src, dst, billed.source, billed.destination)
    ignored = {side.engine: side.command.ignored if side.command else () for side in (src, dst)}
    if billed.bill.findings:
        way, served = find_way(asked, src, dst), tuple(not_served(src, dst))
        if way and differences:  # engines would still reject each other
            return PlanAnswer(asked, billed, (), served, None, differences, ignored=ignored)
        return PlanAnswer(asked, billed, (), served, way, ignored=ignored)
    links = tuple(billed.bill.over(profile) for profile in profiles)
    warned = tuple(warnings_of(asked, src, dst, billed, links))
    _, set_by_one = compared_configs(src, dst)
    return PlanAnswer(
        asked, billed, links, warned, None, differences, _assumed(src, dst), ignored, set_by_one
    )


def _assumed(src: Side, dst: Side) -> str:
    sides = [side.engine for side in (src, dst) if side.assumed_layout]
    if not sides:
        return ""
    layout = Topology().layout
    return (
        f"{layout} is assumed for {' and '.join(sides)}, as kvferry requests it from vLLM on a GPU; set"
        " layout=… for a CPU or another attention backend"
    )
