"""Two doctors in two network namespaces and two PID namespaces: as two containers, or two hosts, are."""

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from tests.cli.test_doctor import AUTO, IS_ROOT, examine, listening, secret_file

pytest.importorskip("nixl", exc_type=ImportError)

__all__ = ["secret_file"]

THERE, HERE = "10.213.77.1", "10.213.77.2"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=60)


@pytest.fixture
def namespaces() -> Iterator[tuple[str, str]]:
    """Two network namespaces with a cable between them."""
    if not IS_ROOT or not shutil.which("ip") or not shutil.which("unshare"):
        pytest.skip("network namespaces need root, ip and unshare")
    names = [f"kvferry-{os.getpid()}-{end}" for end in ("a", "b")]
    made = []
    try:
        for name in names:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespace can be made: {error.stderr.decode().strip()}")
            made.append(name)
        there, here = names
        ip("link", "add", "kvf0", "netns", there, "type", "veth", "peer", "name", "kvf0", "netns", here)
        for name, address in ((there, THERE), (here, HERE)):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "kvf0")
            for device in ("lo", "kvf0"):
                ip("-n", name, "link", "set", device, "up")
        yield there, here
    finally:
        for name in made:
            ip("netns", "del", name)


def inside(name: str) -> tuple[str, ...]:
    return ("ip", "netns", "exec", name)


def test_two_containers_are_sent_the_bytes_and_direct_ones_are_told_why(namespaces, secret_file):
    there, here = namespaces
    secret = {"KVFERRY_SECRET_FILE": str(secret_file("one"))}
    env = {**secret, **AUTO}
    own_pids = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    with listening(f"{THERE}:7777", before=(*inside(there), *own_pids), **env) as (_, address, _):
        plain = examine("--peer", address, before=inside(here), **secret)
        examined = examine("--peer", address, before=inside(here), **env)
    assert (plain.code, plain.host["way"]) == (0, "packed")
    assert "no-cma" not in plain.names
    assert examined.code == 0, examined.report["findings"]
    assert examined.host["way"] == "packed"
    assert examined.host["bytes_per_second"] > 0
    assert "different PID namespaces" in examined.found("no-cma")["what"]
    assert "--pid=host" in examined.found("no-cma")["cure"]


def test_nobody_listens_there(namespaces):
    examined = examine("--peer", f"{THERE}:7778", before=inside(namespaces[1]))
    assert examined.code == 1
    assert "Connection refused" in examined.found("unreachable")["what"]
