"""A plan as people read it: the same text for the command line, the debug log and the golden tests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby

from kvferry.core.plan import Plan

_NUMBER = re.compile(r"\d+")


def explain(plan: Plan) -> str:
    """One line per source rank and kind of piece; layers that go alike are named together.

    >>> from kvferry.models import Topology, describe, model_named
    >>> src, dst = (describe(model_named("llama-3.1-8b"), Topology(tp=tp)) for tp in (2, 3))
    >>> from kvferry import plan as make
    >>> print(explain(make(src, dst, dst_rank=1, states=["layers.0.attn/k", "layers.1.attn/k"])))
    dst 1 <- src 0  layers.{0-1}.attn/k  channel [0, 128) × head [2, 4)
    dst 1 <- src 1  layers.{0-1}.attn/k  channel [0, 128) × head [4, 6)
    """
    pieces: dict[tuple[int, str, str], list[str]] = {}
    for piece in plan.pieces:
        kind = _NUMBER.sub("#", piece.state, count=1)
        pieces.setdefault((piece.src_rank, kind, str(piece.box)), []).append(piece.state)
    lines = [
        f"dst {plan.dst_rank} <- src {src_rank}  {name_together(names)}  {box}"
        for (src_rank, _, box), names in sorted(pieces.items(), key=lambda item: item[0][0])
    ]
    return "\n".join(lines)


def name_together(names: Sequence[str]) -> str:
    """Names that differ in their first number only, as one.

    >>> name_together(["layers.0/k", "layers.1/k", "layers.2/k", "layers.7/k"])
    'layers.{0-2,7}/k'
    """
    matches = [_NUMBER.search(name) for name in names]
    first = matches[0]
    if len(names) == 1 or first is None:
        return names[0]
    numbers = sorted(int(match.group()) for match in matches if match)
    head, tail = names[0][: first.start()], names[0][first.end() :]
    return f"{head}{{{','.join(_ranges(numbers))}}}{tail}"


def _ranges(numbers: Iterable[int]) -> Iterable[str]:
    """Neighbouring numbers as ranges."""
    for _, neighbours in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        first, *rest = (number for _, number in neighbours)
        yield f"{first}-{rest[-1]}" if rest else f"{first}"
