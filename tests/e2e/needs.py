"""What a test here needs; without it, it is skipped and says so."""

import importlib.util
import platform
from contextlib import suppress
from pathlib import Path

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


HAS_AMX = "amx_bf16" in Path("/proc/cpuinfo").read_text()


def needs_cpu(dtype: str, *, has_fp8_cache: bool = False, is_mla: bool = False) -> None:
    """Skip what vLLM cannot compute on this CPU, by itself: its kernels end the process, or refuse."""
    if is_mla and dtype == "bfloat16" and not HAS_AMX:
        pytest.skip("without AMX, vLLM keeps MLA's latents in blocks of 16, whatever is asked for")
    if platform.machine() != "aarch64":
        return
    if has_fp8_cache:
        pytest.skip("vLLM keeps caches in fp8 on x86-64 only")
    if dtype == "bfloat16" and "bf16" not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip("this CPU has no instructions for bfloat16")
