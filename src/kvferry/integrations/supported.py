"""The vLLM versions that kvferry supports, without importing vLLM."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum

TESTED_VLLM = ("0.31", "0.32", "0.33")
"""vLLM series that the tests cover. In the first, only models with one full-attention group work."""


class Standing(StrEnum):
    TESTED = "tested"
    NEWER = "newer than tested"
    """The engine starts if the startup checks pass."""
    OLDER = "older than supported"


def standing_of(version: str) -> Standing:
    """The standing of a vLLM version. A build without a version number counts as newer.

    >>> [standing_of(text).value for text in ("0.33.1+cpu", "0.34.0rc1", "0.30.2", "1.0.0", "dev")]
    ['tested', 'newer than tested', 'older than supported', 'newer than tested', 'newer than tested']
    """
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None:
        return Standing.NEWER
    series = int(numbers[1]), int(numbers[2])
    tested = [tuple(map(int, text.split("."))) for text in TESTED_VLLM]
    if series in tested:
        return Standing.TESTED
    return Standing.OLDER if series < min(tested) else Standing.NEWER


def supported_text() -> str:
    """The tested series, for messages.

    >>> supported_text()
    '0.31, 0.32 and 0.33'
    """
    return f"{', '.join(TESTED_VLLM[:-1])} and {TESTED_VLLM[-1]}"


_UNREAD = ("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT")


def unread_settings(environment: Mapping[str, str]) -> str:
    """A warning about variables that only NixlConnector reads; empty if none is set.

    >>> unread_settings({"VLLM_NIXL_SIDE_CHANNEL_PORT": "5600", "VLLM_HOST_IP": "10.0.0.7"})
    'VLLM_NIXL_SIDE_CHANNEL_PORT: set, but not read by kvferry. Set the address with the options ...
    >>> unread_settings({"VLLM_HOST_IP": "10.0.0.7"})
    ''
    """
    names = [name for name in _UNREAD if name in environment]
    if not names:
        return ""
    return (
        f"{', '.join(names)}: set, but not read by kvferry. Set the address with the options listen"
        " (tcp://HOST:PORT) and advertise (HOST) in kv_connector_extra_config. Default: a free port, at"
        " VLLM_HOST_IP with a secret, otherwise on loopback"
    )
