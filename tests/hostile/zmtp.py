"""ZMTP 3.1 by hand, without encryption: what no library would send."""

import socket
import struct

GREETING = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)


def property_of(name: bytes, value: bytes) -> bytes:
    """A property of the READY command."""
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value


def frame(data: bytes, *, has_more: bool = False) -> bytes:
    """A frame of a message; by default the only one."""
    if len(data) > 255:
        return bytes([2 + has_more]) + struct.pack(">Q", len(data)) + data
    return bytes([has_more, len(data)]) + data


def connected(address: str, identity: bytes = b"") -> socket.socket:
    """A caller that is past the handshake. ``identity``: the routing id that it claims."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    caller = socket.create_connection((host, int(port)), timeout=10)
    ready = b"\x05READY" + property_of(b"Socket-Type", b"DEALER") + property_of(b"Identity", identity)
    caller.sendall(GREETING + b"\x04" + bytes([len(ready)]) + ready)
    _read(caller, len(GREETING))
    flags, length = _read(caller, 2)
    assert flags == 4, flags
    assert _read(caller, length).startswith(b"\x05READY")
    return caller


def _read(caller: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        some = caller.recv(num_bytes - len(data))
        assert some, "it hung up"
        data += some
    return data


def heard(caller: socket.socket) -> bytes:
    """The next short message; commands (heartbeats) are skipped."""
    while True:
        flags, length = _read(caller, 2)
        data = _read(caller, length)
        if not flags & 4:
            return data
