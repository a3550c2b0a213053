"""How a rank's rings are: how long, where, and whether others of its host look at them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from kvferry.transport.ring_window import SharedRings
from kvferry.transport.setting import chosen
from kvferry.transport.staging_ring import StagingSize

MEMORY_SETTING = "KVFERRY_RING_MEMORY"


class RingMemory(Enum):
    """Where the rings of a rank with device memory are: the setting, as users write it."""

    OWN = "own"
    """Where its memory is, if it must be read through them; else on the host, where they cost the device
    nothing."""
    HOST = "host"
    """In the host's memory, where every fabric reaches them; the device copies over its bus."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> RingMemory:
        """The setting; raises TransportError if it is none.

        >>> RingMemory.from_environment({"KVFERRY_RING_MEMORY": "host"})
        <RingMemory.HOST: 'host'>
        """
        return chosen(MEMORY_SETTING, environ, cls.OWN)


@dataclass(frozen=True, slots=True)
class RingOptions:
    """What does not depend on the rank's memory."""

    size: StagingSize | None = None
    """None: what is usual where they are."""
    shared: SharedRings = SharedRings.ON
    memory: RingMemory = RingMemory.OWN

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> RingOptions:
        """The settings; raises TransportError if one is none."""
        return cls(None, SharedRings.from_environment(environ), RingMemory.from_environment(environ))
