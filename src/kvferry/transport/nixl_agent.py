"""NIXL's agent. Only this file imports NIXL, and translates its errors."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvferry.core.runs import Runs
from kvferry.errors import TransportError
from kvferry.host.threads import quietly
from kvferry.transport.cards import name_in
from kvferry.transport.places import Places, RegionTable, cut_long

INSTALL = (
    'install it with: pip install ".[nixl]" in a clone of kvferry. Its wheels ask for a CUDA build of torch,'
    " which kvferry does not need; without it: pip install --no-deps nixl nixl-cu12"
)

PROGRESS_WAKE_US = 100_000
"""Longest sleep of NIXL's progress thread, which events wake. NIXL's Python wrapper sets 0, which keeps a
core busy without making reads faster."""

UCX = "UCX"
"""NIXL's default backend."""

SLICE_RUNS = 1024
HOST_SLICE_BYTES, CUDA_SLICE_BYTES = 32 << 20, 512 << 20
"""A post of host memory copies before it returns, some milliseconds per slice; a post of device memory takes
time per run. Other peers get their turn between two slices."""


class SlicePair(NamedTuple):
    """Descriptors of one post; each side is of one kind of memory."""

    src_kind: str
    dst_kind: str
    src: NDArray[np.uint64]
    dst: NDArray[np.uint64]


def slice_pairs(runs: Runs, src: RegionTable, dst: RegionTable) -> Iterator[SlicePair]:
    """A read as posts; mixed reads are sorted by kind of memory first."""
    src_names, dst_names = (
        memory.names[Places.split(places)[0]] for memory, places in ((src, runs.src), (dst, runs.dst))
    )
    for src_kind in dict.fromkeys(src.names.tolist()):
        for dst_kind in dict.fromkeys(dst.names.tolist()):
            at = (src_names == src_kind) & (dst_names == dst_kind)
            some = runs if at.all() else Runs(runs.src[at], runs.dst[at], runs.num_bytes[at])
            max_bytes = HOST_SLICE_BYTES if "DRAM" in (src_kind, dst_kind) else CUDA_SLICE_BYTES
            for slice_runs in slices(some, SLICE_RUNS, max_bytes):
                yield SlicePair(
                    src_kind,
                    dst_kind,
                    src.descriptors(slice_runs.src, slice_runs.num_bytes),
                    dst.descriptors(slice_runs.dst, slice_runs.num_bytes),
                )


def slices(runs: Runs, max_runs: int, max_bytes: int) -> Iterator[Runs]:
    """The runs in order, as slices; longer runs are cut.

    >>> runs = Runs(np.array([0, 100, 200]), np.array([50, 10, 30]), np.array([4, 25, 4]))
    >>> [part.num_bytes.tolist() for part in slices(runs, max_runs=2, max_bytes=10)]
    [[4], [10], [10], [5, 4]]
    """
    runs = cut_long(runs, max_bytes)
    stops = np.cumsum(runs.num_bytes)
    start, num_bytes = 0, 0
    while start < len(runs):
        stop = int(np.searchsorted(stops, num_bytes + max_bytes, side="right"))
        stop = min(stop, start + max_runs)
        yield runs.part(start, stop)
        start, num_bytes = stop, int(stops[stop - 1])


