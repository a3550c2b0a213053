"""What makes two engines look like two models, although their caches fit: running engines compare more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from kvferry.checkpoint import config_values
from kvferry.cli.engines import Side
from kvferry.core.manifest import Manifest
from kvferry.errors import Code, Finding
from kvferry.models.model import is_offline

NOT_SET = "nothing"
WINDOW = "window"


def model_differences(src: Side, dst: Side, source: Manifest, destination: Manifest) -> tuple[Finding, ...]:
    """In what the two models differ as far as configurations, commands and descriptions tell."""
    if found := (*_configs(src, dst), *_flags(src, dst)):
        return found
    # A running engine has told more of its model than windows, and may keep more than a window of it.
    told_little = all(is_offline(each.identity) for each in (source, destination))
    return tuple(dict.fromkeys(_windows(source, destination))) if told_little else ()


def without_requirement(source: Manifest, destination: Manifest) -> tuple[Manifest, Manifest]:
    """The two without a requirement that only running engines can meet, if one of them is a description."""
    if all(each.identity.known and not is_offline(each.identity) for each in (source, destination)):
        return source, destination
    return _lax(source), _lax(destination)


def _lax(manifest: Manifest) -> Manifest:
    if not manifest.identity.is_required:
        return manifest
    return replace(manifest, identity=replace(manifest.identity, is_required=False))


def _configs(src: Side, dst: Side) -> Iterator[Finding]:
    """Values of the two configurations. An excerpt lacks keys, and that says nothing."""
    ours, theirs = src.served, dst.served
    if ours is None or theirs is None:
        return
    values = [config_values(each.config) for each in (ours, theirs)]
    is_whole = ours.file is not None and theirs.file is not None
    names = values[0].keys() | values[1].keys() if is_whole else values[0].keys() & values[1].keys()
    for name in sorted(names):
        in_src, in_dst = (each.get(name, NOT_SET) for each in values)
        if in_src != in_dst:
            yield _difference(name, in_src, in_dst)


def _flags(src: Side, dst: Side) -> Iterator[Finding]:
    """Flags of the two commands."""
    if src.command is None or dst.command is None:
        return
    dtypes = (src.model_dtype, dst.model_dtype)
    if (src.command.dtype or dst.command.dtype) and dtypes[0] != dtypes[1]:
        yield _difference("--dtype", *(dtype or NOT_SET for dtype in dtypes))
    ours, theirs = dict(src.command.model_flags), dict(dst.command.model_flags)
    for flag in sorted(ours.keys() | theirs.keys()):
        in_src, in_dst = ours.get(flag, NOT_SET), theirs.get(flag, NOT_SET)
        if in_src != in_dst:
            yield _difference(f"--{flag}", in_src, in_dst)


def _difference(what: str, in_src: str, in_dst: str) -> Finding:
    return Finding(Code.IDENTITY_DIFFERS, field=what, src=in_src, dst=in_dst)


def short_window(source: Manifest, destination: Manifest) -> int:
    """How many tokens the source keeps where the destination looks further back; 0 if it does nowhere."""
    pairs = _window_pairs(source, destination)
    return min((ours for ours, theirs in pairs if ours and (ours < theirs or not theirs)), default=0)


def _windows(source: Manifest, destination: Manifest) -> Iterator[Finding]:
    """How far back layers look."""
    for ours, theirs in _window_pairs(source, destination):
        if ours != theirs:
            yield _difference(WINDOW, *(f"{each} tokens" if each else NOT_SET for each in (ours, theirs)))


def _window_pairs(source: Manifest, destination: Manifest) -> Iterator[tuple[int, int]]:
    """The windows of each state that both have; 0 is all tokens."""
    ours, theirs = _window_of(source), _window_of(destination)
    for state in destination.states:
        other = source.find(state)
        if other is not None and other.name in ours and state.name in theirs:
            yield ours[other.name], theirs[state.name]


def _window_of(manifest: Manifest) -> dict[str, int]:
    groups = manifest.group_by_name
    return {view.state: groups[view.group].window for rank in manifest.ranks for view in rank.views}
