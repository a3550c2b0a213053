"""Results on disk: one JSON file that is whole at any moment, goes on where it ended, and can be merged."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

VERSION = 1


class Outcome(StrEnum):
    """How a case ended."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_HERE = "not-here"
    """It cannot run on this machine, for a reason that is none of kvferry's."""


class ResultsError(Exception):
    """A file of results cannot be used, and what to do about it."""


@dataclass(frozen=True, slots=True)
class Result:
    """What is known of one case."""

    case: str
    outcome: Outcome
    why: str = ""
    """Of what did not pass: the cause, in a sentence."""
    found: Mapping[str, Any] = field(default_factory=dict)
    """What was counted and measured."""
    ended: float = 0.0
    """Seconds since 1970."""
    seconds: float = 0.0
    """How long it took."""
    commit: str = ""
    """Of kvferry."""

    @classmethod
    def of(cls, doc: Mapping[str, Any]) -> Result:
        return cls(**{**doc, "outcome": Outcome(doc["outcome"])})


@dataclass(frozen=True, slots=True)
class Results:
    """All results of one kind of machine, by the names of their cases."""

    machine: Mapping[str, str]
    by_case: Mapping[str, Result] = field(default_factory=dict)

    def plus(self, *results: Result) -> Results:
        """With these, too; of two results of one case the later one counts."""
        by_case = dict(self.by_case)
        for result in results:
            if result.case not in by_case or by_case[result.case].ended <= result.ended:
                by_case[result.case] = result
        return Results(self.machine, by_case)

    def to_json(self) -> str:
        results = [asdict(self.by_case[name]) for name in sorted(self.by_case)]
        return json.dumps({"version": VERSION, "machine": dict(self.machine), "results": results}, indent=1)


def read(path: Path) -> Results:
    """The results of a file; raises ResultsError where it is none."""
    try:
        doc = json.loads(path.read_text(encoding="utf-8"))
        if doc["version"] != VERSION:
            raise ResultsError(f"{path} has results of version {doc['version']}, this is version {VERSION}")
        results = [Result.of(one) for one in doc["results"]]
        return Results(doc["machine"]).plus(*results)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultsError(f"{path} cannot be read as results: {error!r}. Name another file.") from None


def write(path: Path, results: Results) -> None:
    """Replace the file as a whole: whoever reads it, or dies here, has the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(results.to_json() + "\n", encoding="utf-8")
    os.replace(part, path)


def merge(files: Iterable[Path]) -> Results:
    """All results of several files of one kind of machine."""
    whole: Results | None = None
    for path in files:
        part = read(path)
        if whole is None:
            whole = part
        elif differing := [
            f"{key}: {whole.machine.get(key)} and {part.machine.get(key)}"
            for key in ("device", "vllm")
            if whole.machine.get(key) != part.machine.get(key)
        ]:
            raise ResultsError(
                f"{path} is of another machine than the files before ({'; '.join(differing)}):"
                " a report is about one. Merge them apart."
            )
        else:
            whole = whole.plus(*part.by_case.values())
    if whole is None:
        raise ResultsError("there is nothing to merge: name the files")
    return whole
