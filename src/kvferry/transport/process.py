"""The transport: reads of host and CUDA memory between processes and hosts, by the best way that is open.

=======  ====================================================================================================
mapped   device memory of the same host is opened here, and a kernel of ours copies (``mapped``)
direct   NIXL reads the remote memory by itself, run by run (``agent_team``); only where both ranks are
         registered with it (``KVFERRY_EXPOSE=fabric``)
packed   the remote rank gathers what is asked for and sends it over a stream (``packed``)
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
from kvferry.transport.agent import FabricAgent, RegionTable, SlicePair
from kvferry.transport.agent_team import AgentTeam
from kvferry.transport.agent_thread import AgentThread
from kvferry.transport.base import Connected, DeviceEvent, Gate, Link, OnEnd, ReadEnd, Start, Transfers
from kvferry.transport.cards import Card
from kvferry.transport.copy_kernel import CopyLimits
from kvferry.transport.cuda import Cuda
from kvferry.transport.held import HeldReads
from kvferry.transport.mapped import DeviceCopier, RankDevice, device_of
from kvferry.transport.nixl_agent import UCX, Agent, check_installed
from kvferry.transport.pack import ChunkCopier
from kvferry.transport.packed import CHUNK_BYTES, PackedWay, copiers_for
from kvferry.transport.places import Addresses, Places
from kvferry.transport.settings import EXPOSE_SETTING, WAY_SETTING, Expose, UcxSettings, WayChoice
from kvferry.transport.stream_frames import GatherLine
from kvferry.transport.stream_reader import StreamMover

__all__ = ["Agent", "ProcessTransport", "RegionTable", "SlicePair", "check_installed"]

log = log_of(__name__)

CLOSED_HERE = f"this rank is not registered with NIXL ({EXPOSE_SETTING})"
CLOSED_THERE = f"it is not registered with NIXL ({EXPOSE_SETTING} there)"
MIXED = (
    "some of this rank's memory is the host's, some a device's, and no kernel copies both: set"
    f" {EXPOSE_SETTING}={Expose.FABRIC.value}, so that NIXL reads it"
)


class ProcessTransport:
    """Reads by the best way. Its own calls take a lock or a queue, never the fabric."""

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
        make_agent: Callable[[str, str], FabricAgent] | None = None,
    ) -> None:
        """Way, exposure and settings of UCX are those of the environment, if none are given.

        A ``backend`` other than UCX is one of NIXL's plugins; both sides must have the same. ``chunk_bytes``:
        what is sent at once on the packed way. ``make_agent`` is for tests.
        """
        self._way = way or WayChoice.from_environment(os.environ)
        self._expose = expose or Expose.from_environment(os.environ)
        self._check_way()
        self._backend = backend
        self._connect_timeout_s, self._close_timeout_s = connect_timeout_s, close_timeout_s
        self._chunk_bytes, self._copy_limits = chunk_bytes, copy_limits
        self._ucx = settings
        self._make_agent = make_agent or partial(Agent, backend=backend)
        self._gate = Gate()
        self._transfers: Transfers[Link | None] = Transfers()
        self._making = threading.Lock()
        """Guards what is made once, and may be slow to make: those below."""
        self._memory: RegionTable | None = None
        self._device: RankDevice | None = None
        self._team: AgentTeam | None = None
        self._packed: PackedWay | None = None
        self._held: HeldReads | None = None
        self._lock = threading.Lock()
        self._links: dict[str, Link] = {}

    def _check_way(self) -> None:
        needs = {WayChoice.DIRECT: (Expose.FABRIC,), WayChoice.MAPPED: (Expose.HOST, Expose.FABRIC)}
        if self._expose not in (allowed := needs.get(self._way, tuple(Expose))):
            words = " or ".join(f"{EXPOSE_SETTING}={each.value}" for each in allowed)
            raise TransportError("bad-setting", f"{WAY_SETTING}={self._way.value} needs {words}")

    @property
    def kind(self) -> str:
        """What a peer must have, too."""
        return "nixl" if self._backend == UCX else f"nixl/{self._backend}"

    def register(self, regions: Sequence[Region]) -> None:
        """Make this rank's own memory known, once; who made it keeps it alive until ``close``."""
        with self._gate, self._making:
            if self._memory:
                raise TransportError("registered", "memory is registered once")
            if not regions:
                raise TransportError("no-regions", "a rank has memory")
            memory = RegionTable("ours", regions)
            try:
                is_open = self._expose is not Expose.NOTHING
                self._device = device_of(memory, self._copy_limits, is_open=is_open)
                self._packed = self._make_packed(memory)
                if self._expose is Expose.FABRIC:
                    self._team = self._make_team(memory)
            except BaseException:
                self._give_memory_up()
                raise
            self._memory = memory

    def _make_packed(self, memory: RegionTable) -> PackedWay | None:
        """What every rank has, unless its memory cannot be copied to chunks and NIXL reads it instead."""
        try:
            if self._device and self._device.is_mixed:
                raise TransportError("bad-device", MIXED)
            return PackedWay(copiers_for(memory.places, self._device, self._chunk_bytes))
        except TransportError as error:
            if self._expose is not Expose.FABRIC:
                raise
            log.warning("this rank can be read by NIXL only: %s", error)
            return None

    def _make_team(self, memory: RegionTable) -> AgentTeam:
        """Who reads directly: several agents, which share out long reads."""
        ucx = self._ucx or UcxSettings.from_environment(os.environ)
        make = partial(AgentThread, memory, self._cuda, ucx, self._make_agent)
        return AgentTeam(make(), ucx.num_agents, make)

    def card(self) -> bytes:
        """What readers need, for each way that is open. It carries the keys to what is exposed."""
        with self._gate:
            self._ours()
            card = self._team.card if self._team else Card()
            export = self._device.card_part if self._device else b""
            gather = self._packed.gather_point if self._packed else b""
            return replace(card, export=export, gather=gather).to_bytes()

    @property
    def is_gathering(self) -> bool:
        """Whether this rank sends to readers, and may ask others to; known once it is registered."""
        return self._packed is not None

    def sender(self) -> ChunkCopier:
        with self._gate:
            self._ours()
            if self._packed is None:
                raise TransportError("not-packed", MIXED)
            return self._packed.sender

    def gather_at(self, address: str) -> None:
        """From now on readers are told where this rank is asked for bytes."""
        if self._packed:
            self._packed.advertise(address)

    def ask_by(self, line: GatherLine) -> None:
        """How other ranks are asked for bytes; it is closed with this transport."""
        with self._gate, self._making:
            self._ours()
            if self._packed:
                self._packed.open(line)

    def connect(self, peer: str, card: bytes, regions: Sequence[Region]) -> Connected:
        """Add a peer, by the best way that is open; one that is direct is tried by a little read."""
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
                link.forget()
                raise
        return replace(link.connected, reason=reason) if reason else link.connected

    def _link(self, peer: str, card: Card, regions: Sequence[Region]) -> tuple[Link, str]:
        """Whoever can read a peer best, and why nobody better can."""
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
                    raise _with_reasons(error, reasons) from error
                if error.code != NOT_HERE:
                    reasons.append(f"not {choice.value}: {error.detail}")
                continue
            if reasons and self._device and link.connected.way is not Way.MAPPED:
                log.warning(
                    "%s is read %s, which is slower than mapped: %s", peer, link.connected, reasons[0]
                )
            return link, "; ".join(reasons)
        raise AssertionError("every choice allows a way")

    def _mapped(self, peer: str, card: Card, regions: Sequence[Region]) -> Link:
        if self._device is None or all(region.is_on_host for region in regions):
            raise TransportError(NOT_HERE, f"{peer}: host memory is not mapped")
        return self._device.connect(peer, card, regions, self._connect_timeout_s)

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
        """Check the runs and have them wait for the peer's turn."""
        with self._gate:
            self._ours()
            with self._lock:
                link = self._links.get(peer)
            if link is None:
                raise TransportError("unknown-peer", f"{peer!r} is not connected")
            self._transfers.begin(transfer, link)
            try:
                start = link.prepare(Product.of(runs), after if link.is_ordered else None, permit)
                end = partial(self._transfers.end, transfer)
                if after is None or link.is_ordered:
                    start(transfer, end)
                else:
                    self._hold(transfer, link, start, end, after)
            except BaseException:
                self._transfers.drop(transfer)
                raise

    def _hold(self, transfer: int, link: Link, start: Start, end: OnEnd, after: DeviceEvent) -> None:
        if self._cuda is None:
            raise TransportError("no-device", "no device to wait for: this rank's memory is the host's")
        with self._making:
            self._held = self._held or HeldReads(self._cuda)
        self._held.hold(transfer, link, start, end, after)

    def cancel(self, transfer: int) -> None:
        """Post nothing more of a read; what is posted ends as the fabric says."""
        if self._held and self._held.cancel(transfer):
            return
        if link := self._transfers.find(transfer):
            link.cancel(transfer)

    def clear(self, transfer: int, runs: Runs | Product, *, after: DeviceEvent | None = None) -> None:
        """Fill the destination places of ``runs`` with zeros, on the host or on the device."""
        with self._gate:
            memory, product = self._ours(), Product.of(runs)
            self._transfers.begin(transfer, None)
            end = partial(self._transfers.end, transfer)
            try:
                if self._device and self._device.copier:
                    self._device.copier.clear(product, end, after)
                    return
                self._clear_now(memory, product.runs, after)
            except BaseException:
                self._transfers.drop(transfer)
                raise
            end("")

    def _clear_now(self, memory: RegionTable, runs: Runs, after: DeviceEvent | None) -> None:
        """Without a kernel: span by span, and done on return."""
        memory.places.check(runs.dst, runs.num_bytes)
        addresses = memory.places.addresses(runs.dst)
        on_device = memory.names[Places.split(runs.dst)[0]] == "VRAM"
        if after is not None:
            if self._cuda is None:
                raise TransportError("no-device", "no device to wait for: this rank's memory is the host's")
            with self._cuda.current():  # a graph that another thread captures meanwhile is left alone
                self._cuda.wait_event(after)
        for address, num_bytes in _spans(addresses, runs.num_bytes, ~on_device):
            ctypes.memset(address, 0, num_bytes)
        if self._cuda and on_device.any():
            self._cuda.clear(_spans(addresses, runs.num_bytes, on_device))

    def poll(self) -> list[ReadEnd]:
        """The transfers that ended since the last call."""
        return self._transfers.collect()

    def on_end(self, wake: Callable[[], None]) -> None:
        """Call ``wake`` from an agent's thread whenever a read has ended."""
        self._transfers.wake = wake

    def forget(self, peer: str) -> None:
        """Drop a peer: what is posted ends as the fabric says, what is not ends with an error."""
        with self._lock:
            link = self._links.pop(peer, None)
        if link:
            if self._held:
                self._held.end_all(f"peer {peer!r} was forgotten", link)
            link.forget()

    def close(self) -> None:
        """Post nothing more, wait for what is posted, then give memory and peers up."""
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
        for each in movers:  # all of them hear it before one is waited for
            each.close(0)
        are_over = [self._gate.wait_until_empty(max(0.0, deadline - monotonic()))]
        if self._held:
            self._held.end_all("the transport was closed")
        are_over += [each.close(max(0.0, deadline - monotonic())) for each in movers]
        if not all(are_over):
            raise TransportError(
                "still-under-way",
                f"reads did not end within {self._close_timeout_s:g} s: their memory must stay",
            )
        with self._making:
            self._give_memory_up()

    def _give_memory_up(self) -> None:
        packed, self._packed = self._packed, None
        if packed:
            packed.close()
        held, self._held = self._held, None
        if held:
            held.close()
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
"""The code of a way that this rank, or this peer's memory, does not have: nothing to tell anybody."""
FALL_BACK = (NOT_HERE, "not-direct", "nixl")
"""What leaves the next way to be tried after the direct one; all else is an error of the peer's."""


def _with_reasons(error: TransportError, reasons: Sequence[str]) -> TransportError:
    return TransportError(error.code, "; ".join((error.detail, *reasons)))


def _spans(
    addresses: Addresses, num_bytes: NDArray[np.int64], which: NDArray[np.bool_]
) -> Iterator[tuple[int, int]]:
    return zip(addresses[which].tolist(), num_bytes[which].tolist(), strict=True)
