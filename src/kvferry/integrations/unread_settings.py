"""Variables of vLLM's own NIXL connector that are set where kvferry runs, and mean nothing to it."""

from __future__ import annotations

from collections.abc import Mapping

_UNREAD = ("VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT")


def unread_settings(environment: Mapping[str, str]) -> str:
    """What is set for NixlConnector, and what to say here instead; empty if nothing is.

    >>> unread_settings({"VLLM_NIXL_SIDE_CHANNEL_PORT": "5600", "VLLM_HOST_IP": "10.0.0.7"})
    'VLLM_NIXL_SIDE_CHANNEL_PORT: set, but not read by kvferry. Where readers call this engine is said by ...
    >>> unread_settings({"VLLM_HOST_IP": "10.0.0.7"})
    ''
    """
    names = [name for name in _UNREAD if name in environment]
    if not names:
        return ""
    return (
        f"{', '.join(names)}: set, but not read by kvferry. Where readers call this engine is said by"
        " the options listen (tcp://HOST:PORT) and advertise (HOST) in kv_connector_extra_config; without"
        " them kvferry takes a free port, at VLLM_HOST_IP if there is a secret, else on loopback"
    )
