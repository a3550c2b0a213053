"""Every exception that kvferry raises on purpose.

::

    KVFerryError
    ├── SpecError        an invalid description (also a ValueError)
    ├── Refused          two incompatible descriptions, or without a proof that they are compatible
    ├── RequestError     a request that does not fit its plan; other requests are not affected
    ├── TransportError   a transport operation that is not possible, or timed out
    ├── ChannelError     a control channel that cannot be opened
    └── MissingPackage   a package that is not installed (also an ImportError)

Errors that a peer, a user or the network can cause are never raised by ``assert``, so ``python -O`` changes
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import islice
from typing import ClassVar


def counted(number: int, noun: str) -> str:
    """A count with its noun, for messages."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


class Code(StrEnum):
    """The reason of a refusal. The text of a code is stable: tools may match on it."""

    VERSION = "version"
    """The manifests have different schema versions."""
    IDENTITY_DIFFERS = "identity-differs"
    """The engines do not run the same model: a part of the identity differs."""
    IDENTITY_UNKNOWN = "identity-unknown"
    """A part of a model's identity is unknown, and one of the engines requires it."""
    MISSING_STATE = "missing-state"
    """The destination needs a state that no rank of the source engine has."""
    STATE_DIFFERS = "state-differs"
    """Both sides have the state, but in different formats."""
    UNKNOWN_RANK = "unknown-rank"
    """The manifest has no such rank."""
    NOT_HELD = "not-held"
    """No source rank holds a part of the box that the destination needs."""
    OUT_OF_BOUNDS = "out-of-bounds"
    """A view reaches past the end of its region."""
    CELLS_COLLIDE = "cells-collide"
    """Two cells of one view share a byte."""
    VIEWS_OVERLAP = "views-overlap"
    """Two states that can be live at once share a byte."""
    GAP = "gap"
    """No piece writes a needed cell."""
    WRITTEN_TWICE = "written-twice"
    """Two pieces write the same needed cell."""
    NOT_NEEDED = "not-needed"
    """A piece writes cells that the destination does not need."""
    WRONG_SOURCE = "wrong-source"
    """A piece reads cells that its source rank does not hold."""
    TURNS_TOO_MANY = "turns-too-many"
    """The context-parallel interleaving of the two sides has no short common period."""
    TOO_MANY_RUNS = "too-many-runs"
    """The plan is correct, but a block or a request needs more runs than the limit."""


class KVFerryError(Exception):
    """The base class of all errors of kvferry."""


class SpecError(KVFerryError, ValueError):
    """An invalid description, setting or file; the message names place, rule and value."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason for a refusal, with the place and both values.

    >>> print(Finding(Code.STATE_DIFFERS, state="layers.0/k", field="dtype", src="bf16", dst="fp8"))
    state-differs: layers.0/k: dtype: source has bf16, destination has fp8
    """

    code: Code
    state: str = ""
    """The state concerned; empty where the finding is about the whole engine."""
    field: str = ""
    """The field, axis or interval concerned."""
    src: str = ""
    """The source's value."""
    dst: str = ""
    """The destination's value."""
    note: str = ""
    """Further explanation, with the fix if there is one."""

    def __str__(self) -> str:
        sides = [f"source has {self.src}"] * bool(self.src)
        sides += [f"destination has {self.dst}"] * bool(self.dst)
        parts = [self.code.value, self.state, self.field, ", ".join(sides), self.note]
        return ": ".join(part for part in parts if part)


def _of_all(alike: Sequence[Finding]) -> str:
    """One line for findings that differ in their state only."""
    first = alike[0]
    others = f" and {len(alike) - 1:,} more states" if len(alike) > 2 else ""
    if len(alike) == 2:
        others = f" and {alike[1].state}"
    return str(replace(first, state=f"{first.state}{others}"))


