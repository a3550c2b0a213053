"""What of a rank its readers can reach by themselves: the setting."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from kvferry.transport.setting import chosen

SETTING = "KVFERRY_EXPOSE"


class Expose(Enum):
    """What a rank opens to the fabric: the setting, as users write it."""

    POOL = "pool"
    """Its cache: whoever has its card can read it all."""
    STAGING = "staging"
    """Its rings alone: readers reach what the rank has gathered, and nothing of the cache."""
    NOTHING = "nothing"
    """Nothing: no NIXL agent is made, and bytes travel over streams that the rank itself sends."""

    @property
    def hides_pool(self) -> bool:
        """Whether the cache is not registered: neither can it be read nor read into by the fabric."""
        return self is not Expose.POOL

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Expose:
        """The setting; raises TransportError if it is none.

        >>> Expose.from_environment({}), Expose.from_environment({"KVFERRY_EXPOSE": "staging"}).hides_pool
        (<Expose.POOL: 'pool'>, True)
        """
        return chosen(SETTING, environ, cls.POOL)
