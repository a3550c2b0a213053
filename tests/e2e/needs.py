"""What a test here needs; without it, it is skipped and says so."""

import importlib.util
from contextlib import suppress

import pytest


def _is_there(module: str) -> bool:
    """Without importing it, which takes longer than the quick suite."""
    with suppress(ModuleNotFoundError):
        return importlib.util.find_spec(module) is not None
    return False


needs_vllm = [
    pytest.mark.skipif(not _is_there(module), reason=f"{module} is not installed")
    for module in ("vllm", "nixl", "zmq")
]
