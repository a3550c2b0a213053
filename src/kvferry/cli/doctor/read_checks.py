"""From reads between two processes to diagnoses: which way they took, why no better one, what opens it."""

from __future__ import annotations

from collections.abc import Iterator

from kvferry.cli.doctor.diagnosis import Condition, Diagnosis, Level
from kvferry.cli.doctor.seen import HOST, HostLimits, Observed, ReadsSeen
from kvferry.cli.output import gigabytes_per_second
from kvferry.core.way import Way
from kvferry.transport.settings import EXPOSE_SETTING, WAY_SETTING, Expose, WayChoice
from kvferry.transport.ucx import UCX_TRANSPORTS

SLOW = 1 / 16
"""Of a plain copy's speed: a direct read of host memory that is slower than this says that something is
wrong."""
CMA = "cma"
NO_BACKEND = "NIXL_ERR_BACKEND"


def check_reads(observed: Observed) -> Iterator[Diagnosis]:
    """Every kind of memory that was tried."""
    for reads in observed.reads:
        if reads.wrong:
            yield _wrong_bytes(reads)
        if reads.error:
            yield _failed(reads, observed)
        if _lacks_cma(reads, observed):
            yield _no_cma(reads, observed)
        if reads.way is Way.PACKED and observed.limits.rdma_devices and not _is_one_machine(observed):
            yield _tcp_fallback(reads, observed)
        if (
            reads.memory != HOST
            and reads.way is not None
            and reads.way is not Way.MAPPED
            and _may_map(observed)
        ):
            yield _no_ipc(reads)
        if reads.memory == HOST and reads.way is Way.DIRECT and reads.times and reads.carrier.startswith(CMA):
            yield from _slow(reads)


def _wrong_bytes(reads: ReadsSeen) -> Diagnosis:
    return Diagnosis(
        Condition.WRONG_BYTES,
        Level.PROBLEM,
        f"A read of {reads.memory} memory by {reads.carrier or 'NIXL'} brought wrong bytes: {reads.wrong}.",
        "Caches that are read this way are garbage.",
        "Do not use this link. Report it, with the output of `kvferry doctor --json`.",
    )


def _failed(reads: ReadsSeen, observed: Observed) -> Diagnosis:
    cure = "Check the KVFERRY_ and UCX_ variables of this environment; KVFERRY_DEBUG=1 shows more."
    if NO_BACKEND in reads.error and UCX_TRANSPORTS not in observed.settings:
        cure = (
            f"UCX found no fabric. With an RDMA card, check its port; without one, unset {EXPOSE_SETTING},"
            f" or, for direct reads on one host, set {UCX_TRANSPORTS}=sm,tcp,self."
        )
    elif observed.peer is not None and not observed.peer.is_one_machine:
        cure = (
            "The control channel works. The source's rank listens at two more ports, which the kernel"
            " chooses: let the firewall pass TCP between the two hosts."
        )
    return Diagnosis(
        Condition.READ_FAILED,
        Level.PROBLEM,
        f"{reads.memory.capitalize()} memory of another process could not be read: {reads.error}.",
        "No cache can be moved this way.",
        cure,
    )


def _lacks_cma(reads: ReadsSeen, observed: Observed) -> bool:
    """Whether two processes of one machine are to read host memory by CMA, and cannot."""
    if (
        not observed.uses_fabric
        or reads.memory != HOST
        or reads.way is Way.DIRECT
        or not _is_one_machine(observed)
    ):
        return False
    return bool(reads.cma_error) or (observed.peer is not None and not observed.peer.shares_pids)


def _no_cma(reads: ReadsSeen, observed: Observed) -> Diagnosis:
    cause, cure = _cma_cause(reads, observed)
    return Diagnosis(
        Condition.NO_CMA,
        Level.WARNING,
        f"Two processes of this machine cannot read each other's memory (CMA, process_vm_readv): {cause}.",
        "It is the only way to read host memory of another process without its help.",
        cure,
    )


