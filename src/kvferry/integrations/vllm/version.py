"""Which vLLM this connector is written for."""

from __future__ import annotations

import vllm

from kvferry.integrations.supported import VLLM_SERIES


def check_version(version: str = "") -> None:
    """Refuse another vLLM: its hooks may have other names, and its caches another meaning.

    >>> check_version("0.32.1+cpu")
    >>> check_version("0.33.0")
    Traceback (most recent call last):
    ImportError: kvferry's connector is written for vLLM 0.32, this is vLLM 0.33.0: take a kvferry ...
    """
    version = version or vllm.__version__
    if not version.startswith(f"{VLLM_SERIES}."):
        raise ImportError(
            f"kvferry's connector is written for vLLM {VLLM_SERIES}, this is vLLM {version}: take a kvferry"
            f" that names it (docs/vllm.md), or a vLLM {VLLM_SERIES}"
        )
