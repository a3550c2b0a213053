"""What lies where inside one (block, head) of a cache tensor: one line per attention backend.

vLLM publishes every attention cache as [block, head, token, content] with strides, but the shape does not
tell the order *inside* a block: that is the backend's own. A backend that is not listed is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvferry.models.order import Fork, Order, Tile

PLAIN_ROWS: Order = ("token", "part", "channel")
"""K and V of a token side by side, token after token."""

CPU_VEC: Order = (Fork.of(k=("channel", "token"), v=("token", "channel")),)
CPU_AMX: Order = (
    Fork.of(
        k=("token", "channel", Tile("token", 16), Tile("channel", 2)),
        v=("channel", "token", Tile("channel", 16), Tile("token", 2)),
    ),
)


@dataclass(frozen=True)
class Interior:
    """The order inside a (block, head), and a tag that both sides must share."""

    order: Order
    tag: str = "plain"


def cpu_attention(isa: str) -> Interior | None:
    """CPU attention orders K and V by what the CPU's units like."""
    match isa:
        case "vec" | "vec16":
            return Interior(CPU_VEC)
        case "amx":
            return Interior(CPU_AMX)
        case _:
            return None


INTERIORS: dict[str, Callable[[str], Interior | None]] = {
    "CPU_ATTN": cpu_attention,
    "FLASH_ATTN": lambda isa: Interior(PLAIN_ROWS),
    "CPU_MLA": lambda isa: Interior(PLAIN_ROWS),
    "AMX_MLA": lambda isa: Interior(PLAIN_ROWS),
}
"""By the name of the backend; the argument is the CPU's instruction set, where that matters."""
