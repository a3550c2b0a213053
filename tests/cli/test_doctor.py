"""`kvferry doctor` on this very machine: as it is, with faults planted in it, and between two doctors."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvferry.channel.zmq import Channel, Received
from kvferry.cli.doctor import peer
from kvferry.cli.doctor.observe import secret as seen_secret
from kvferry.cli.doctor.observe import setting_errors, settings
from kvferry.cli.doctor.sockets import own_address
from kvferry.cli.link_profile import measured_links
from kvferry.cli.processes import FABRICS
from kvferry.cli.reads import DEVICE_SIZES, vm_error
from kvferry.endpoint.secret_source import SECRET, SECRET_FILE, secret_from_file

pytest.importorskip("nixl", exc_type=ImportError)

DOCTOR = (sys.executable, "-m", "kvferry", "doctor")
WITHOUT_CMA = (sys.executable, str(Path(__file__).with_name("without_cma.py")))
PAGE = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
LONG = 300
IS_ROOT = os.geteuid() == 0


def environment(**changes: str) -> dict[str, str]:
    """This process's, without what would decide how reads go."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("UCX_", "NIXL_", "KVFERRY_"))
    }
    return {**kept, **changes}


@dataclass(frozen=True)
class Examined:
    code: int
    report: dict[str, Any]

    def found(self, name: str) -> dict[str, str]:
        (one,) = (each for each in self.report["findings"] if each["name"] == name)
        return dict(one)

    @property
    def names(self) -> set[str]:
        return {each["name"] for each in self.report["findings"]}

    @property
    def host(self) -> dict[str, Any]:
        (reads,) = (each for each in self.report["reads"] if each["memory"] == "host")
        return dict(reads)


def examine(*argv: object, before: tuple[str, ...] = (), **changes: str) -> Examined:
    command = [*before, *DOCTOR, "--json", "--memory", "host", *map(str, argv)]
    done = subprocess.run(
        command, env=environment(**changes), capture_output=True, text=True, timeout=LONG, check=False
    )
    assert done.returncode in (0, 1), done.stderr
    assert "the load average was" in done.stderr or not done.stderr  # other tests may run beside this one
    return Examined(done.returncode, json.loads(done.stdout))


@cache
def without_memlock() -> tuple[str, ...]:
    """A command before a command: little memory may be locked, whoever asks."""
    lowered = ("prlimit", "--memlock=65536:65536")
    capable = ("setpriv", "--bounding-set=-ipc_lock", "--inh-caps=-ipc_lock") if IS_ROOT else ()
    if missing := [name for name in (lowered[0], *capable[:1]) if not shutil.which(name)]:
        pytest.skip(f"there is no {missing[0]} here")
    return (*lowered, *capable)


def has_cma() -> bool:
    child = subprocess.Popen(["sleep", "60"])
    try:
        return not vm_error(child.pid, 0).startswith(("Operation not permitted", "Function not implemented"))
    finally:
        child.kill()
        child.wait()


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """This machine as it is, and the profile that was saved of it."""
    path = tmp_path_factory.mktemp("doctor") / "here.json"
    return examine("--save", path), path


def test_this_machine(here):
    examined, profile = here
    assert examined.code == 0
    assert examined.report["verdict"] == "ready"
    assert examined.report["software"]["ucx_version"] == ""  # NIXL is not used
    assert examined.found("no-secret")["level"] == "note"
    host = examined.host
    assert len(host["times"]) >= 3
    assert host["copy_bytes_per_second"] > host["bytes_per_second"] / 4 > 0
    assert host["way"] == "packed"
    (link,) = measured_links(profile)
    assert link.way == host["way"]


def test_every_key_of_the_json_is_on_the_page(here):
    report = here[0].report
    keys = {
        *report,
        *report["findings"][0],
        *report["software"],
        *report["reads"][0],
        *report["reads"][0]["times"][0],
        *report["listeners"][0],
    }
    keys |= {key for name in ("gpus", "limits", "secret") for key in report[name]}
    assert [key for key in sorted(keys) if f"`{key}`" not in PAGE] == []


