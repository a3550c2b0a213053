"""Device memory for readers on the same host: the source exports it, the reader opens it.

A region of device memory lies in one allocation of the driver or, in virtual memory (vLLM's sleep mode,
torch's expandable segments), in several pieces. A plain allocation is exported by a handle in the card, a
piece of virtual memory by a file descriptor over a local socket. If neither works, the card says why.

A reader opens the memory, checks its size, and reads a secret probe that the source stored beside it: the
driver's attributes do not prove access.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from time import monotonic

from kvferry.core.manifest import Region
from kvferry.errors import TransportError
from kvferry.host.this_user import UserServer
from kvferry.transport.cuda import Allocation, Cuda, visible_devices

TOKEN_BYTES = 32
MAX_AT_ONCE = 250
"""Descriptors in one message; the kernel takes 253."""
ANSWER_SECONDS = 5.0


class DescriptorServer:
    """Sends file descriptors over an abstract socket to processes of this user that know the token."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._descriptors = list(descriptors)
        self._secret = secrets.token_bytes(TOKEN_BYTES)
        self.name, self.token = f"kvferry-{secrets.token_hex(16)}", self._secret.hex()
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listening.bind(f"\0{self.name}")
        listening.listen()
        self._server = UserServer(listening, self._answer, name="kvferry-descriptors", seconds=ANSWER_SECONDS)

    def _answer(self, caller: socket.socket) -> None:
        shown = caller.recv(TOKEN_BYTES, socket.MSG_WAITALL)
        if not hmac.compare_digest(shown, self._secret):
            raise PermissionError("its token is wrong")
        for at in range(0, len(self._descriptors), MAX_AT_ONCE):
            socket.send_fds(caller, [b"."], self._descriptors[at : at + MAX_AT_ONCE])

    def close(self) -> None:
        """The descriptors stay open."""
        self._server.close()


def receive_descriptors(name: str, token: str, number: int) -> list[int]:
    """So many descriptors, which the caller closes; raises TransportError otherwise."""
    received: list[int] = []
    deadline = monotonic() + ANSWER_SECONDS
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
            caller.settimeout(ANSWER_SECONDS)
            caller.connect(f"\0{name}")
            caller.sendall(bytes.fromhex(token))
            while len(received) < number:
                caller.settimeout(max(1e-3, deadline - monotonic()))
                descriptors = socket.recv_fds(caller, 1, MAX_AT_ONCE)[1]
                received += descriptors
                for descriptor in descriptors:  # a child process would keep the source's memory
                    os.set_inheritable(descriptor, False)
                if not descriptors:  # the end, or bytes without descriptors
                    break
        if len(received) == number:
            return received
        reason = f"{len(received)} of {number} descriptors received"
    except (OSError, ValueError) as error:
        reason = str(error)
    for descriptor in received:
        socket.close(descriptor)
    raise TransportError("no-descriptors", f"the source's memory cannot be opened: {reason}")


PROBE_BYTES = 64
MAX_EXPORT_BYTES = 1 << 20
MAX_NUMBER = (1 << 63) - 1
"""The largest size or address that the driver takes."""


@dataclass(frozen=True, slots=True)
class ExportedPiece:
    """One allocation of the source, or one piece of its virtual memory."""

    num_bytes: int
    handle: str = ""
    """In hexadecimal digits; empty for virtual memory, which has a descriptor."""


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a region lies: pieces side by side, and its offset from the first."""

    first_piece: int
    num_pieces: int
    offset: int
    address: int
    """In the source; must equal the manifest's."""


