"""Known links: what moving costs over each, and where the numbers come from.

``kvferry plan`` estimates a request by them. Machines differ: ``benchmarks/cost.py`` measures another one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from kvferry.core.cost import Cost
from kvferry.core.way import Way
from kvferry.errors import SpecError


class Origin(StrEnum):
    """Where the numbers of a link profile come from."""

    MEASURED = "measured"
    PREDICTED = "predicted"
    """From what others have published; nobody has measured kvferry over such a link."""


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """One kind of link between two ranks.

    >>> link_profile("400Gb").origin.value, link_profile("same-gpu").way.value
    ('predicted', 'mapped')
    """

    name: str
    way: Way
    cost: Cost
    origin: Origin
    source: str
    """On what, and by which command it was measured; or what it was predicted from."""


HOST_CMA = LinkProfile(
    "host-cma",
    Way.DIRECT,
    Cost(seconds_per_read=5e-4, seconds_per_run=1.7e-6, bytes_per_second=9.2e9),
    Origin.MEASURED,
    "two processes, two aarch64 cores, NIXL 1.5.1 (benchmarks/cost.py cma): 23 of 23 sizes within 30 %",
)
TCP_STREAM = LinkProfile(
    "tcp-stream",
    Way.PACKED,
    Cost(seconds_per_read=1.2e-3, seconds_per_run=3e-7, bytes_per_second=2.7e9),
    Origin.MEASURED,
    "two processes, two aarch64 cores, loopback (benchmarks/cost.py stream): 22 of 23 sizes within 30 %",
)
SAME_GPU = LinkProfile(
    "same-gpu",
    Way.MAPPED,
    Cost(seconds_per_read=9.5e-5, seconds_per_run=1.7e-10, bytes_per_second=8.3e11, is_by_words=True),
    Origin.MEASURED,
    "two processes of one H200, the copy kernel with its default limits (benchmarks/device.py): 8 of 8 reads"
    " within 19 %",
)
SAME_GPU_DIRECT = LinkProfile(
    "same-gpu-direct",
    Way.DIRECT,
    Cost(seconds_per_read=7e-4, seconds_per_run=3.1e-6, bytes_per_second=4.5e11),
    Origin.MEASURED,
    "two processes of one H200, NIXL 1.5.1 over CUDA IPC, 4 agents (benchmarks/device.py): 5 of 5 reads"
    " within 10 %",
)
NVLINK = LinkProfile(
    "nvlink",
    Way.MAPPED,
    Cost(seconds_per_read=9.5e-5, seconds_per_run=1.7e-10, bytes_per_second=3e11, is_by_words=True),
    Origin.PREDICTED,
    "the kernel's costs on one H200, at the 200 to 390 GB/s that others have published between two GPUs",
)
RDMA_400 = LinkProfile(
    "400Gb",
    Way.DIRECT,
    Cost(seconds_per_read=1e-4, seconds_per_run=1.5e-6, bytes_per_second=4.5e10),
    Origin.PREDICTED,
    "nine tenths of the line rate, and as much per run as gives the 18 % of it that a published deployment"
    " reaches with runs of 16 KiB",
)

LINK_PROFILES = (
    HOST_CMA,
    TCP_STREAM,
    SAME_GPU,
    SAME_GPU_DIRECT,
    NVLINK,
    RDMA_400,
)
"""Those that two engines can have between them."""


def link_profile(name: str) -> LinkProfile:
    """The link profile of a name."""
    for profile in LINK_PROFILES:
        if profile.name == name:
            return profile
    known = ", ".join(profile.name for profile in LINK_PROFILES)
    raise SpecError(f"there is no link profile {name!r}; there are {known}")
