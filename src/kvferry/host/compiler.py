"""Code that is compiled where it runs, for this processor: once, in the background, and kept.

Nothing depends on it but the pace. Whoever asks gets None until the code is there, and for ever where there
is no compiler; and code that does not do what its twin in numpy does is not used.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from kvferry.errors import KVFerryError
from kvferry.host.private_files import own_folder, write_private
from kvferry.log import log_of

log = log_of(__name__)

SETTING = "KVFERRY_COMPILER"
OFF = "off"
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-shared", "-fPIC", "-pthread")
X86_FLAGS = ("-mprefer-vector-width=512",)
"""Where processors have such vectors, compilers leave them out unless they are told: a third of the pace."""
COMPILE_SECONDS = 120.0
FROM_BYTES = 16 << 20
"""A process that works on fewer bytes never compiles."""

Code = TypeVar("Code")


class NotCompiled(KVFerryError):
    """Why there is no compiled code here."""


class LateCode(Generic[Code]):
    """Compiled code, once so many bytes were worked on that it is worth its while."""

    def __init__(self, what: str, load: Callable[[str], Code]) -> None:
        """``what`` it does, for people; ``load``: compiles by this compiler, raises NotCompiled."""
        self._what, self._load = what, load
        self._lock = threading.Lock()
        self._code: Code | None = None
        self._num_bytes = 0
        self._thread: threading.Thread | None = None
        self.how = "numpy (nothing was compiled so far)"
        """Who does it, for people."""

    def for_bytes(self, num_bytes: int) -> Code | None:
        """The code for so many bytes more, if it is there; never waits for a compiler."""
        if self._thread is None:
            self._num_bytes += num_bytes
            if self._num_bytes >= FROM_BYTES:
                self.start()
        return self._code

    def start(self) -> threading.Thread:
        """Compile, in a thread, unless that was begun before."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._compile, name="kvferry-compile", daemon=True)
                self._thread.start()
            return self._thread

    def _compile(self) -> None:
        try:
            self._code, self.how = self._load(find_compiler(os.environ)), "compiled code"
        except Exception as error:
            self.how = f"numpy ({error})"
        log.info("%s by %s", self._what, self.how)


def find_compiler(environment: Mapping[str, str]) -> str:
    """The compiler that the environment names, or that is on the path; raises NotCompiled without one."""
    named = environment.get(SETTING, "")
    if named == OFF:
        raise NotCompiled(f"{SETTING} is {OFF}")
    for name in (named,) if named else COMPILERS:
        if found := shutil.which(name):
            return found
    raise NotCompiled(f"{SETTING} names no program: {named}" if named else "this host has no C++ compiler")


def compiled(compiler: str, name: str, text: str, folder: Path | None = None) -> ctypes.CDLL:
    """This text as code for this processor, compiled now or before; raises NotCompiled if that fails."""
    try:
        folder = folder or own_folder()
        path = folder / f"{name}-{_mark(compiler, text)}.so"
        if not path.exists():
            write_private(folder, path.name, _compile(compiler, text, folder))
    except (OSError, subprocess.SubprocessError) as error:
        raise NotCompiled(f"{compiler} failed: {error}") from error
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NotCompiled(f"the compiled code cannot be loaded: {error}") from error


def _compile(compiler: str, text: str, folder: Path) -> bytes:
    with tempfile.TemporaryDirectory(dir=folder) as place:
        written, library = Path(place) / "code.cpp", Path(place) / "code.so"
        written.write_text(text, encoding="utf-8")
        command = [compiler, *_flags(), "-o", str(library), str(written)]
        done = subprocess.run(
            command, capture_output=True, timeout=COMPILE_SECONDS, check=False, stdin=subprocess.DEVNULL
        )
        if done.returncode:
            complaint = done.stderr.decode(errors="replace").strip().partition("\n")[0]
            raise NotCompiled(f"{compiler} failed: {complaint[:200]}")
        return library.read_bytes()


def _flags() -> tuple[str, ...]:
    return FLAGS + X86_FLAGS if platform.machine() in ("x86_64", "AMD64") else FLAGS


def _mark(compiler: str, text: str) -> str:
    """Of the text, the compiler and the processor: code for another one may not run here."""
    stat = os.stat(compiler)
    known = (text, *_flags(), compiler, stat.st_size, stat.st_mtime_ns, platform.machine(), _processor())
    return hashlib.sha256("\0".join(map(str, known)).encode()).hexdigest()[:32]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    kinds = ("model name", "flags", "Features", "CPU part", "CPU implementer")
    return "\n".join(sorted({line for line in lines if line.startswith(kinds)}))
