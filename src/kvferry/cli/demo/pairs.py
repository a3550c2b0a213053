"""Which engines the demonstrations show."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from kvferry.cli.bad_input import at
from kvferry.cli.engines import chosen_model, described_to_fit
from kvferry.cli.output import num_bytes
from kvferry.core.manifest import Manifest
from kvferry.errors import SpecError
from kvferry.models import Model

MAX_MEMORY = 4 << 30
"""Bytes that the two engines may take together."""
NUM_LAYERS = 4
DEFAULT_SRC, DEFAULT_DST = "tp=2", "tp=4,layout=NHD"


@dataclass(frozen=True, slots=True)
class Pair:
    """Two engines of one model, shortened to about so many layers; each side is a topology."""

    model: str
    src: str
    dst: str
    num_layers: int = NUM_LAYERS

    def manifest(self, side: str, num_tokens: int, num_requests: int) -> Manifest:
        """The engine of one side (``src`` or ``dst``), with room for so many requests."""
        topology = self.src if side == "src" else self.dst
        model = shortened(chosen_model(self.model, None), self.num_layers)
        with at(f"--{side} {topology}"):
            return described_to_fit(model, topology, side, num_tokens, num_requests)


OF_PROCESSES = Pair("kimi-linear-48b", "tp=4,block=512", "tp=2,block=960,layout=cross-layer")
"""What is shown between processes where nothing else is asked for."""
IN_MEMORY = (
    Pair("kimi-linear-48b", "tp=4,block=256", "tp=8,block=96,layout=cross-layer"),
    Pair("deepseek-v3.2", "tp=3,block=64", "tp=5,block=128,layout=cross-layer"),
    Pair("llama-3.1-70b", "tp=4,block=16,layout=HND", "tp=6,block=24,layout=NHD"),
)
"""What is shown in memory where nothing else is asked for."""


def pair_of_processes(model: str, src: str | None, dst: str | None, layers: int | None) -> Pair:
    """The pair that was asked for; what was left open is the default's, if it is of that model."""
    known = OF_PROCESSES if model in ("", OF_PROCESSES.model) else Pair(model, DEFAULT_SRC, DEFAULT_DST)
    return Pair(known.model, src or known.src, dst or known.dst, layers or NUM_LAYERS)


def pairs_in_memory(model: str, src: str | None, dst: str | None, layers: int | None) -> tuple[Pair, ...]:
    """The pair that was asked for, or all that are shown by default."""
    if model:
        return (Pair(model, src or DEFAULT_SRC, dst or DEFAULT_DST, layers or NUM_LAYERS),)
    if src or dst or layers:
        raise SpecError("--src, --dst and --layers belong to a --model: name one of `kvferry models`")
    return IN_MEMORY


def shortened(model: Model, num_layers: int) -> Model:
    """The model with about so many layers: the first ones of each kind, in their order.

    >>> from kvferry.models import model_named
    >>> [layer.name for layer in shortened(model_named("kimi-linear-48b"), 4).layers]
    ['layers.0', 'layers.1', 'layers.3', 'layers.7']
    """
    kinds = {layer.caches for layer in model.layers if layer.caches}
    each = -(-num_layers // max(1, len(kinds)))
    seen: Counter[object] = Counter()
    kept = []
    for layer in model.layers:
        seen[layer.caches] += 1
        if layer.caches and seen[layer.caches] <= each:
            kept.append(layer)
    return replace(model, layers=tuple(kept))


def memory_bytes(*manifests: Manifest) -> int:
    """What these engines take."""
    return sum(region.num_bytes for each in manifests for rank in each.ranks for region in rank.regions)


def check_memory(*manifests: Manifest) -> None:
    """Refuse engines that would take too much."""
    total = memory_bytes(*manifests)
    if total > MAX_MEMORY:
        raise SpecError(
            f"the two engines would take {num_bytes(total)} of memory, more than {num_bytes(MAX_MEMORY)}:"
            " fewer --tokens, --layers or ranks take less"
        )
