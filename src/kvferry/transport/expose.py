"""What of a rank its readers can reach by themselves: the setting, and where it is not built yet."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from kvferry.errors import TransportError
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


def check_built(expose: Expose, what: str) -> None:
    """Refuse to hide the pool of ``what``, for which that is not built yet: rather no start than an open one.

    Every such place calls this, and nothing else does.

    >>> check_built(Expose.STAGING, "device memory")
    Traceback (most recent call last):
    kvferry.errors.TransportError: bad-setting: KVFERRY_EXPOSE='staging' is not built yet for device memory...
    """
    if expose.hides_pool:
        detail = f"{SETTING}={expose.value!r} is not built yet for {what}"
        raise TransportError("bad-setting", f"{detail}; leave it unset, or set {Expose.POOL.value!r}")
