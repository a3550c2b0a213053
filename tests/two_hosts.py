"""Two network namespaces with a cable between them: what two hosts see of each other, on one machine.

They share processes and memory, as pods of one machine do, so that CMA works between them; loopback is not
the same loopback. Needs root and ``ip``.
"""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x00020000
MS_REC, MS_PRIVATE = 0x4000, 0x40000
HOSTS = (("a", "10.213.77.1"), ("b", "10.213.77.2"))


@dataclass(frozen=True, slots=True)
class Host:
    """A network namespace, by name, and its address on the cable."""

    name: str
    address: str

    def enter(self) -> None:
        """Move this process there, for good; what it starts from now on is there too."""
        file = os.open(f"/run/netns/{self.name}", os.O_RDONLY)
        try:
            _call("setns", file, CLONE_NEWNET)
        finally:
            os.close(file)
        # UCX looks for network devices in /sys, which shows those of whoever mounted it.
        _call("unshare", CLONE_NEWNS)
        _call("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)
        _call("mount", b"sysfs", b"/sys", b"sysfs", 0, None)


def _call(name: str, *args: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*args):
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Made, joined, and taken away again; a test that cannot make them is skipped."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root, and ip")
    one, other = (Host(f"kvferry-{os.getpid()}{letter}", address) for letter, address in HOSTS)
    made: list[Host] = []
    try:
        for host in (one, other):
            try:
                _ip(f"netns add {host.name}")
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
            made.append(host)
        _ip(f"link add cable netns {one.name} type veth peer name cable netns {other.name}")
        for host in made:
            _ip(f"-n {host.name} address add {host.address}/24 dev cable")
            for device in ("lo", "cable"):
                _ip(f"-n {host.name} link set {device} up")
        yield one, other
    finally:
        for host in made:  # the cable goes with its ends
            _ip(f"netns delete {host.name}")


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True)
