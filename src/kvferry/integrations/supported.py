"""Which versions of other engines we are written for, for those who must not import them to find out."""

from __future__ import annotations

VLLM_SERIES = "0.32"
