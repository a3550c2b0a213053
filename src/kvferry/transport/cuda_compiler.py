"""CUDA C++ becomes machine code on the machine that runs it, by NVIDIA's own bindings."""

from __future__ import annotations

from functools import cache
from typing import Any

from kvferry.errors import TransportError
from kvferry.transport.cuda import INSTALL, call


def compile_kernel(source: str, architecture: str) -> bytes:
    """CUDA C++ as machine code for one architecture."""
    nvrtc = _nvrtc()
    program = call(nvrtc.nvrtcCreateProgram, source.encode(), b"kvferry.cu", 0, [], [])
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    try:
        call(nvrtc.nvrtcCompileProgram, program, len(options), options)
    except TransportError as error:
        text = bytearray(call(nvrtc.nvrtcGetProgramLogSize, program))
        call(nvrtc.nvrtcGetProgramLog, program, text)
        raise TransportError("cuda", f"{error.detail}: {text.decode(errors='replace')}") from error
    binary = bytearray(call(nvrtc.nvrtcGetCUBINSize, program))
    call(nvrtc.nvrtcGetCUBIN, program, binary)
    call(nvrtc.nvrtcDestroyProgram, program)
    return bytes(binary)


def compiler_version() -> str:
    """Which compiler this is, for the name of what it made."""
    return ".".join(str(part) for part in call(_nvrtc().nvrtcVersion))


@cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise TransportError(
            "no-cuda", f"CUDA's run-time compiler cannot be loaded ({error}); {INSTALL}"
        ) from error
    return nvrtc
