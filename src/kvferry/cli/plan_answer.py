"""The answer of ``kvferry plan``, before anybody reads it."""

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
"""The layout in which a rank's heads are long runs, whatever the other side's ranks hold."""
LARGER_BLOCKS = (64, 128)
"""Block sizes that engines offer, where small blocks are what makes runs short."""
MAX_TRIALS = 24
GOOD_SPEEDUP = 2.0
"""What helps less is not worth changing a deployment for."""
GREAT_SPEEDUP = 10.0
"""What helps so much is not kept waiting for something better with more settings."""


@dataclass(frozen=True, slots=True)
class Setting:
    side: str
    """``src`` or ``dst``."""
    key: str
    """As in a topology."""
    value: str

    @property
    def words(self) -> str:
        """The setting, and what vLLM calls it.

        >>> Setting("dst", "layout", "HND").words
        'layout=HND (vLLM: VLLM_KV_CACHE_LAYOUT=HND)'
        """
        vllm = vllm_setting(self.key, self.value)
        return f"{self.key}={self.value}" + (f" (vLLM: {vllm})" if vllm else "")


@dataclass(frozen=True)
class Cure:
    """Settings with which the pair was planned again, and what came out."""

    settings: tuple[Setting, ...]
    src: Side
    dst: Side
    billed: Billed


def find_cure(asked: Asked, src: Side, dst: Side, slow: LinkBill) -> Cure | None:
    """The fastest settings over that link, fewer tried first until it is quick; None if none are worth it."""
    # One rank of the destination tells as much as all: the one that takes longest, or any that reads from it.
    rank = int(slow.whose.split()[1]) if slow.whose.startswith("dst") else asked.dst_rank
    trial_of = replace(asked, dst_rank=rank)
    best, seconds = tuple[Setting, ...](), slow.seconds / GOOD_SPEEDUP
    quick = max(slow.seconds / GREAT_SPEEDUP, 2 * slow.long_run_seconds)
    for settings in _candidates(src, dst, keys=("layout", "block", "conv")):
        if best and len(settings) > len(best) and seconds <= quick:
            break
        tried = _tried(trial_of, src, dst, settings)
        # Of equals the one that was tried first, which is the more obvious one.
        if tried and (took := tried.billed.bill.over(slow.profile).seconds) < seconds:
            best, seconds = settings, took
    return _tried(asked, src, dst, best) if best else None


def find_way(asked: Asked, src: Side, dst: Side) -> Cure | None:
    """The fewest settings with which a refused pair is proved; None if none that are known do."""
    candidates = _candidates(src, dst, keys=("dtype", "layout", "block", "conv"))
    return next(filter(None, (_tried(asked, src, dst, settings) for settings in candidates)), None)


def _tried(asked: Asked, src: Side, dst: Side, settings: tuple[Setting, ...]) -> Cure | None:
    """The pair with these settings; None where an engine cannot have them, or where it is refused."""
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
    """What could be changed, fewest settings first, the most obvious combinations only.

    One side becomes like the other, or both change alike.
    """
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
    """The settings of a side that could be changed, with what stands for those that were left open."""
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
    """What is the matter, in short."""
    reason: str
    remedy: str
    """What to do, as a sentence."""
    command: str = ""
    """The command that shows that it helps."""
    link: str = ""
    seconds: float = 0.0
    long_run_seconds: float = 0.0
    cured_seconds: float = 0.0
    """With the remedy, over the same link; 0 if there is none."""


def warnings_of(
    asked: Asked, src: Side, dst: Side, billed: Billed, links: Sequence[LinkBill]
) -> Iterator[Warned]:
    """Everything that a person should know of a pair whose bytes can be moved."""
    yield from not_served(src, dst)
    if slow := [bill for bill in links if bill.is_slow]:
        yield _short_runs(asked, src, dst, billed, slow[0])  # one link stands for all


def not_served(src: Side, dst: Side) -> Iterator[Warned]:
    """Sides that an engine would refuse to be."""
    for side in (src, dst):
        if side.file is None:
            reasons = list(why_not_served(side.chosen_model, Topology.parse(side.topology)))
            if reasons:
                message = f"vLLM would not start as --{side.engine} says"
                yield Warned("not-served", message, "; ".join(reasons), "choose another tp or pp")


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
    """Of manifests nothing can be changed here, but an equal pair can be billed."""
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
"""So many differences between two models whose caches fit are named."""