class Agent:
    """For one thread. Each call raises TransportError; callers expect any other exception, too."""

    def __init__(self, name: str, engine_config: str, backend: str = UCX) -> None:
        """``engine_config`` applies to UCX only."""
        nixl = _import_nixl()
        config = nixl.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.pthrDelay = PROGRESS_WAKE_US
        config.syncMode = nixl.NIXL_THREAD_SYNC_NONE
        self.name = name
        self._nixl = nixl
        self._kinds = {"DRAM": nixl.DRAM_SEG, "VRAM": nixl.VRAM_SEG}
        self._errors = tuple(
            named for name, named in vars(nixl).items() if name.startswith("nixl") and name.endswith("Error")
        )
        with _translated("cannot create a NIXL agent"):
            self._agent = nixl.nixlAgent(name, config)
        plugins = ", ".join(sorted(self._agent.getAvailPlugins()))
        with _translated(f"cannot create NIXL's backend {backend} (available plugins: {plugins})"):
            settings = {"engine_config": engine_config} if backend == UCX else {}
            self._backends = [self._agent.createBackend(backend, settings)]

    def register(self, kind: str, table: NDArray[np.uint64]) -> Any:
        descriptors = self._nixl.nixlRegDList(self._kinds[kind], table)
        with _translated("cannot register memory"):
            self._agent.registerMem(descriptors, self._backends)
        return descriptors

    def deregister(self, registered: Any) -> None:
        with _translated("cannot deregister memory"):
            self._agent.deregisterMem(registered, self._backends)

    def metadata(self) -> bytes:
        with _translated("cannot get the agent's metadata"):
            return bytes(self._agent.getLocalMD())

    def add(self, remote: str, metadata: bytes) -> None:
        """Make a remote agent known, and start connecting to it."""
        # NIXL 1.5 keeps a part of metadata that it could not load, and then accepts no card of that agent.
        # Cards have a checksum, so only a forged card causes this, and it affects no other agent.
        if (named := name_in(metadata)) != remote:
            raise TransportError("bad-card", f"the card of {remote!r} has metadata of {named!r}")
        with _translated("cannot add the remote agent"):
            self._agent.loadRemoteMD(metadata)
        try:
            with _translated("cannot connect to the remote agent"):
                self._agent.makeConnection(remote, self._backends)
        except TransportError:
            quietly(self.remove, remote)
            raise

    def remove(self, remote: str) -> None:
        with _translated("cannot remove the remote agent"):
            self._agent.invalidateRemoteMD(remote)

    def prepare(self, pair: SlicePair, remote: str) -> int:
        """Returns a handle; nothing moves yet."""
        dst = self._nixl.nixlXferDList(self._kinds[pair.dst_kind], pair.dst)
        src = self._nixl.nixlXferDList(self._kinds[pair.src_kind], pair.src)
        with _translated("cannot prepare the read"):
            return int(self._agent.createXferReq(self._nixl.NIXL_READ, dst, src, remote, b"", self._backends))

    def post(self, handle: int) -> bool:
        """Start; returns whether it is done already. If it raises, some of it may be under way."""
        with _translated("the read failed when posted"):
            return self._is_done(self._agent.postXferReq(handle, b""))

    def check(self, handle: int) -> bool:
        """Whether it is done; only a TransportError is NIXL's report of a failure."""
        with _translated("the read failed", self._errors):
            return self._is_done(self._agent.getXferStatus(handle))

    def release(self, handle: int) -> None:
        with _translated("cannot release a handle"):
            self._agent.releaseXferReq(handle)

    def _is_done(self, status: Any) -> bool:
        if status == self._nixl.NIXL_SUCCESS:
            return True
        if status == self._nixl.NIXL_IN_PROG:
            return False
        raise TransportError("nixl", str(status))


@contextmanager
def _translated(what: str, kinds: tuple[type[Exception], ...] = (Exception,)) -> Iterator[None]:
    """Translate exceptions of these kinds."""
    try:
        yield
    except TransportError:
        raise
    except kinds as error:
        raise TransportError("nixl", f"{what}: {str(error) or type(error).__name__}") from error


def check_installed() -> None:
    """Raise TransportError, with how to install NIXL, if it cannot be imported."""
    _import_nixl()


@dataclass(frozen=True, slots=True)
class NixlBuild:
    """The build of NIXL in this process."""

    wheel: str
    """Imported package, such as ``nixl_cu12``; NIXL chooses it by the CUDA version."""
    plugins: tuple[str, ...]
    ucx_version: str
    """Of the loaded library; empty until an agent was made."""


def describe_build() -> NixlBuild:
    """Raises TransportError if NIXL cannot be imported."""
    nixl = _import_nixl()
    with _translated("cannot create a NIXL agent"):
        plugins = nixl.nixlAgent("kvferry-build", nixl.nixlAgentConfig()).getAvailPlugins()
    return NixlBuild(nixl.__name__.partition(".")[0], tuple(sorted(plugins)), _loaded_ucx())


def _loaded_ucx() -> str:
    found = re.search(r"/\S*/libucp\S*\.so\S*$", Path("/proc/self/maps").read_text("utf-8"), re.MULTILINE)
    if not found:
        return ""
    version = ctypes.CDLL(found[0]).ucp_get_version_string
    version.restype = ctypes.c_char_p
    return bytes(version()).decode()


def _import_nixl() -> Any:
    try:
        from nixl import _bindings
    except ImportError as error:
        raise TransportError("not-installed", f"NIXL cannot be imported ({error}); {INSTALL}") from error
    return _bindings
