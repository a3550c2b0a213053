"""The names of the connector's options, without importing vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

TEXTS = ("listen", "advertise", "secret_file", "dump", "identity")
LEASE = "lease_seconds"
_WORDS = ("insecure", "authorities", "backends", "digest", "expose", "way", "layout_check", "vllm_version")
READ_BACK = "bidirectional_kv_xfer"
"""The name that vLLM's NixlConnector uses."""
_KNOWN = {*TEXTS, LEASE, READ_BACK, *_WORDS}
_INSTEAD = {
    "num_threads": "remove it: the number of cores decides",
    "kv_lease_duration": "use lease_seconds",
    "enforce_handshake_compat": "remove it: engines are compared field by field; the option identity"
    " overrides it",
    "engine_ttl": "remove it: lost engines are detected automatically",
    "kv_recompute_threshold": "remove it: every ticket is used; let the router skip prefill for short"
    " prompts",
    "decoder_kv_blocks_ttl": "remove it: finished requests pin no blocks",
    "push_registration_timeout": "remove it: kvferry pulls",
}
"""Options of vLLM's NixlConnector, with their replacements."""


def unknown_options(extra: Mapping[str, Any]) -> str:
    """A message that names each unknown option with its replacement; empty if all are known."""
    unknown = sorted(set(extra) - _KNOWN)
    if not unknown:
        return ""
    names = ", ".join(f"{name}{_advice(name)}" for name in unknown)
    return f"kv_connector_extra_config: unknown {names}; known are {', '.join(sorted(_KNOWN))}"


def _advice(name: str) -> str:
    if name in _INSTEAD:
        return f" (NixlConnector's; {_INSTEAD[name]})"
    alike = get_close_matches(name, _KNOWN, n=1, cutoff=0.7)
    return f" (did you mean {alike[0]}?)" if alike else ""
