"""A kernel's own text, compiled for this CPU: lanes and warps run one by one."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from kvferry.transport.copy_kernel import WARP_SIZE


def kernel_on_cpu(text: str, folder: Path) -> ctypes.CDLL:
    """The library; skips where there is no compiler."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler here: the kernel's text is tested where there is one")
    source, library = folder / "kernel.cpp", folder / "kernel.so"
    source.write_text(text)
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-fsanitize=undefined", "-fno-sanitize-recover", "-w"]
    names = ["-DKVFERRY_CPU", f"-DKVFERRY_CPU_LANES={WARP_SIZE}"]
    subprocess.run([compiler, *flags, *names, "-o", library, source], check=True)
    return ctypes.CDLL(str(library))
