"""Which requests the demonstrations move."""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.core.manifest import Manifest


@dataclass(frozen=True, slots=True)
class Sample:
    """One request that is to be moved."""

    request_id: str
    num_tokens: int
    num_kept: int = 0
    """How many first tokens the destination has already."""


def some_samples(dst: Manifest, num_requests: int, num_tokens: int) -> list[Sample]:
    """Requests of many lengths, the last one the longest.

    Every third, the first among them, has a prefix that is there already.
    """
    whole_blocks = max(group.tokens_per_block for group in dst.groups)
    samples = []
    for number in range(1, num_requests):
        tokens = max(1, num_tokens - 37 * number * num_tokens // (37 * num_requests + 1))
        kept = tokens // 2 // whole_blocks * whole_blocks if number % 3 == 1 else 0
        samples.append(Sample(f"request-{number}", tokens, kept))
    return [*samples, Sample(f"request-{num_requests}", num_tokens)]
