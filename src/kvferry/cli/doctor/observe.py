"""Looks at this process and its machine. Nothing is judged here, and nothing is measured."""

from __future__ import annotations

import ctypes
import logging
import os
import resource
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from kvferry.cli.doctor.seen import Gpus, HostLimits, HostPlace, SecretSeen
from kvferry.cli.machine import package_versions
from kvferry.endpoint.invitation import BOOT_ID
from kvferry.endpoint.secret_source import SECRET, SECRET_FILE, secret_from_environment
from kvferry.errors import SpecError, TransportError
from kvferry.transport.cuda import device_names
from kvferry.transport.nixl import NixlTransport, check_installed
from kvferry.transport.settings import UCX_ALL, Expose, UcxSettings, WayChoice
from kvferry.wire.secret import Purpose, Secret

SETTINGS = (
    UCX_ALL,
    "NIXL_",
    "KVFERRY_",
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
)
CAP_IPC_LOCK = 14
RDMA_DEVICES, RDMA_DOORS = Path("/sys/class/infiniband"), Path("/dev/infiniband")
NAME_BYTES = 128
FINGERPRINT_BYTES = 4
LOOPBACK = "127.0.0.1"
ANY_HOST = ("192.0.2.1", 9)
"""Of the block for documentation: nothing is sent there. The kernel chooses our address by it."""


def nixl_error() -> str:
    """Why NIXL cannot be imported; empty if it can."""
    try:
        check_installed()
    except TransportError as error:
        return str(error.__cause__ or error.detail)
    return ""


def gpus() -> Gpus:
    """Devices by the driver itself, so that a missing binding is noticed."""
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
    names = tuple(_device_name(driver, i) for i in range(number.value))
    try:
        device_names()
    except TransportError as error:
        return Gpus(cuda, names, error.detail)
    return Gpus(cuda, names)


def _device_name(driver: ctypes.CDLL, index: int) -> str:
    device, name = ctypes.c_int(), ctypes.create_string_buffer(NAME_BYTES)
    if driver.cuDeviceGet(ctypes.byref(device), index) or driver.cuDeviceGetName(name, NAME_BYTES, device):
        return f"device {index}"
    return name.value.decode(errors="replace")


def host_limits() -> HostLimits:
    """What the system lets this process do."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    status = _status()
    return HostLimits(
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        memlock_bytes=None if soft == resource.RLIM_INFINITY else soft,
        may_lock_all=bool(int(status.get("CapEff", "0"), 16) >> CAP_IPC_LOCK & 1),
        ptrace_scope=_ptrace_scope(),
        is_filtered=status.get("Seccomp", "0") not in ("0", ""),
        rdma_devices=tuple(sorted(path.name for path in _inside(RDMA_DEVICES))),
        may_open_rdma=any(
            os.access(path, os.R_OK | os.W_OK)
            for path in _inside(RDMA_DOORS)
            if path.name.startswith("uverbs")
        ),
    )


def _status() -> dict[str, str]:
    lines = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace").splitlines()
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _ptrace_scope() -> int | None:
    try:
        return int(Path("/proc/sys/kernel/yama/ptrace_scope").read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _inside(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that are read by those who take part, but for the secret itself."""
    return {
        name: value for name, value in sorted(environ.items()) if name.startswith(SETTINGS) and name != SECRET
    }


def setting_errors(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Why kvferry refuses some of them."""
    found = []
    for read in (WayChoice.from_environment, Expose.from_environment, _check_together):
        try:
            read(environ)
        except TransportError as error:
            found.append(error.detail)
    return tuple(dict.fromkeys(found))


def _check_together(environ: Mapping[str, str]) -> None:
    """Raise TransportError if the ways need what is not exposed, or UCX's settings are refused."""
    expose = Expose.from_environment(environ)
    NixlTransport(way=WayChoice.from_environment(environ), expose=expose).close()
    if expose is Expose.FABRIC:
        UcxSettings.from_environment(environ)


def secret(environ: Mapping[str, str]) -> tuple[SecretSeen, Secret | None]:
    """The secret that the environment names, and what may be shown of it."""
    path = environ.get(SECRET_FILE, "")
    origin = f"the file {path}" if path else SECRET if environ.get(SECRET) else ""
    try:
        with _quiet():
            found = secret_from_environment(environ)
    except SpecError as error:
        return SecretSeen(origin, str(error)), None
    if found is None:
        return SecretSeen(), None
    is_open = bool(path) and bool(os.stat(path).st_mode & 0o004)
    return SecretSeen(origin, "", is_open, found.key(Purpose.FINGERPRINT)[:FINGERPRINT_BYTES].hex()), found


@contextmanager
def _quiet() -> Iterator[None]:
    """What is logged here is a diagnosis of ours, too."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def host_place() -> HostPlace:
    """Where this process is."""
    return HostPlace(
        socket.gethostname(), _text(BOOT_ID), _namespace("pid"), os.geteuid(), package_versions()
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


def own_address() -> str:
    """The address by which other hosts reach this one; loopback if it has no network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            asking.connect(ANY_HOST)
        except OSError:
            return LOOPBACK
        return str(asking.getsockname()[0])
