"""Settings that are one word of a few, as users write them in the environment."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from kvferry.errors import TransportError

C = TypeVar("C", bound=Enum)


def chosen(setting: str, environ: Mapping[str, str], default: C) -> C:
    """The choice that a setting names, or the default where nothing is set; raises TransportError on others.

    >>> from kvferry.transport.expose import Expose
    >>> chosen("KVFERRY_EXPOSE", {}, Expose.POOL)
    <Expose.POOL: 'pool'>
    >>> chosen("KVFERRY_EXPOSE", {"KVFERRY_EXPOSE": "all"}, Expose.POOL)
    Traceback (most recent call last):
    kvferry.errors.TransportError: bad-setting: KVFERRY_EXPOSE='all': one of pool, staging, nothing
    """
    choices = type(default)
    value = environ.get(setting, default.value)
    try:
        return choices(value)
    except ValueError:
        words = ", ".join(choice.value for choice in choices)
        raise TransportError("bad-setting", f"{setting}={value!r}: one of {words}") from None