@dataclass(frozen=True, slots=True)
class Export:
    device: str
    """The device's UUID: its index may differ from process to process."""
    pieces: tuple[ExportedPiece, ...] = ()
    extents: tuple[Extent, ...] = ()
    """One for each region, in their order, and one for the probe."""
    probe: str = ""
    """The secret content of the last extent."""
    socket: str = ""
    """Of the ``DescriptorServer``; empty without virtual memory."""
    token: str = ""
    refusal: str = ""
    """Why this memory cannot be exported; empty if it can."""

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Export:
        """Raises TransportError unless it is an export."""
        if not data:
            detail = "it exports no device memory (KVFERRY_EXPOSE=nothing, or it uses host memory)"
            raise TransportError("no-export", detail)
        try:
            if len(data) > MAX_EXPORT_BYTES:
                raise ValueError(f"{len(data)} bytes")
            fields = json.loads(data)
            pieces = tuple(
                ExportedPiece(_number(p["num_bytes"]), str(p["handle"])) for p in fields.pop("pieces")
            )
            extents = tuple(
                Extent(*(_number(e[name]) for name in ("first_piece", "num_pieces", "offset", "address")))
                for e in fields.pop("extents")
            )
            texts = {name: str(fields[name]) for name in ("device", "probe", "socket", "token", "refusal")}
            return cls(pieces=pieces, extents=extents, **texts)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            detail = f"the card's export of device memory is malformed: {error!r:.200}"
            raise TransportError("bad-card", detail) from None


class Exporter:
    """The source's side: exports a rank's regions once, and serves descriptors until it is closed."""

    def __init__(self, cuda: Cuda, regions: Sequence[Region]) -> None:
        self._cuda = cuda
        self._server: DescriptorServer | None = None
        self._probe = 0
        self._descriptors: list[int] = []
        try:
            self.export = self._exported(regions)
        except (TransportError, OSError) as error:
            self.close()
            self.export = Export(cuda.uuid, refusal=str(error))

    def _exported(self, regions: Sequence[Region]) -> Export:
        pieces: list[ExportedPiece] = []
        index: dict[int, int] = {}
        extents = []
        for region in regions:
            row = self._row(region)
            for allocation in row:
                if allocation.address not in index:
                    index[allocation.address] = len(pieces)
                    pieces.append(self._piece(allocation))
            first = index[row[0].address]
            if [index[a.address] for a in row] != list(range(first, first + len(row))):
                detail = f"region {region.name!r} shares its pieces of memory in a different order"
                raise TransportError("no-export", detail)
            extents.append(Extent(first, len(row), region.address - row[0].address, region.address))
        probe = secrets.token_bytes(PROBE_BYTES)
        at = self._probe = self._cuda.allocate(PROBE_BYTES)
        self._cuda.upload(at, probe)
        # The driver places small allocations inside larger ones.
        allocation = self._cuda.allocation_of(at)
        if allocation.address not in index:
            index[allocation.address] = len(pieces)
            pieces.append(ExportedPiece(allocation.num_bytes, self._cuda.export(allocation).hex()))
        extents.append(Extent(index[allocation.address], 1, at - allocation.address, at))
        export = Export(self._cuda.uuid, tuple(pieces), tuple(extents), probe.hex())
        if not self._descriptors:
            return export
        self._server = DescriptorServer(self._descriptors)
        return replace(export, socket=self._server.name, token=self._server.token)

    def _row(self, region: Region) -> list[Allocation]:
        row = [self._cuda.allocation_of(region.address)]
        while row[-1].address + row[-1].num_bytes < region.address + region.num_bytes:
            row.append(self._cuda.allocation_of(row[-1].address + row[-1].num_bytes))
        return row

    def _piece(self, allocation: Allocation) -> ExportedPiece:
        try:
            return ExportedPiece(allocation.num_bytes, self._cuda.export(allocation).hex())
        except TransportError as plain:
            try:
                self._descriptors.append(self._cuda.export_virtual(allocation))
            except TransportError as virtual:
                raise TransportError("no-export", f"neither {plain.detail}, nor {virtual.detail}") from None
            return ExportedPiece(allocation.num_bytes)

    def close(self) -> None:
        """Memory that readers have opened stays open for them."""
        if self._server:
            self._server.close()
        for descriptor in self._descriptors:
            with suppress(OSError):
                os.close(descriptor)
        self._descriptors = []
        if self._probe:
            self._cuda.free(self._probe)
            self._probe = 0