def test_a_wheel_for_another_cuda_is_found(tmp_path):
    """NIXL itself is told by a torch that it runs beside CUDA 99."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").touch()
    (tmp_path / "torch" / "version.py").write_text('cuda = "99.0"\n')
    path = os.pathsep.join([str(tmp_path), *sys.path])
    examined = examine(PYTHONPATH=path, KVFERRY_EXPOSE="fabric")
    assert examined.code == 1
    found = examined.found("wrong-wheel")
    assert found["level"] == "problem"
    assert "CUDA 99" in found["what"]
    assert "pip install --no-deps nixl-cu99" in found["cure"]


DIRECT = FABRICS["cma"]
AUTO = {name: value for name, value in DIRECT.items() if name != "KVFERRY_WAY"}


def test_direct_reads_and_what_they_open():
    if not has_cma():
        pytest.skip("processes of this host cannot read each other's memory")
    examined = examine(before=(), **AUTO)
    assert examined.code == 0
    assert examined.host["way"] == "direct"
    software = examined.report["software"]
    assert software["wheel"].startswith("nixl_")
    assert "UCX" in software["plugins"]
    assert software["ucx_version"].count(".") == 2
    ucx = [each for each in examined.report["listeners"] if each["purpose"] == "ucx"]
    assert ucx
    for each in ucx:
        assert each["address"].startswith("127.0.0.1:")
        assert each["reach"] == "processes of this host"
        assert "read and write all memory" in each["meaning"]


def test_every_socket_of_an_engine_is_listed(here, secret_file):
    """Without a secret at loopback; with one where other hosts connect, encrypted."""
    alone = here[0].report["listeners"]
    assert [each["purpose"] for each in alone] == ["authority", "rank", "stream", "status"]
    assert len({each["address"] for each in alone}) == 4
    for each in alone[:3]:
        assert each["address"].startswith("127.0.0.1:")
        assert each["reach"] == "processes of this host"
    assert alone[3]["reach"] == "this user and root, on this host"
    shared = examine(KVFERRY_SECRET_FILE=str(secret_file("one"))).report["listeners"]
    assert [each["purpose"] for each in shared] == ["authority", "rank", "stream", "status"]
    assert all("ncrypted" in each["meaning"] for each in shared[:3])
    (host,) = {each["address"].rpartition(":")[0] for each in shared[:3]}
    assert host == own_address()


def test_missing_cma_is_found():
    examined = examine(before=WITHOUT_CMA, **AUTO)
    assert examined.code == 0
    assert examined.host["way"] == "packed"
    assert examined.host["cma_error"] == "Operation not permitted"
    found = examined.found("no-cma")
    assert "Operation not permitted" in found["what"]
    assert "--cap-add=SYS_PTRACE" in found["cure"]


def test_a_fabric_that_is_not_there_is_found():
    if Path("/sys/class/infiniband").exists():
        pytest.skip("this machine may have an RDMA card")
    examined = examine(KVFERRY_EXPOSE="fabric")
    assert examined.code == 1
    assert "unset KVFERRY_EXPOSE" in examined.found("read-failed")["cure"]
    assert examined.report["listeners"] == []
    assert "NIXL_ERR_BACKEND" in examined.report["listeners_error"]


def test_low_memlock_is_found():
    found = examine(before=without_memlock()).found("low-memlock")
    assert "64 KiB" in found["what"]
    assert "LimitMEMLOCK=infinity" in found["cure"]


def test_a_setting_that_is_refused_is_named():
    first, second = setting_errors({"KVFERRY_WAY": "fast", "KVFERRY_EXPOSE": "all"})
    assert "KVFERRY_WAY='fast'" in first
    assert "KVFERRY_EXPOSE='all'" in second
    (together,) = setting_errors({"KVFERRY_WAY": "direct"})
    assert together == "KVFERRY_WAY=direct needs KVFERRY_EXPOSE=fabric"
    wide = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "eth0"}
    assert setting_errors(wide) == ()
    (wide_error,) = setting_errors({**wide, "KVFERRY_EXPOSE": "fabric"})
    assert "UCX_NET_DEVICES='eth0'" in wide_error


@pytest.mark.parametrize("mode", [0o644, 0o600])
def test_who_can_read_the_secret(caplog, secret_file, mode):
    path = secret_file("one", mode)
    seen, secret = seen_secret({SECRET_FILE: str(path)})
    assert secret is not None
    assert seen.is_open == (mode == 0o644)
    assert len(seen.fingerprint) == 8
    assert path.read_text().strip() not in str(seen)
    assert caplog.text == ""


@pytest.mark.parametrize("text", ["", "open sesame", "a" * 40])
def test_a_bad_secret_is_found_and_not_shown(tmp_path, text):
    path = tmp_path / "secret"
    path.write_text(text)
    seen, secret = seen_secret({SECRET_FILE: str(path)})
    assert secret is None
    assert "a secret must be random" in seen.error
    assert not text or text not in str(seen)


def test_the_secret_is_no_setting():
    assert settings({SECRET: "hush", SECRET_FILE: "/a/file", "UCX_TLS": "tcp", "HOME": "/"}) == {
        SECRET_FILE: "/a/file",
        "UCX_TLS": "tcp",
    }


@pytest.fixture
def secret_file(tmp_path):
    def make(name: str, mode: int = 0o600) -> Path:
        path = tmp_path / name
        argv = [sys.executable, "-m", "kvferry", "keygen", "-o", str(path)]
        subprocess.run(argv, check=True, timeout=LONG)
        path.chmod(mode)
        return path

    return make


@contextlib.contextmanager
def listening(address: str, before: tuple[str, ...] = (), **changes: str):
    """A doctor that listens; where, and what its first line says of its secret."""
    process = subprocess.Popen(
        [*before, *DOCTOR, "--memory", "host", "--listen", address],
        env=environment(**changes),
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        first, second = process.stderr.readline(), process.stderr.readline()
        assert "listening on " in second, first + second + process.stderr.read()
        yield process, second.split("listening on ")[1].split(";")[0], first
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def test_two_doctors_with_one_secret_and_with_two(secret_file):
    ours, other = secret_file("ours"), secret_file("other")
    with listening("127.0.0.1:0", KVFERRY_SECRET_FILE=str(ours)) as (process, address, first):
        send_junk(f"tcp://{address}", ours)
        examined = examine("--peer", address, KVFERRY_SECRET_FILE=str(ours))
        assert examined.code == 0
        assert examined.report["peer"]["address"] == address
        assert examined.host["way"] == "packed"
        assert examined.report["secret"]["fingerprint"] in first
        for file in (str(other), ""):
            stranger = examine("--peer", address, KVFERRY_SECRET_FILE=file)
            assert stranger.code == 1
            found = stranger.found("wrong-secret")
            assert (stranger.report["secret"]["fingerprint"] or "no secret is set here") in found["what"]
            assert "Compare the fingerprints" in found["cure"]
            assert stranger.report["reads"] == []
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONG) == 0


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"], ids=["silent", "http"])
def test_another_program_does_not_have_a_wrong_secret(monkeypatch, answer):
    monkeypatch.setattr(peer, "CONNECT_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as threads:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        called = threads.submit(peer.call, address, None)
        with server.accept()[0] as caller:
            caller.sendall(answer)
            seen, _ = called.result()
    assert (seen.is_connected, seen.answer_error) == (True, "it is another program, or suspended")


def send_junk(address: str, secret: Path) -> None:
    """Somebody of the fleet who is no doctor: answered, and nothing happens."""
    channel = Channel(secret=secret_from_file(secret))
    try:
        for data in (b"", b"{", b"[]", b'{"message": "kvferry doctor asks", "format": 1, "host": 7}'):
            channel.send(address, data)
        num_answers = 0
        while num_answers < 4:
            num_answers += sum(isinstance(news, Received) for news in channel.wait(1))
    finally:
        channel.close()


def test_an_open_door_needs_a_secret(cli, monkeypatch):
    for name in (SECRET, SECRET_FILE):
        monkeypatch.delenv(name, raising=False)
    ran = cli("doctor", "--memory", "host", "--listen", "0.0.0.0:0")
    assert ran.code == 2
    assert "needs a secret: set KVFERRY_SECRET_FILE" in ran.err


@pytest.mark.parametrize(
    "argv",
    [
        ["--memory", "cuda:99"],
        ["--peer", "somewhere"],
        ["--listen", "127.0.0.1:0", "--peer", "127.0.0.1:1"],
        ["--save", "profile.txt"],
        ["--save", "/no/such/folder/profile.json"],
    ],
)
def test_bad_usage_is_told_before_any_work(cli, argv):
    ran = cli("doctor", *argv)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("kvferry: ")


def test_scattered_runs_leave_nothing_to_merge():
    """Runs that are scattered stay what they are; those in a row are one."""
    for size in DEVICE_SIZES:
        assert len(size.product().runs) == size.num_runs
