"""The transport over NIXL: one-sided reads of host and CUDA memory, between processes and hosts.

A rank has one NIXL agent, owned by a thread of its own (see ``agent_thread``); a second one is made when a
peer is met that the first cannot read by itself (see ``emulation``).
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

from kvferry.core.cost import Traffic
from kvferry.core.manifest import Region
from kvferry.core.product import Product
from kvferry.core.runs import Runs
from kvferry.core.way import Way
from kvferry.errors import TransportError
from kvferry.log import log_of
from kvferry.transport.agent import FabricAgent
from kvferry.transport.agent_team import AgentTeam
from kvferry.transport.agent_thread import AgentThread
from kvferry.transport.base import Connected, DeviceEvent, ReadEnd
from kvferry.transport.cards import pack_card, unpack_card, with_staging
from kvferry.transport.cuda import Cuda
from kvferry.transport.descriptors import RegionTable, SlicePair
from kvferry.transport.device import MappedReads, RankDevice, device_of
from kvferry.transport.emulation import SETTING, AgentMode, EmulatedReads
from kvferry.transport.expose import SETTING as EXPOSE_SETTING
from kvferry.transport.expose import Expose
from kvferry.transport.gate import Gate
from kvferry.transport.gather_line import GatherLine, GatherMemory
from kvferry.transport.link import Link, Mover
from kvferry.transport.nixl_agent import UCX, Agent, check_installed
from kvferry.transport.packed import PackedMover
from kvferry.transport.packed_rings import HAVE_GATHERED, PackedRings, staging_of, why_hidden
from kvferry.transport.places import Addresses, Places
from kvferry.transport.ring_options import RingOptions
from kvferry.transport.ring_pair import MIXED, rings_for
from kvferry.transport.staging import SETTING as PACKED_SETTING
from kvferry.transport.staging import PackedReads
from kvferry.transport.stream_reader import StreamMover
from kvferry.transport.transfers import Transfers
from kvferry.transport.ucx import UCX_EMULATES, UcxSettings

__all__ = [
    "Agent",
    "NixlTransport",
    "RegionTable",
    "SlicePair",
    "check_installed",
    "pack_card",
    "unpack_card",
]

log = log_of(__name__)

NOT_DIRECT = "the fabric cannot read its memory by itself"
REFUSED = (
    f"it is dead, or no transport of UCX can read its memory without its help, and such reads are disabled"
    f" ({SETTING}, {UCX_EMULATES}). Let UCX use RDMA, CUDA IPC or, within one host and PID namespace, CMA"
    f" (see UCX_TLS), or set {SETTING}={EmulatedReads.CAREFUL.value}"
)


class NixlTransport:
    """Reads over NIXL. Its own calls take a lock or a queue, never the fabric."""

    def __init__(
        self,
        *,
        backend: str = UCX,
        connect_timeout_s: float = 30.0,
        close_timeout_s: float = 30.0,
        settings: UcxSettings | None = None,
        mapped_reads: MappedReads | None = None,
        packed_reads: PackedReads | None = None,
        expose: Expose | None = None,
        rings: RingOptions | None = None,
        make_agent: Callable[[str, str], FabricAgent] | None = None,
    ) -> None:
        """Settings are those of the environment, if none are given; ``make_agent`` is for tests.

        A ``backend`` other than UCX is one of NIXL's plugins; both sides must have the same.
        """
        self._backend = backend
        self._connect_timeout_s, self._close_timeout_s = connect_timeout_s, close_timeout_s
        self._settings = settings or UcxSettings.from_environment(os.environ)
        self._mapped_reads = mapped_reads or MappedReads.from_environment(os.environ)
        self._expose = expose or Expose.from_environment(os.environ)
        self._packed_reads = packed_reads or PackedReads.from_environment(os.environ, self._expose)
        self._packed_reads.check(self._expose)
        self._make_agent = make_agent or partial(Agent, backend=backend)
        self._gate = Gate()
        self._transfers: Transfers[Link | None] = Transfers()
        self._making = threading.Lock()
        """Guards what is made once, and may be slow to make: those below."""
        self._memory: RegionTable | None = None
        self._device: RankDevice | None = None
        self._teams: dict[AgentMode, AgentTeam] = {}
        self._ring_options = rings or RingOptions.from_environment(os.environ)
        self._rings: PackedRings | None = None
        self._lock = threading.Lock()
        self._links: dict[str, Link] = {}

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
                self._device = device_of(memory, self._mapped_reads, is_open=not self._expose.hides_pool)
                pair = rings_for(memory, self._device, self._packed_reads, self._ring_options)
                if pair is None and self._expose.hides_pool:
                    raise TransportError(
                        "bad-device", f"{MIXED}; and {EXPOSE_SETTING} needs ranks that gather"
                    )
                shared = self._ring_options.shared
                self._rings = PackedRings(pair, self._expose, shared) if pair else None
                card_part = self._device.card_part if self._device else b""
                if self._expose is not Expose.NOTHING:
                    first_mode = self._settings.first_mode
                    self._teams[first_mode] = self._make_team(memory, first_mode, card_part)
            except BaseException:
                self._give_memory_up()
                raise
            self._memory = memory

    def _make_team(self, memory: RegionTable, mode: AgentMode, card_part: bytes = b"") -> AgentTeam:
        """Who reads in one mode: several agents, where none needs the source's help."""
        rings = self._rings.table if self._rings else None
        if rings and self._expose.hides_pool:
            memory, rings = rings, None
        make = partial(AgentThread, memory, self._cuda, mode, self._settings, self._make_agent, rings=rings)
        size = self._settings.num_agents if mode is AgentMode.DIRECT else 1
        return AgentTeam(make(export=card_part), size, make)

    def card(self) -> bytes:
        """Agent name and metadata. It carries the keys to what is exposed: whoever has it can read it all."""
        with self._gate:
            self._ours()
            team = self._teams.get(self._settings.first_mode)
            card = team.card if team else pack_card("", b"")
            staging = self._rings.staging if self._rings else b""
            if self._expose.hides_pool and not staging:
                why = f"it hides its pool ({EXPOSE_SETTING}), and nobody gathers for it"
                raise TransportError("not-packed", f"this rank cannot be read: {why}")
            return with_staging(card, staging) if staging else card

    @property
    def is_gathering(self) -> bool:
        """Whether this rank gathers for readers, and may ask others to; known once it is registered."""
        return self._rings is not None

    def gather_memory(self) -> GatherMemory:
        """For whoever gathers for this rank's readers: who copies, and what into."""
        with self._gate:
            self._ours()
            if self._rings is None:
                raise TransportError("not-packed", f"this rank does not gather ({PACKED_SETTING})")
            return self._rings.source

    def gather_at(self, address: str) -> None:
        """From now on readers are told where this rank is asked to gather."""
        if self._rings:
            self._rings.advertise(address)

    def ask_by(self, line: GatherLine) -> None:
        """How other ranks are asked to gather; it is closed with this transport."""
        with self._gate, self._making:
            self._ours()
            if self._rings:
                self._rings.open_mover(line)

    def connect(
        self, peer: str, card: bytes, regions: Sequence[Region], usual: Traffic | None = None
    ) -> Connected:
        """Add a peer, and read a little from it, so that the first real read is as fast as the next."""
        with self._gate:
            self._ours()
            with self._lock:
                self._check_new(peer)
            try:
                link, why_not = self._link(peer, card, regions, usual)
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
        return replace(link.connected, reason=why_not) if why_not else link.connected

    def _link(
        self, peer: str, card: bytes, regions: Sequence[Region], usual: Traffic | None
    ) -> tuple[Link, str]:
        """Whoever can read a peer best, and why nobody better can."""
        deadline = monotonic() + self._connect_timeout_s
        why_not = why_hidden(staging_of(card), self._expose)
        if why_not and not self._rings:
            raise TransportError("hidden-pool", f"{peer}: {why_not}; {HAVE_GATHERED}")
        if self._rings and (why_not or self._packed_reads is PackedReads.REQUIRE):
            team = self._teams.get(self._settings.first_mode)
            return self._rings.link(peer, card, regions, team, deadline), why_not
        if (
            self._rings
            and not self._device
            and usual
            and (quicker := self._rings.quicker_link(peer, card, regions, usual))
        ):
            return quicker, ""
        if self._device:
            try:
                return self._device.connect(peer, card, regions, self._connect_timeout_s), ""
            except TransportError as error:
                if self._mapped_reads is MappedReads.REQUIRE:
                    raise
                why_not = f"its device memory cannot be opened here: {error}"
        link, reason = self._fabric_link(peer, card, regions, deadline)
        if why_not and link.connected.way is not Way.PACKED:
            log.warning("%s is read by the fabric, run by run, which is slow: %s", peer, why_not)
        return link, why_not or reason

    def _fabric_link(
        self, peer: str, card: bytes, regions: Sequence[Region], deadline: float
    ) -> tuple[Link, str]:
        """Whoever can read a peer: the fabric by itself, its rank, or both; and why nobody better."""
        first = self._teams[self._settings.first_mode]
        try:
            return first.connect(peer, card, regions, self._connect_timeout_s), ""
        except TransportError as error:
            if error.code != "not-direct" or self._backend != UCX:
                raise
            not_direct = error
        reason = ""
        if self._rings:
            try:  # at most half of the time: there is another way
                sooner = (deadline + monotonic()) / 2
                return self._rings.link(peer, card, regions, None, sooner), NOT_DIRECT
            except (TransportError, TimeoutError) as error:
                reason = f"{NOT_DIRECT}, nor is there a stream: {str(error) or 'no answer'}"
        if self._settings.emulated_reads is EmulatedReads.REFUSE:
            raise TransportError("not-direct", f"{not_direct.detail}; {REFUSED}") from not_direct
        link = self._careful().connect(peer, card, regions, max(0.0, deadline - monotonic()))
        log.warning("%s cannot be read directly: UCX emulates its reads, and they are slow", peer)
        return link, reason

    def _careful(self) -> AgentTeam:
        """Who reads the peers that can only be read with their own help."""
        with self._making:
            self._gate.check_open()
            if AgentMode.CAREFUL not in self._teams:
                self._teams[AgentMode.CAREFUL] = self._make_team(self._ours(), AgentMode.CAREFUL)
            return self._teams[AgentMode.CAREFUL]

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
                link.read(transfer, Product.of(runs), partial(self._transfers.end, transfer), after, permit)
            except BaseException:
                self._transfers.drop(transfer)
                raise

    def cancel(self, transfer: int) -> None:
        """Post nothing more of a read; what is posted ends as the fabric says."""
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
            link.forget()

    def close(self) -> None:
        """Post nothing more, wait for what is posted, then give memory and peers up."""
        deadline = monotonic() + self._close_timeout_s
        self._gate.shut()
        with self._making:
            movers: list[Mover | PackedMover | StreamMover] = [*self._teams.values()]
            if self._rings:
                movers += self._rings.movers
            if self._device and self._device.copier:
                movers.append(self._device.copier)
        with self._lock:
            self._links.clear()
        for mover in movers:  # all of them hear it before one is waited for
            mover.close(0)
        are_over = [mover.close(max(0.0, deadline - monotonic())) for mover in movers]
        are_over.append(self._gate.wait_until_empty(max(0.0, deadline - monotonic())))
        if not all(are_over):
            raise TransportError(
                "still-under-way",
                f"reads did not end within {self._close_timeout_s:g} s: their memory must stay",
            )
        with self._making:
            self._give_memory_up()

    def _give_memory_up(self) -> None:
        rings, self._rings = self._rings, None
        if rings:
            rings.close()
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


def _spans(
    addresses: Addresses, num_bytes: NDArray[np.int64], which: NDArray[np.bool_]
) -> Iterator[tuple[int, int]]:
    return zip(addresses[which].tolist(), num_bytes[which].tolist(), strict=True)