@dataclass(eq=False)
class Opened:
    """The reader's side: another process's regions, mapped into this one."""

    cuda: Cuda
    regions: tuple[Region, ...]
    """At their addresses in this process."""
    _mapped: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def open(cls, cuda: Cuda, export: Export, regions: Sequence[Region]) -> Opened:
        """Map everything, check its size, read the probe; raises TransportError with nothing mapped."""
        if export.refusal:
            raise TransportError("no-export", f"the source cannot export its memory: {export.refusal}")
        if len(export.extents) != len(regions) + 1:
            detail = f"the card has {len(export.extents)} extents for {len(regions)} regions and a probe"
            raise TransportError("bad-card", detail)
        if export.device not in visible_devices():
            detail = f"its memory is on device {export.device}, which CUDA_VISIBLE_DEVICES hides here"
            raise TransportError("not-mapped", detail)
        opened = cls(cuda, ())
        try:
            probe = Region("probe", PROBE_BYTES, export.extents[-1].address, "cuda:0")
            mapped = opened._map(export, [*regions, probe])
            opened.regions = tuple(mapped[:-1])
            found = cuda.download(mapped[-1].address, PROBE_BYTES).hex()
            if found != export.probe:
                raise TransportError("bad-probe", "the mapped memory does not contain the source's probe")
        except BaseException:
            opened.close()
            raise
        return opened

    def _map(self, export: Export, regions: Sequence[Region]) -> list[Region]:
        virtual = [i for i, piece in enumerate(export.pieces) if not piece.handle]
        descriptors = receive_descriptors(export.socket, export.token, len(virtual)) if virtual else []
        try:
            by_piece = dict(zip(virtual, descriptors, strict=True))
            rows: dict[tuple[int, int], Allocation] = {}
            mapped = []
            for extent, region in zip(export.extents, regions, strict=True):
                row = extent.first_piece, extent.num_pieces
                if row not in rows:
                    rows[row] = self._map_row(export, by_piece, *row)
                mapped.append(_inside(rows[row], extent, region))
            return mapped
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def _map_row(
        self, export: Export, descriptors: dict[int, int], first: int, num_pieces: int
    ) -> Allocation:
        pieces = export.pieces[first : first + num_pieces] if first >= 0 and num_pieces > 0 else ()
        if len(pieces) != num_pieces or not pieces:
            detail = f"a region has {num_pieces} pieces from number {first} on"
            raise TransportError("bad-card", f"{detail}; the card has {len(export.pieces)} pieces in all")
        handles = [piece.handle for piece in pieces]
        if len(pieces) == 1 and handles[0]:
            allocation = self.cuda.open(_bytes(handles[0]))
            self._mapped.callback(self.cuda.close_opened, allocation)
            return allocation
        if any(handles):
            raise TransportError("bad-card", "a region mixes plain allocations with virtual memory")
        sizes = [piece.num_bytes for piece in pieces]
        if sum(sizes) > MAX_NUMBER:
            raise TransportError("bad-card", f"a region's {len(sizes)} pieces have {sum(sizes)} bytes")
        row = [descriptors[first + i] for i in range(num_pieces)]
        allocation = self.cuda.open_virtual(row, sizes)
        self._mapped.callback(self.cuda.close_virtual, allocation)
        return allocation

    def close(self) -> None:
        """Unmap everything; nothing may be reading it. The source can free its memory after this."""
        self._mapped.close()


def _inside(row: Allocation, extent: Extent, region: Region) -> Region:
    if region.address != extent.address:
        detail = (
            f"{region.name!r} is at {region.address:#x} in the manifest, at {extent.address:#x} in the card"
        )
        raise TransportError("no-connection", detail)
    if not 0 <= extent.offset <= row.num_bytes - region.num_bytes:
        detail = f"region {region.name!r}: {region.num_bytes} bytes from {extent.offset} on exceed"
        raise TransportError("bad-card", f"{detail} the {row.num_bytes} bytes that were opened")
    return replace(region, address=row.address + extent.offset)


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:
        raise ValueError(f"{value!r:.40} is not a valid size or offset")
    return value


def _bytes(digits: str) -> bytes:
    try:
        return bytes.fromhex(digits)
    except ValueError:
        raise TransportError("bad-card", f"the card has a malformed handle: {digits!r:.80}") from None
