"""The transport: reads of host and CUDA memory between processes and hosts, in the fastest available mode.

=======  ====================================================================================================
mapped   this process maps device memory of the same host and copies it with a kernel (``mapped``)
direct   NIXL reads the remote memory, run by run (``agent_team``); both ranks need ``KVFERRY_EXPOSE=fabric``
packed   the remote rank gathers the requested bytes and sends them over a stream (``packed``)
=======  ====================================================================================================
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic

import numpy as np
from numpy.typing import NDArray

from kvferry.core.choices import Way
from kvferry.core.manifest import Region
from kvferry.core.product import Product
from kvferry.core.runs import Runs
from kvferry.errors import TransportError
from kvferry.log import log_of
from kvferry.transport.agent_team import AgentTeam, TeamLink
from kvferry.transport.agent_thread import AgentThread
from kvferry.transport.base import Connected, DeviceEvent, ReadEnd
from kvferry.transport.cards import Card
from kvferry.transport.copy_kernel import CopyLimits
from kvferry.transport.cuda import Cuda
from kvferry.transport.mapped import DeviceCopier, EventWait, MappedLink, RankDevice, device_of
from kvferry.transport.nixl_agent import UCX, Agent
from kvferry.transport.packed import CHUNK_BYTES, PackedWay
from kvferry.transport.places import Addresses, Places, RegionTable
from kvferry.transport.reads import Work
from kvferry.transport.settings import EXPOSE_SETTING, WAY_SETTING, Expose, UcxSettings, WayChoice
from kvferry.transport.stream_reader import StreamLink, StreamMover
from kvferry.transport.transfers import Gate, Transfers

log = log_of(__name__)

CLOSED_HERE = f"this rank is not registered with NIXL ({EXPOSE_SETTING})"
CLOSED_THERE = f"it is not registered with NIXL ({EXPOSE_SETTING} there)"
NO_DEVICE = "this rank uses host memory and cannot wait for a device event"
MIXED = (
    "this rank has host and device memory, which packed and mapped reads do not support: set"
    f" {EXPOSE_SETTING}={Expose.FABRIC.value} for direct reads"
)

Link = MappedLink | TeamLink | StreamLink


class ProcessTransport:
    def __init__(
        self,
        *,
        way: WayChoice | None = None,
        expose: Expose | None = None,
        backend: str = UCX,
        connect_timeout_s: float = 30.0,
        close_timeout_s: float = 30.0,
        chunk_bytes: int = CHUNK_BYTES,
        copy_limits: CopyLimits | None = None,
        settings: UcxSettings | None = None,
        make_agent: Callable[[str, str], Agent] | None = None,
    ) -> None:
        """Way, exposure and settings of UCX default to the environment. ``make_agent`` is for tests."""
        self._way = way or WayChoice.from_environment(os.environ)
        self._expose = expose or Expose.from_environment(os.environ)
        self._check_way()
        self._backend = backend
        self._connect_timeout_s, self._close_timeout_s = connect_timeout_s, close_timeout_s
        self._chunk_bytes, self._copy_limits = chunk_bytes, copy_limits
        self._ucx = settings
        self._make_agent = make_agent or partial(Agent, backend=backend)
        self._gate = Gate()
        self._transfers = Transfers()
        self._making = threading.Lock()
        """Guards the following attributes, which are made once, perhaps slowly."""
        self._memory: RegionTable | None = None
        self._device: RankDevice | None = None
        self._team: AgentTeam | None = None
        self._packed: PackedWay | None = None
        self._events: EventWait | None = None
        self._lock = threading.Lock()
        self._links: dict[str, Link] = {}

    def _check_way(self) -> None:
        needs = {WayChoice.DIRECT: (Expose.FABRIC,), WayChoice.MAPPED: (Expose.HOST, Expose.FABRIC)}
        if self._expose not in (allowed := needs.get(self._way, tuple(Expose))):
            words = " or ".join(f"{EXPOSE_SETTING}={each.value}" for each in allowed)
            raise TransportError("bad-setting", f"{WAY_SETTING}={self._way.value} needs {words}")

    @property
    def kind(self) -> str:
        return "nixl" if self._backend == UCX else f"nixl/{self._backend}"

    def register(self, regions: Sequence[Region]) -> None:
        with self._gate, self._making:
            if self._memory:
                raise TransportError("registered", "memory is already registered")
            if not regions:
                raise TransportError("no-regions", "a rank needs at least one memory region")
            memory = RegionTable("ours", regions)
            try:
                is_open = self._expose is not Expose.NOTHING
                self._device = device_of(self._transfers, memory, self._copy_limits, is_open=is_open)
                self._packed = self._make_packed(memory)
                if self._expose is Expose.FABRIC:
                    self._team = self._make_team(memory)
            except BaseException:
                self._give_memory_up()
                raise
            self._memory = memory

    def _make_packed(self, memory: RegionTable) -> PackedWay | None:
        """Raises TransportError if packed reads are impossible, unless NIXL reads the memory instead."""
        try:
            if self._device and self._device.is_mixed:
                raise TransportError("bad-device", MIXED)
            return PackedWay(self._transfers, memory, self._device, self._chunk_bytes)
        except TransportError as error:
            if self._expose is not Expose.FABRIC:
                raise
            log.warning("only direct reads of this rank are possible: %s", error)
            return None

    def _make_team(self, memory: RegionTable) -> AgentTeam:
        ucx = self._ucx or UcxSettings.from_environment(os.environ)
        make = partial(AgentThread, self._transfers, memory, self._cuda, ucx, self._make_agent)
        return AgentTeam(make(), ucx.num_agents, make)

    def card(self) -> bytes:
        with self._gate:
            self._ours()
            card = self._team.card if self._team else Card()
            export = self._device.card_part if self._device else b""
            gather = self._packed.gather_point if self._packed else b""
            return replace(card, export=export, gather=gather).to_bytes()

    @property
    def packed(self) -> PackedWay | None:
        """Sends to readers and requests bytes of other ranks; set by ``register``."""
        return self._packed

    def connect(self, peer: str, card: bytes, regions: Sequence[Region]) -> Connected:
        with self._gate:
            self._ours()
            with self._lock:
                self._check_new(peer)
            try:
                link, reason = self._link(peer, Card.from_bytes(card), regions)
            except TimeoutError:
                seconds = f"{self._connect_timeout_s:g} s"
                raise TransportError("no-connection", f"{peer}: no answer within {seconds}") from None
            try:
                with self._lock:
                    self._check_new(peer)
                    self._links[peer] = link
            except TransportError:
                self._transfers.forget(link.queues)
                raise
        return replace(link.connected, reason=reason) if reason else link.connected

    def _link(self, peer: str, card: Card, regions: Sequence[Region]) -> tuple[Link, str]:
        """The fastest available link, and why faster modes are unavailable."""
        reasons: list[str] = []
        for choice, connect in (
            (WayChoice.MAPPED, self._mapped),
            (WayChoice.DIRECT, self._direct),
            (WayChoice.PACKED, self._sent),
        ):
            if not self._way.allows(choice):
                continue
            try:
                link = connect(peer, card, regions)
            except TransportError as error:
                is_last = choice in (self._way, WayChoice.PACKED)
                if is_last or (choice is WayChoice.DIRECT and error.code not in FALL_BACK):
                    raise TransportError(error.code, "; ".join((error.detail, *reasons))) from error
                if error.code != NOT_HERE:
                    reasons.append(f"not {choice.value}: {error.detail}")
                continue
            if reasons and self._device and link.connected.way is not Way.MAPPED:
                log.warning(
                    "%s is read %s, which is slower than mapped: %s", peer, link.connected, reasons[0]
                )
            return link, "; ".join(reasons)
        raise AssertionError("every choice permits at least one mode")

    def _mapped(self, peer: str, card: Card, regions: Sequence[Region]) -> Link:
        if self._device is None or all(region.is_on_host for region in regions):
            raise TransportError(NOT_HERE, f"{peer}: host memory is not mapped")
        return self._device.connect(peer, card.export, regions)

    def _direct(self, peer: str, card: Card, regions: Sequence[Region]) -> Link:
        if self._team is None:
            raise TransportError(NOT_HERE, CLOSED_HERE)
        if not card.agent:
            raise TransportError("not-direct", CLOSED_THERE)
        return self._team.connect(peer, card, regions, self._connect_timeout_s)

    def _sent(self, peer: str, card: Card, regions: Sequence[Region]) -> Link:
        if self._packed is None:
            raise TransportError("not-packed", MIXED)
        return self._packed.link(peer, card, regions)

    def read(
        self,
        transfer: int,
        peer: str,
        runs: Runs | Product,
        *,
        after: DeviceEvent | None = None,
        permit: bytes = b"",
    ) -> None:
        with self._gate:
            self._ours()
            with self._lock:
                link = self._links.get(peer)
            if link is None:
                raise TransportError("unknown-peer", f"{peer!r} is not connected")
            if after is None or link.is_ordered:
                self._transfers.begin(transfer, link.prepare(Product.of(runs), after, permit))
            else:
                self._hold(transfer, link.prepare(Product.of(runs), None, permit), after)

    def _hold(self, transfer: int, work: Work, after: DeviceEvent) -> None:
        """Begin a read after a device event, unless it ends before."""
        if self._cuda is None:
            raise TransportError("no-device", NO_DEVICE)
        with self._making:
            self._events = self._events or EventWait(self._cuda)
        mark = self._events.follow(after)
        try:
            read = self._transfers.begin(transfer, work, is_held=True)
        except BaseException:
            self._events.submit(mark, lambda _: None)
            raise
        self._events.submit(mark, partial(self._transfers.come, read))

    def cancel(self, transfer: int) -> None:
        self._transfers.cancel(transfer)

    def clear(self, transfer: int, runs: Runs | Product, *, after: DeviceEvent | None = None) -> None:
        with self._gate:
            memory, product = self._ours(), Product.of(runs)
            if self._device and self._device.copier:
                work = self._device.copier.clear(product, after)
                self._transfers.begin(transfer, work, can_cancel=False)
                return
            if after is not None and self._cuda is None:
                raise TransportError("no-device", NO_DEVICE)
            memory.check(product.runs.dst, product.runs.num_bytes)
            clearing, error = self._transfers.begin(transfer, [], is_held=True, can_cancel=False), ""
            try:
                self._clear_now(memory, product.runs, after)
            except TransportError as failure:
                error = str(failure)
            self._transfers.come(clearing, error)

    def _clear_now(self, memory: RegionTable, runs: Runs, after: DeviceEvent | None) -> None:
        """Without a kernel; done on return."""
        addresses = memory.addresses(runs.dst)
        on_device = memory.names[Places.split(runs.dst)[0]] == "VRAM"
        if self._cuda and after is not None:
            with self._cuda.current():  # does not disturb a graph capture of another thread
                self._cuda.wait_event(after)
        for address, num_bytes in _spans(addresses, runs.num_bytes, ~on_device):
            ctypes.memset(address, 0, num_bytes)
        if self._cuda and on_device.any():
            self._cuda.clear(_spans(addresses, runs.num_bytes, on_device))

    def poll(self) -> list[ReadEnd]:
        return self._transfers.collect()

    def on_end(self, wake: Callable[[], None]) -> None:
        self._transfers.wake = wake

    def forget(self, peer: str) -> None:
        with self._lock:
            link = self._links.pop(peer, None)
        if link:
            self._transfers.forget(link.queues)

    def close(self) -> None:
        deadline = monotonic() + self._close_timeout_s
        self._gate.shut()
        with self._making:
            copier = self._device.copier if self._device else None
            mover = self._packed.mover if self._packed else None
            movers: list[AgentTeam | DeviceCopier | StreamMover] = [
                each for each in (self._team, mover, copier) if each
            ]
        with self._lock:
            self._links.clear()
        self._transfers.close()
        for each in movers:  # stop all before waiting for one
            each.close(0)
        are_over = [self._gate.wait_until_empty(max(0.0, deadline - monotonic()))]
        are_over += [each.close(max(0.0, deadline - monotonic())) for each in movers]
        are_over.append(self._transfers.wait_until_ended(max(0.0, deadline - monotonic())))
        if not all(are_over):
            raise TransportError(
                "still-under-way",
                f"reads did not end within {self._close_timeout_s:g} s: keep their memory allocated",
            )
        with self._making:
            self._give_memory_up()

    def _give_memory_up(self) -> None:
        packed, self._packed = self._packed, None
        if packed:
            packed.close()
        events, self._events = self._events, None
        if events:
            events.close()
        device, self._device = self._device, None
        if device:
            device.close()

    @property
    def _cuda(self) -> Cuda | None:
        return self._device.cuda if self._device else None

    def _check_new(self, peer: str) -> None:
        if peer in self._links:
            raise TransportError("known-peer", f"{peer!r} is connected already")

    def _ours(self) -> RegionTable:
        if self._memory is None:
            raise TransportError("not-registered", "register this rank's memory first")
        return self._memory


NOT_HERE = "not-here"
"""The code of a mode that does not apply, which is not worth a log line."""
FALL_BACK = (NOT_HERE, "not-direct", "nixl")
"""After these errors of a direct link, the next mode is tried; all others are errors of the peer."""


def _spans(
    addresses: Addresses, num_bytes: NDArray[np.int64], which: NDArray[np.bool_]
) -> Iterator[tuple[int, int]]:
    return zip(addresses[which].tolist(), num_bytes[which].tolist(), strict=True)
