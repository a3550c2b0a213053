"""Who can take part on this machine, and why others cannot."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from kvferry.cli.bench.grid import Medium
from kvferry.cli.bench.machine import describe_machine, package_versions
from kvferry.cli.bench.report import BenchReport, NotRun
from kvferry.cli.bench.rivals import NIXL_RIVALS, Rival
from kvferry.cli.measured_link import MeasuredCosts
from kvferry.errors import SpecError, TransportError
from kvferry.transport.cuda import device_names
from kvferry.transport.nixl import check_installed

HOST, DEVICE = "host", "cuda:"
FIRST_DEVICE = "cuda:0"
NO_DEVICE = "this machine has no CUDA device that kvferry can use"


def no_nixl() -> str:
    """Why NIXL cannot be used; empty if it can."""
    try:
        check_installed()
    except TransportError as error:
        return error.detail
    return ""


def new_report(predicted_by: MeasuredCosts | None = None) -> BenchReport:
    """A report that says where it was made."""
    return BenchReport(describe_machine(", ".join(_devices())), package_versions(), predicted_by or {})


def asked_media(asked: Sequence[str], fabrics: Sequence[str], report: BenchReport) -> list[Medium]:
    """The kinds of memory to run; those that nobody asked for by name, and that are not there, are noted."""
    media: list[Medium] = []
    hosts = [Medium.host(over) for over in fabrics]
    if not asked:
        asked = (HOST, FIRST_DEVICE) if _devices() else (HOST,)
        if not _devices():
            report.not_run.append(NotRun(FIRST_DEVICE, "", NO_DEVICE))
    for name in dict.fromkeys(asked):
        if name == HOST:
            media += hosts
        else:
            media.append(_device(name))
    if why := no_nixl():
        report.not_run += [NotRun(medium.name, "", why) for medium in media if medium.uses_nixl]
        media = [medium for medium in media if not medium.uses_nixl]
    return media


def _device(name: str) -> Medium:
    index = name.removeprefix(DEVICE)
    if not name.startswith(DEVICE) or not index.isdecimal():
        raise SpecError(f"--memory {name}: say {HOST}, or {DEVICE}N for a GPU")
    names = _devices()
    if not names:
        raise SpecError(f"--memory {name}: {NO_DEVICE}")
    if int(index) >= len(names):
        raise SpecError(f"--memory {name}: the last device is {DEVICE}{len(names) - 1}")
    return Medium(f"{DEVICE}{int(index)}", f"{DEVICE}{int(index)}")


def asked_rivals(medium: Medium, asked: Sequence[str], report: BenchReport) -> list[Rival]:
    """Who takes part; for those who cannot, the report says why."""
    for name in asked:
        if name not in [rival.value for rival in Rival]:
            raise SpecError(f"--only {name}: say one of {', '.join(Rival)}")
    rivals = []
    for rival in [rival for rival in Rival if not asked or rival.value in asked]:
        if why := _why_not(rival, medium):
            report.not_run.append(NotRun(medium.name, rival.value, why))
        else:
            rivals.append(rival)
    return rivals


def _why_not(rival: Rival, medium: Medium) -> str:
    """Why a rival cannot take part, as far as that is known before it is tried."""
    if rival is Rival.MAPPED and medium.device == "cpu":
        return "host memory is not mapped, device memory is"
    if rival in NIXL_RIVALS and not medium.uses_nixl:
        return "kvferry does not let NIXL use TCP"
    if rival is Rival.VLLM and find_spec("vllm") is None:
        return "vLLM is not installed in this environment"
    if rival is Rival.VLLM and (why := no_nixl()):
        return why
    return ""


def _devices() -> list[str]:
    try:
        return device_names()
    except TransportError:
        return []
