"""A model, as far as its cache goes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvferry.models.cache import Cache


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer and its caches (none, for a layer that remembers nothing)."""

    name: str
    caches: tuple[Cache, ...] = ()
    shares: str = ""
    """The layer whose caches this one uses instead of its own (KV sharing)."""


@dataclass(frozen=True, slots=True)
class Model:
    """The layers of a model, and of its draft, which lives on the last pipeline stage."""

    name: str
    layers: tuple[Layer, ...]
    draft: tuple[Layer, ...] = ()
    default_block: int = 16

    def with_draft(self, draft: Model) -> Model:
        """This model with another one's layers as its speculative draft."""
        layers = tuple(replace(layer, name=f"draft.{layer.name}") for layer in draft.layers)
        return replace(self, name=f"{self.name}+{draft.name}", draft=(*self.draft, *layers))
