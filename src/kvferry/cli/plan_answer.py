"""The answer of ``kvferry plan``, before anybody reads it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from kvferry.cli.asked import Asked, Billed, model_differences
from kvferry.cli.bill import Bill, LinkBill
from kvferry.cli.engines import Side
from kvferry.cli.link_profile import RDMA_400, LinkProfile
from kvferry.cli.output import milliseconds, num_bytes, times
from kvferry.cli.serve_command import vllm_setting
from kvferry.core.identity import IdentityCheck, compare_identity
from kvferry.errors import Finding, KVFerryError, SpecError
from kvferry.models import Topology
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
    best: tuple[float, tuple[Setting, ...]] = (slow.seconds / GOOD_SPEEDUP, ())
    for settings in _by_number(_candidates(src, dst, keys=("layout", "block", "conv"))):
        for each in settings:
            tried = _tried(trial_of, src, dst, each)
            if tried is None or tried.billed.bill.findings:
                continue
            # Of equals the one that was tried first, which is the more obvious one.
            best = min(best, (_seconds(tried, slow.profile), each), key=lambda found: found[0])
        if best[1] and (best[0] <= slow.seconds / GREAT_SPEEDUP or best[0] <= 2 * slow.long_run_seconds):
            break
    return _tried(asked, src, dst, best[1]) if best[1] else None


def find_way(asked: Asked, src: Side, dst: Side) -> Cure | None:
    """The fewest settings with which a refused pair is proved; None if none that are known do."""
    for settings in _by_number(_candidates(src, dst, keys=("dtype", "layout", "block", "conv"))):
        for each in settings:
            tried = _tried(asked, src, dst, each)
            if tried is not None and not tried.billed.bill.findings:
                return tried
    return None


def _seconds(tried: Cure, profile: LinkProfile) -> float:
    return tried.billed.bill.over(profile).seconds


def _tried(asked: Asked, src: Side, dst: Side, settings: Sequence[Setting]) -> Cure | None:
    """The pair with these settings; None where an engine cannot have them."""
    for setting in settings:
        if setting.side == src.engine:
            src = src.with_setting(setting.key, setting.value)
        else:
            dst = dst.with_setting(setting.key, setting.value)
    try:
        return Cure(tuple(settings), src, dst, asked.billed(src, dst))
    except SpecError:
        return None


def _by_number(candidates: Iterable[tuple[Setting, ...]]) -> Iterator[list[tuple[Setting, ...]]]:
    """Candidates in the order of how many settings they change, the most obvious ones only."""
    found = sorted(candidates, key=len)[:MAX_TRIALS]
    for number in sorted({len(each) for each in found}):
        yield [each for each in found if len(each) == number]


def _candidates(src: Side, dst: Side, keys: Sequence[str]) -> Iterator[tuple[Setting, ...]]:
    """Every combination of what could be changed: one side becomes like the other, or both change alike."""
    if src.file is not None or dst.file is not None:
        return
    try:
        ours, theirs = (_settings(side) for side in (src, dst))
    except KVFerryError:
        return
    has_states = any(cache.is_recurrent for layer in src.chosen_model.layers for cache in layer.caches)
    choices = [list(_choices(key, ours[key], theirs[key])) for key in keys if key != "conv" or has_states]
    for combination in product(*choices):
        if settings := tuple(setting for part in combination for setting in part):
            yield settings


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
        "block": str(topology.block or model.default_block),
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
        # One link stands for all: a network, if it is among them.
        worst = next((bill for bill in slow if bill.profile is RDMA_400), slow[0])
        yield _short_runs(asked, src, dst, billed, worst)


def not_served(src: Side, dst: Side) -> Iterator[Warned]:
    """Sides that an engine would refuse to be."""
    for side in (src, dst):
        if side.file is None:
            reasons = list(why_not_served(side.chosen_model, Topology.parse(side.topology)))
            if reasons:
                message = f"vLLM would not start as --{side.engine} says"
                yield Warned("not-served", message, "; ".join(reasons), "choose a tp by which they divide")


def _short_runs(asked: Asked, src: Side, dst: Side, billed: Billed, slow: LinkBill) -> Warned:
    bill, link = billed.bill, slow.profile.name
    average = num_bytes(bill.total_bytes / bill.num_runs)
    message = f"{milliseconds(1e3 * slow.seconds)} over {link}, because its runs are short"
    reason = (
        f"{bill.num_runs:,} runs of {average}; the same bytes in long runs would take"
        f" {milliseconds(1e3 * slow.long_run_seconds)}, {times(slow.slowdown)} as fast"
    )
    if not asked.links:
        reason += f". It is judged by {link}; --link names yours"
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
        return "none: no layout and no block size that was tried makes it twice as fast"
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
        f"two engines that are set up like the {best} take {milliseconds(1e3 * took[best])} over"
        f" {slow.profile.name}; `kvferry diff` says in what these two differ"
    )


MAX_MODEL_DIFFERENCES = 4
"""So many differences between two models whose caches fit are named."""


@dataclass(frozen=True, slots=True)
class IgnoredFlags:
    """Flags of the commands that were given, which say nothing of the cache and were not read."""

    src: tuple[str, ...] = ()
    dst: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """All of them, each once; empty if there are none.

        >>> IgnoredFlags(("--port", "--seed"), ("--port",)).words
        '--port, --seed'
        """
        return ", ".join(dict.fromkeys((*self.src, *self.dst)))


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
    ignored: IgnoredFlags = IgnoredFlags()

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
            return "not the same: running engines would refuse each other" + (
                ", although the bytes would fit" if self.bytes_fit else ""
            )
        check, sides = self.identity, (self.billed.source, self.billed.destination)
        if check.num_equal and not check.differing and all(is_offline(side.identity) for side in sides):
            return "the same architecture; engines compare weights and settings when they meet"
        return check.sentence

    @property
    def way_command(self) -> str:
        """The command that shows that a refused pair can be mended; empty if nobody knows how."""
        return self.asked.command(self.way.src, self.way.dst) if self.way else ""


def answer(asked: Asked, src: Side, dst: Side, profiles: Sequence[LinkProfile]) -> PlanAnswer:
    """Bill the request, and look for what to warn of, or for a way out of a refusal."""
    billed = asked.billed(src, dst)
    differences = model_differences(src, dst, billed.source, billed.destination)
    ignored = IgnoredFlags(src.ignored_flags, dst.ignored_flags)
    if billed.bill.findings:
        way, served = find_way(asked, src, dst), tuple(not_served(src, dst))
        if way and differences:  # engines would refuse each other all the same: no way, and one more reason
            return PlanAnswer(asked, billed, (), served, None, differences, ignored=ignored)
        return PlanAnswer(asked, billed, (), served, way, ignored=ignored)
    links = tuple(billed.bill.over(profile) for profile in profiles)
    warned = tuple(warnings_of(asked, src, dst, billed, links))
    return PlanAnswer(asked, billed, links, warned, None, differences, _assumed(src, dst), ignored)


def _assumed(src: Side, dst: Side) -> str:
    """Of which sides the layout is an assumption, and where it holds."""
    sides = [side.engine for side in (src, dst) if side.assumed_layout]
    if not sides:
        return ""
    layout = Topology().layout
    return (
        f"{layout} is assumed for {' and '.join(sides)}: what kvferry asks vLLM for on a GPU; on a CPU, and"
        " with some attention backends, it is another (layout=…)"
    )