class Refused(KVFerryError):
    """Two incompatible engines, with every finding; nothing was transferred.

    >>> error = Refused(Finding(Code.GAP, state="layers.0/k", field="head [2, 4)"))
    >>> error.codes, str(error)
    (('gap',), 'gap: layers.0/k: head [2, 4)')
    """

    SHOWN = 8
    """Findings in the message; those that differ in their state only count as one."""
    MAX_FINDINGS = 1000
    """Findings in ``findings``; ``num_more`` counts the others."""

    def __init__(self, *findings: Finding, num_more: int = 0) -> None:
        self.findings = findings[: self.MAX_FINDINGS]
        self.num_more = num_more + len(findings) - len(self.findings)
        alike: dict[Finding, list[Finding]] = {}
        for finding in findings:
            alike.setdefault(replace(finding, state=""), []).append(finding)
        shown = list(alike.values())[: self.SHOWN]
        lines = [_of_all(some) for some in shown]
        more = num_more + len(findings) - sum(map(len, shown))
        super().__init__("\n".join([*lines, f"… and {more:,} more"] if more > 0 else lines))

    @classmethod
    def raise_if_any(cls, found: Iterable[Finding]) -> None:
        """Raise with all findings, if there are any."""
        findings = iter(found)
        kept = tuple(islice(findings, cls.MAX_FINDINGS))
        if kept:
            raise cls(*kept, num_more=sum(1 for _ in findings))

    @property
    def codes(self) -> tuple[str, ...]:
        """The distinct codes, in order."""
        return tuple(dict.fromkeys(finding.code.value for finding in self.findings))


class RequestError(KVFerryError):
    """A request that does not fit the two engines; it fails before anything is transferred.

    >>> str(RequestError("src-table-short", "full", "tokens [32, 48) lie past its 2 blocks"))
    'src-table-short: group full: tokens [32, 48) lie past its 2 blocks'
    """

    def __init__(self, code: str, group: str, detail: str) -> None:
        self.code, self.group, self.detail = code, group, detail
        super().__init__(f"{code}: group {group}: {detail}")


class TransportError(KVFerryError):
    """A transport operation that is not possible or timed out; raised before anything moves.

    A submitted read does not raise: its ``ReadEnd`` has the outcome.

    >>> str(TransportError("unknown-peer", "'decode-3' is not connected"))
    "unknown-peer: 'decode-3' is not connected"
    """

    def __init__(self, code: str, detail: str) -> None:
        self.code, self.detail = code, detail
        super().__init__(f"{code}: {detail}")


class ChannelError(KVFerryError):
    """A control channel that cannot be opened: the address is taken, malformed, or not this host's."""


class MissingPackage(KVFerryError, ImportError):
    """A package is not installed; the message names the extra of kvferry that includes it.

    >>> str(MissingPackage.named(ModuleNotFoundError(name="zmq.utils")))
    'pyzmq is not installed: pip install ".[engine]" in a clone of kvferry'
    """

    EXTRAS: ClassVar[dict[str, tuple[str, str]]] = {
        "aiohttp": ("aiohttp", "proxy"),
        "cryptography": ("cryptography", "engine"),
        "hypothesis": ("hypothesis", "testing"),
        "jinja2": ("jinja2", "html"),
        "prometheus_client": ("prometheus_client", "metrics"),
        "rich": ("rich", "cli"),
        "typer": ("typer", "cli"),
        "zmq": ("pyzmq", "engine"),
    }
    """By imported module: the package, and the extra of kvferry that includes it."""

    @classmethod
    def is_of_ours(cls, error: ModuleNotFoundError) -> bool:
        """Whether the missing module is in one of the extras."""
        return (error.name or "").partition(".")[0] in cls.EXTRAS

    @classmethod
    def named(cls, error: ModuleNotFoundError) -> MissingPackage:
        package, extra = cls.EXTRAS[(error.name or "").partition(".")[0]]
        return cls(
            f'{package} is not installed: pip install ".[{extra}]" in a clone of kvferry', name=error.name
        )
