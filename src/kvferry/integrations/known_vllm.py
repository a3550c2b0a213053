"""What commands and the connector know of vLLM without importing it, and of the installed one."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from difflib import get_close_matches
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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


# -- the connector's options ---------------------------------------------------------------------------------

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


# -- the installed vLLM; importing it takes seconds ----------------------------------------------------------


def is_installed() -> bool:
    return find_spec("vllm") is not None


def installed_flags() -> dict[str, list[str]]:
    """The spellings of each ``vllm serve`` flag, by its number of values (1, 0, ?, +)."""
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    found: dict[str, list[str]] = defaultdict(list)
    for action in make_arg_parser(FlexibleArgumentParser())._actions:
        if action.option_strings:
            found["1" if action.nargs is None else str(action.nargs)].append(" ".join(action.option_strings))
    return dict(found)


def filled_config(folder: Path) -> Mapping[str, Any]:
    """A model's configuration with the defaults of its class, as engines compare it."""
    from vllm.transformers_utils.config import get_config

    values: Mapping[str, Any] = get_config(str(folder), trust_remote_code=False).to_dict()
    return values