def _cma_cause(reads: ReadsSeen, observed: Observed) -> tuple[str, str]:
    limits, peer = observed.limits, observed.peer
    if peer is not None and not peer.shares_pids:
        return (
            "they are in different PID namespaces, as in two containers",
            "Run both in one PID namespace: docker --pid=host, or --pid=container:NAME; Kubernetes hostPID:"
            " true, or"
            " shareProcessNamespace: true within a pod.",
        )
    if peer is not None and peer.theirs is not None and peer.theirs.user != peer.ours.user:
        return (
            f"{reads.cma_error}; they run as different users ({peer.ours.user} and {peer.theirs.user})",
            "Run both as one user, or add the capability SYS_PTRACE to the reader.",
        )
    return f"{reads.cma_error}{_guard(limits)}", _guard_cure(limits)


def _guard(limits: HostLimits) -> str:
    if limits.ptrace_scope:
        return f"; kernel.yama.ptrace_scope is {limits.ptrace_scope}"
    return "; a seccomp filter looks at the system calls of this process" if limits.is_filtered else ""


def _guard_cure(limits: HostLimits) -> str:
    if limits.ptrace_scope:
        return "sysctl kernel.yama.ptrace_scope=0, or add the capability SYS_PTRACE to the engines."
    if limits.is_filtered:
        return (
            "Let the filter pass process_vm_readv: docker --cap-add=SYS_PTRACE, or --security-opt"
            " seccomp=unconfined;"
            " Kubernetes capabilities SYS_PTRACE, or seccompProfile Unconfined."
        )
    return (
        "Run both as one user and in one container; the kernel needs CONFIG_CROSS_MEMORY_ATTACH, and"
        " sandboxes such as"
        " gVisor do not have it."
    )


def _tcp_fallback(reads: ReadsSeen, observed: Observed) -> Diagnosis:
    cards = ", ".join(observed.limits.rdma_devices)
    if observed.uses_fabric:
        asked = observed.settings.get(UCX_TRANSPORTS, "")
        cure = (f"{UCX_TRANSPORTS}={asked}: unset it, or add ib to it. " if asked else "") + (
            f"Set {EXPOSE_SETTING}={Expose.FABRIC.value} on both hosts. Check that the card's port is up"
            " (ibv_devinfo: PORT_ACTIVE), and that it leads to the other host."
        )
    else:
        cure = (
            f"{EXPOSE_SETTING}={Expose.FABRIC.value} on both hosts lets NIXL read over RDMA. That is"
            " untested, and opens all memory to that network: read docs/security.md first."
        )
    return Diagnosis(
        Condition.TCP_FALLBACK,
        Level.NOTE,
        f"{reads.memory.capitalize()} memory is sent over TCP, and the machine has {cards}.",
        "RDMA needs no processor time of the source.",
        cure,
    )


def _no_ipc(reads: ReadsSeen) -> Diagnosis:
    return Diagnosis(
        Condition.NO_IPC,
        Level.WARNING,
        f"Memory of {reads.memory} in another process cannot be opened here:"
        f" {reads.reason or 'the transport did not say why'}.",
        "Mapped reads are the fastest; the source's rank now sends the bytes, or NIXL reads them.",
        "Run both processes on one host, with the same devices visible, in one IPC and PID namespace"
        " (docker: --ipc=host"
        " --pid=host), as one user. MIG slices and confidential computing do not support it.",
    )


def _slow(reads: ReadsSeen) -> Iterator[Diagnosis]:
    if reads.bytes_per_second >= SLOW * reads.copy_bytes_per_second:
        return
    ours, plain = (
        gigabytes_per_second(speed / 1e9) for speed in (reads.bytes_per_second, reads.copy_bytes_per_second)
    )
    yield Diagnosis(
        Condition.SLOW_READS,
        Level.WARNING,
        f"Host memory is read by {reads.carrier} at {ours}, and copied within one process at {plain}.",
        "The kernel copies once for such a read: a third of a plain copy's speed is usual.",
        "The machine may be busy: try again when it is idle. On machines of several sockets keep both"
        " engines on one"
        " (numactl --cpunodebind).",
    )


def _may_map(observed: Observed) -> bool:
    """Whether two processes of one machine may read each other mapped, by their settings."""
    is_open = observed.settings.get(EXPOSE_SETTING) != Expose.NOTHING.value
    way = observed.settings.get(WAY_SETTING, WayChoice.AUTO.value)
    return is_open and way in (WayChoice.AUTO.value, WayChoice.MAPPED.value) and _is_one_machine(observed)


def _is_one_machine(observed: Observed) -> bool:
    return observed.peer is None or observed.peer.is_one_machine
