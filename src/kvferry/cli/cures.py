"""What would make a slow pair quick, or a refused one possible: settings, each tried by planning."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from kvferry.cli.asked import Asked, Billed
from kvferry.cli.bill import LinkBill
from kvferry.cli.engines import Side
from kvferry.cli.link_profile import LinkProfile
from kvferry.cli.serve_command import vllm_setting
from kvferry.errors import KVFerryError, SpecError
from kvferry.models import Topology

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
    """One setting of one side."""

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