@dataclass(frozen=True)
class PlanAnswer:
    """Whether two engines can talk, what a request costs, and what to do about it."""

    asked: Asked
    billed: Billed
    links: tuple[LinkBill, ...]
    """The request over each kind of link; nothing, where it is refused or moves nothing."""
    warnings: tuple[Warned, ...]
    way: Cure | None
    """Settings with which a refused pair is proved."""
    model_differences: tuple[Finding, ...] = ()
    """Why running engines would refuse each other, whatever their bytes."""
    assumed: str = ""
    """What nobody has said of these engines, and was taken to be so."""
    ignored: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Flags of the commands that were given, by side, which say nothing of the cache and were not read."""
    set_by_one: tuple[str, ...] = ()
    """Keys that only one of the two config.json files has, so that they were not compared."""

    @property
    def bill(self) -> Bill:
        return self.billed.bill

    @property
    def findings(self) -> dict[Finding, list[int]]:
        """Each reason for a refusal, with the destination ranks that it concerns; nothing if it is proved."""
        ranks = list(self.billed.ranks)
        return {**self.bill.findings, **dict.fromkeys(self.model_differences[:MAX_MODEL_DIFFERENCES], ranks)}

    @property
    def num_more_findings(self) -> int:
        return self.bill.num_more + len(self.model_differences[MAX_MODEL_DIFFERENCES:])

    @property
    def bytes_fit(self) -> bool:
        """Whether the bytes could be moved; two models' bytes may fit, and mean something else."""
        return not self.bill.findings

    @property
    def identity(self) -> IdentityCheck:
        return compare_identity(self.billed.source.identity, self.billed.destination.identity)

    @property
    def model_sentence(self) -> str:
        """Whether it is the same model, as far as the two sides tell."""
        if self.model_differences:
            return "not the same: running engines reject each other" + (
                ", although the bytes fit" if self.bytes_fit else ""
            )
        if self.set_by_one:
            names = ", ".join(self.set_by_one[:MAX_MODEL_DIFFERENCES])
            more = len(self.set_by_one[MAX_MODEL_DIFFERENCES:])
            return (
                f"the same as far as both config.json files say; only one has {names}"
                f"{f' and {more} more' if more else ''}: engines reject each other unless it is the default"
            )
        check, sides = self.identity, (self.billed.source, self.billed.destination)
        if check.num_equal and not check.differing and all(is_offline(side.identity) for side in sides):
            return "the same architecture; engines compare weights and settings at first contact"
        return check.sentence

    @property
    def assumed_link(self) -> str:
        """The link that was assumed because none was named; empty if one was, or if nothing moves."""
        if self.asked.links or not self.links:
            return ""
        profile = self.links[0].profile
        origin = "not measured with kvferry" if profile.origin is Origin.PREDICTED else "measured"
        return f"{profile.name} is assumed ({origin}); set --link to yours. All times are estimates"

    @property
    def way_command(self) -> str:
        """The command that shows that a refused pair can be mended; empty if nobody knows how."""
        return self.asked.command(self.way.src, self.way.dst) if self.way else ""


def answer(asked: Asked, src: Side, dst: Side, profiles: Sequence[LinkProfile]) -> PlanAnswer:
    """Bill the request, and look for what to warn of, or for a way out of a refusal."""
    billed = asked.billed(src, dst)
    differences = model_differences(src, dst, billed.source, billed.destination)
    ignored = {side.engine: side.command.ignored if side.command else () for side in (src, dst)}
    if billed.bill.findings:
        way, served = find_way(asked, src, dst), tuple(not_served(src, dst))
        if way and differences:  # engines would refuse each other all the same: no way, and one more reason
            return PlanAnswer(asked, billed, (), served, None, differences, ignored=ignored)
        return PlanAnswer(asked, billed, (), served, way, ignored=ignored)
    links = tuple(billed.bill.over(profile) for profile in profiles)
    warned = tuple(warnings_of(asked, src, dst, billed, links))
    _, set_by_one = compared_configs(src, dst)
    return PlanAnswer(
        asked, billed, links, warned, None, differences, _assumed(src, dst), ignored, set_by_one
    )


def _assumed(src: Side, dst: Side) -> str:
    """Of which sides the layout is an assumption, and where it holds."""
    sides = [side.engine for side in (src, dst) if side.assumed_layout]
    if not sides:
        return ""
    layout = Topology().layout
    return (
        f"{layout} is assumed for {' and '.join(sides)}, as kvferry requests it from vLLM on a GPU; set"
        " layout=… for a CPU or another attention backend"
    )
