"""The request of ``kvferry plan``, and its bill for any two sides, given or tried."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from kvferry.checkpoint import config_values
from kvferry.cli.bill import Bill, bill_of
from kvferry.cli.engines import Side, listed_ranks
from kvferry.cli.options import at
from kvferry.core.choices import MAX_RUNS_PER_BLOCK, Placement
from kvferry.core.manifest import Manifest
from kvferry.core.sample import sample_request
from kvferry.core.state import Group
from kvferry.errors import Code, Finding, SpecError
from kvferry.integrations.known_vllm import filled_config, is_installed
from kvferry.models.model import is_offline

NOT_SET = "nothing"
WINDOW = "window"


def model_differences(src: Side, dst: Side, source: Manifest, destination: Manifest) -> tuple[Finding, ...]:
    """The differences of the two models, according to configurations, commands and descriptions."""
    if found := (*compared_configs(src, dst)[0], *_flags(src, dst)):
        return found
    # The manifest of a running engine has a full identity, and it may keep more than a window.
    told_little = all(is_offline(each.identity) for each in (source, destination))
    return tuple(dict.fromkeys(_windows(source, destination))) if told_little else ()


def without_requirement(source: Manifest, destination: Manifest) -> tuple[Manifest, Manifest]:
    """Drop a required identity, which descriptions cannot have, if one of the two is a description."""
    if all(each.identity.known and not is_offline(each.identity) for each in (source, destination)):
        return source, destination
    return _lax(source), _lax(destination)


def _lax(manifest: Manifest) -> Manifest:
    if not manifest.identity.is_required:
        return manifest
    return replace(manifest, identity=replace(manifest.identity, is_required=False))


@cache
def compared_configs(src: Side, dst: Side) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """How two configurations differ, and the keys that only one sets: transformers fills in the other's."""
    if src.served is None or dst.served is None:
        return (), ()
    files = [each.file for each in (src.served, dst.served) if each.file]
    is_whole = len(files) == 2
    configs = [each.config if is_whole else _excerpt(each.config) for each in (src.served, dst.served)]
    ours, theirs = map(config_values, configs)
    unset = ours.keys() ^ theirs.keys()
    if is_whole and unset and is_installed():
        with suppress(Exception):  # a model's own code may be needed to read it
            ours, theirs = (config_values(filled_config(file.parent)) for file in files)
            unset = set()
    # What one file sets, and the other one denies (false; null for an object), is a difference.
    unset = {name for name in unset if not all(_names(config, name) for config in configs)}
    values = {
        name: (ours.get(name, NOT_SET), theirs.get(name, NOT_SET))
        for name in sorted((ours.keys() | theirs.keys()) - unset)
    }
    found = tuple(_difference(name, *both) for name, both in values.items() if both[0] != both[1])
    return found, tuple(sorted(unset)) if is_whole else ()


