"""A model, as far as its cache goes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvferry.core.identity import Identity
from kvferry.models.cache import Cache

OFFLINE = "described offline"


def is_offline(identity: Identity) -> bool:
    """Whether it is that of a description made offline."""
    return ("", OFFLINE) in identity.unknown


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
    architecture: str = ""
    """The ``model_type`` of its config; empty if nobody says."""
    draft_architecture: str = ""
    num_query_heads: int = 0
    """Attention heads, which engines deal out to their ranks; 0 if nobody says."""

    def with_draft(self, draft: Model) -> Model:
        """This model with another one's layers as its speculative draft."""
        layers = tuple(replace(layer, name=f"draft.{layer.name}") for layer in draft.layers)
        return replace(
            self,
            name=f"{self.name}+{draft.name}",
            draft=(*self.draft, *layers),
            draft_architecture=draft.architecture,
        )

    @property
    def identity(self) -> Identity:
        """What a description made offline can say: its reader has no engine and no weights to look at."""
        named = {"architecture": self.architecture, "draft.architecture": self.draft_architecture}
        known = {name: kind for name, kind in named.items() if kind}
        return Identity.of(known, {"": OFFLINE} if known else {})
