"""The identity of an engine's model: named parts, each known or unknown, and their comparison.

The name of a part is a path: ``config.rope_theta`` is below ``config``. An unknown part covers everything
below it that is not known; the empty name covers all. An identity without parts is entirely unknown.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from kvferry.errors import Code, Finding, SpecError, counted

STATED = "stated"
"""The part that an operator sets; if it is there, no other part is compared."""
DRAFT = "draft"
"""The draft model; compared only if the destination has one."""
MAX_PARTS = 2048
MAX_NAME_LENGTH = 256
MAX_VALUE_LENGTH = 512
"""Characters of a value, or of a reason."""

NOTHING_SAID = "the engine does not identify its model"
BY_FILES = "weights are compared file by file: the same tensors in other files count as different"
TO_ACCEPT = "load weights from files, or set identity to unchecked on both engines to skip this check"


@dataclass(frozen=True)
class Identity:
    """The model that an engine runs: architecture, configuration, weights. Compared at first contact.

    >>> theirs = Identity.of({"architecture": "llama", "config.rope_theta": "10000.0"}, {"weights": "dummy"})
    >>> theirs.unknown_above("weights.content"), theirs.unknown_above("config.vocab_size")
    ('weights', None)
    """

    known: tuple[tuple[str, str], ...] = ()
    """(name, value), sorted by name."""
    unknown: tuple[tuple[str, str], ...] = ()
    """(name, reason), sorted by name."""
    is_required: bool = field(default=False, kw_only=True)
    """Whether to refuse peers with a part that cannot be compared."""

    def __post_init__(self) -> None:
        parts = (*self.known, *self.unknown)
        if len(parts) > MAX_PARTS:
            raise SpecError(f"identity: at most {MAX_PARTS} parts are allowed, got {len(parts)}")
        for name, text in parts:
            _check_length(name, len(name), 0, MAX_NAME_LENGTH)
            _check_length(name, len(text), 1, MAX_VALUE_LENGTH)
        if len({name for name, _ in parts}) < len(parts):
            raise SpecError("identity: a part is given twice")

    @classmethod
    def of(
        cls, known: Mapping[str, str], unknown: Mapping[str, str] | None = None, *, is_required: bool = False
    ) -> Identity:
        sides = (tuple(sorted(parts.items())) for parts in (known, unknown or {}))
        return cls(*sides, is_required=is_required)

    @cached_property
    def value(self) -> Mapping[str, str]:
        return dict(self.known)

    @cached_property
    def reason(self) -> Mapping[str, str]:
        return dict(self.unknown) if self.known or self.unknown else {"": NOTHING_SAID}

    def has_below(self, top: str) -> bool:
        """Whether a value is known for this part or one below it."""
        return top in {name.partition(".")[0] for name in self.value}

    def unknown_above(self, name: str) -> str | None:
        """The unknown part that covers this one, if any."""
        while name not in self.reason:
            if not name:
                return None
            name = name.rpartition(".")[0]
        return name


def _check_length(name: str, length: int, least: int, most: int) -> None:
    if not least <= length <= most:
        where = f"identity: {name[:40]!r}"
        raise SpecError(f"{where}: {least} to {most} characters are allowed, got {length}")


@dataclass(frozen=True)
class IdentityCheck:
    num_equal: int
    """Parts that both sides know and that are equal."""
    differing: tuple[Finding, ...]
    unknown: tuple[Finding, ...]
    """Parts that are unknown on at least one side."""

    @property
    def sentence(self) -> str:
        if self.differing:
            return f"the models differ in {', '.join(found.field for found in self.differing)}"
        parts = f"{counted(self.num_equal, 'part')} of the identity"
        if not self.unknown:
            return f"the same model ({parts} equal)"
        reasons = "; ".join(_cannot_know(found) for found in self.unknown)
        return f"the models cannot be compared completely ({parts} equal): {reasons}"


def _cannot_know(found: Finding) -> str:
    if found.src == found.dst:
        return f"{found.field}: both have {found.src}"
    sides = (("source", found.src), ("destination", found.dst))
    return f"{found.field}: " + ", ".join(f"{side} has {text}" for side, text in sides if text)


def compare_identity(src: Identity, dst: Identity) -> IdentityCheck:
    if STATED in src.value or STATED in dst.value:
        return _compare_stated(src.value.get(STATED, ""), dst.value.get(STATED, ""))
    names = _compared({*src.value, *dst.value}, dst)
    equal = [name for name in names if src.value.get(name) == dst.value.get(name)]
    differing = dict.fromkeys(_differing(name, src, dst) for name in names if _is_different(name, src, dst))
    return IdentityCheck(len(equal), tuple(differing), tuple(_unknown(src, dst)))


def merge_identity(ours: Identity, theirs: Identity) -> Identity:
    """The identity of an engine, from two of its ranks: a part is known if both ranks know it."""
    check = compare_identity(ours, theirs)
    if check.differing:
        raise SpecError(f"ranks of one engine do not run the same model: {check.differing[0]}")
    known = {name: value for name, value in ours.known if theirs.value.get(name) == value}
    is_required = ours.is_required or theirs.is_required
    return Identity.of(known, {**dict(ours.unknown), **dict(theirs.unknown)}, is_required=is_required)


def _compared(names: Collection[str], dst: Identity) -> list[str]:
    drafts = any(_is_of_draft(name) for name in (*dst.value, *dst.reason))
    return sorted(name for name in names if drafts or not _is_of_draft(name))


def _is_of_draft(name: str) -> bool:
    return name.partition(".")[0] == DRAFT


def _is_different(name: str, src: Identity, dst: Identity) -> bool:
    """A part that a side neither has nor lists as unknown does not exist in its model."""
    if name in src.value and name in dst.value:
        return src.value[name] != dst.value[name]
    return (src if name in dst.value else dst).unknown_above(name) is None


def _differing(name: str, src: Identity, dst: Identity) -> Finding:
    """One finding per part, or one for a whole draft that a side does not have."""
    top = name.partition(".")[0]
    if not (src.has_below(top) and dst.has_below(top)):
        sides = ("some" if side.has_below(top) else "none" for side in (src, dst))
        return Finding(Code.IDENTITY_DIFFERS, "", top, *sides)
    in_src, in_dst = (side.value.get(name, "none") for side in (src, dst))
    note = BY_FILES if name.endswith("weights.content") else ""
    return Finding(Code.IDENTITY_DIFFERS, "", name, in_src, in_dst, note)


def _unknown(src: Identity, dst: Identity) -> Iterator[Finding]:
    for name in _compared({*src.reason, *dst.reason}, dst):
        in_src, in_dst = (
            f"no value ({side.reason[name]})" if name in side.reason else "" for side in (src, dst)
        )
        yield Finding(Code.IDENTITY_UNKNOWN, "", name or "the rest", in_src, in_dst, TO_ACCEPT)


def _compare_stated(src: str, dst: str) -> IdentityCheck:
    if src == dst:
        return IdentityCheck(1, (), ())
    note = "one side states its identity as text: both sides must state the same text"
    found = Finding(Code.IDENTITY_DIFFERS, "", "identity", src or "no text", dst or "no text", note)
    return IdentityCheck(0, (found,), ())