def _excerpt(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys that the catalogue has, too: those of the text model. The manifests compare model types."""
    text = config.get("text_config")
    return {**config, **(text if isinstance(text, Mapping) else {}), "model_type": None}


def _names(config: Mapping[str, Any], dotted: str) -> bool:
    """Whether a configuration sets this key, or has something else than an object on the way to it.

    A key that is null is not set: transformers fills in many of them.
    """
    inside: object = config
    for key in dotted.split("."):
        if not isinstance(inside, Mapping):
            return True
        if key not in inside:
            return False
        inside = inside[key]
    return inside is not None


def _flags(src: Side, dst: Side) -> Iterator[Finding]:
    if src.command is None or dst.command is None:
        return
    ours, theirs = (side.values_beside_config for side in (src, dst))
    for name in sorted(ours.keys() | theirs.keys()):
        in_src, in_dst = ours.get(name, NOT_SET), theirs.get(name, NOT_SET)
        if in_src != in_dst:
            yield _difference(name, in_src, in_dst)


def _difference(what: str, in_src: str, in_dst: str) -> Finding:
    return Finding(Code.IDENTITY_DIFFERS, field=what, src=in_src, dst=in_dst)


def short_window(source: Manifest, destination: Manifest, num_kept: int = 0) -> int:
    """The tokens that the source keeps of states of which the destination needs more; 0 if there are none."""
    pairs = _window_pairs(source, destination)
    return min((ours.window for ours, theirs in pairs if _keeps_less(ours, theirs, num_kept)), default=0)


def _keeps_less(ours: Group, theirs: Group, num_kept: int) -> bool:
    lacks_sinks = ours.sinks < theirs.sinks and num_kept < theirs.sinks
    return ours.window > 0 and (not theirs.window or ours.window < theirs.window or lacks_sinks)


def window_words(group: Group) -> str:
    sinks = f" and the first {group.sinks}" if group.sinks else ""
    return f"{group.window} tokens{sinks}" if group.window else "none"


def _windows(source: Manifest, destination: Manifest) -> Iterator[Finding]:
    for pair in _window_pairs(source, destination):
        ours, theirs = map(window_words, pair)
        if ours != theirs:
            yield _difference(WINDOW, ours, theirs)


def _window_pairs(source: Manifest, destination: Manifest) -> Iterator[tuple[Group, Group]]:
    """The groups of each common state."""
    ours, theirs = _group_of(source), _group_of(destination)
    for state in destination.states:
        other = source.find(state)
        if other is not None and other.name in ours and state.name in theirs:
            yield ours[other.name], theirs[state.name]


def _group_of(manifest: Manifest) -> dict[str, Group]:
    groups = manifest.group_by_name
    return {view.state: groups[view.group] for rank in manifest.ranks for view in rank.views}


DEFAULT_TOKENS = 4096


@dataclass(frozen=True)
class Billed:
    source: Manifest
    destination: Manifest
    tokens: int
    ranks: tuple[int, ...]
    bill: Bill


@dataclass(frozen=True, slots=True)
class Asked:
    """The request to bill, as options."""

    tokens: int | None = None
    """None: 4096, or what fits."""
    kept: int = 0
    placement: Placement = Placement.SCATTERED
    dst_rank: int | None = None
    max_runs_per_block: int = MAX_RUNS_PER_BLOCK
    links: tuple[str, ...] = ()

    def billed(self, src: Side, dst: Side) -> Billed:
        """Describe both sides, and bill the request between them."""
        room = self.tokens or DEFAULT_TOKENS
        return self.billed_between(src.manifest(room), dst.manifest(room))

    def billed_between(self, source: Manifest, destination: Manifest) -> Billed:
        """The same for described engines."""
        source, destination = without_requirement(source, destination)
        ranks = asked_ranks(destination, self.dst_rank)
        tokens = self.tokens or fitting_tokens(source, destination)
        if self.kept > tokens:
            raise SpecError(
                f"--kept {self.kept} must not exceed the {tokens} tokens of the request; --tokens N sets them"
            )
        window = short_window(source, destination, self.kept)
        if window and tokens - self.kept > window:
            raise SpecError(
                f"--tokens {tokens}: the source keeps only {window} tokens of some layers, and the"
                f" destination needs more: use --tokens {window} or less"
            )
        options = f"--tokens {tokens} --kept {self.kept}"
        with at(options if self.tokens or self.kept else f"a request of {tokens} tokens"):
            request = sample_request(
                source, destination, tokens, num_kept=self.kept, placement=self.placement
            )
            bill = bill_of(source, destination, ranks, request, self.max_runs_per_block)
        return Billed(source, destination, tokens, tuple(ranks), bill)

    def command(self, src: Side, dst: Side) -> str:
        """The same command for these two sides."""
        words = ["kvferry", "plan", *_sides(src, dst)]
        for option, value, default in (
            ("--tokens", self.tokens, None),
            ("--kept", self.kept, 0),
            ("--placement", self.placement.value, Placement.SCATTERED.value),
            ("--dst-rank", self.dst_rank, None),
        ):
            if value != default:
                words += [option, str(value)]
        for link in self.links:
            words += ["--link", link]
        return shlex.join(words)


def _sides(src: Side, dst: Side) -> list[str]:
    words: list[str] = []
    same = src.model == dst.model and src.config == dst.config and not (src.file or dst.file)
    for side in (src, dst):
        if side.file is not None:
            words += [f"--{side.engine}", str(side.file)]
            continue
        if side.model and not (same and side is dst):
            words += ["--model" if same else f"--{side.engine}-model", side.model]
        if side.config and side.engine == ("src" if same else side.engine):
            words += ["--config", str(side.config)]
        words += [f"--{side.engine}", side.text]
    return words


def fitting_tokens(source: Manifest, destination: Manifest) -> int:
    """The default number of tokens, or the source's window, halved until both pools have room."""
    tokens = min(DEFAULT_TOKENS, short_window(source, destination) or DEFAULT_TOKENS)
    while tokens > 1:
        try:
            sample_request(source, destination, tokens)
            break
        except SpecError:
            tokens //= 2
    return tokens


def asked_ranks(destination: Manifest, dst_rank: int | None) -> Sequence[int]:
    known = [rank.rank for rank in destination.ranks]
    if dst_rank is None:
        return known
    if dst_rank not in known:
        raise SpecError(f"--dst-rank {dst_rank}: engine {destination.engine} has {listed_ranks(destination)}")
    return [dst_rank]
