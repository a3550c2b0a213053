"""The two settings of a transport, as users write them: its way to read, and what it opens to readers."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from kvferry.errors import TransportError

WAY_SETTING, EXPOSE_SETTING = "KVFERRY_WAY", "KVFERRY_EXPOSE"

C = TypeVar("C", bound=Enum)


class WayChoice(Enum):
    """By which way a rank reads others."""

    AUTO = "auto"
    """Mapped where possible, else direct, else packed."""
    MAPPED = "mapped"
    DIRECT = "direct"
    PACKED = "packed"
    """These three: by this way, or not at all."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> WayChoice:
        """The setting; raises TransportError if it is none of these words."""
        return chosen(WAY_SETTING, environ, cls.AUTO)

    def allows(self, way: WayChoice) -> bool:
        """Whether a rank may be read by this way.

        >>> WayChoice.AUTO.allows(WayChoice.MAPPED), WayChoice.DIRECT.allows(WayChoice.MAPPED)
        (True, False)
        """
        return self in (WayChoice.AUTO, way)


class Expose(Enum):
    """What of a rank's memory its readers can reach without the rank's help."""

    NOTHING = "nothing"
    """Nothing: the rank sends every byte itself, after it has checked the ticket."""
    HOST = "host"
    """Device memory, by processes of the same user on the same host. All else the rank sends itself."""
    FABRIC = "fabric"
    """All its memory, by whoever has its card and reaches its fabric: it is registered with NIXL."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Expose:
        """The setting; raises TransportError if it is none of these words.

        >>> Expose.from_environment({}), Expose.from_environment({"KVFERRY_EXPOSE": "nothing"})
        (<Expose.HOST: 'host'>, <Expose.NOTHING: 'nothing'>)
        """
        return chosen(EXPOSE_SETTING, environ, cls.HOST)


def chosen(setting: str, environ: Mapping[str, str], default: C) -> C:
    """The choice that a setting names, or the default where nothing is set; raises TransportError otherwise.

    >>> chosen("KVFERRY_EXPOSE", {"KVFERRY_EXPOSE": "all"}, Expose.HOST)
    Traceback (most recent call last):
    kvferry.errors.TransportError: bad-setting: KVFERRY_EXPOSE='all': one of nothing, host, fabric
    """
    choices = type(default)
    value = environ.get(setting, default.value)
    try:
        return choices(value)
    except ValueError:
        words = ", ".join(choice.value for choice in choices)
        raise TransportError("bad-setting", f"{setting}={value!r}: one of {words}") from None
