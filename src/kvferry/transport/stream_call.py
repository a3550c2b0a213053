"""How a reader calls the address of a stream, without waiting: it starts, and ends when there is news."""

from __future__ import annotations

import os
import socket

from kvferry.transport.stream_frames import HELLO, MAGIC, StreamOffer


def start_call(offer: StreamOffer) -> socket.socket:
    """A socket that is being connected; raises OSError or ValueError if the address makes no sense."""
    host, port = offer.host_and_port
    caller = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        caller.setblocking(False)
        caller.connect_ex((host, port))
    except BaseException:
        caller.close()
        raise
    return caller


def end_call(caller: socket.socket, offer: StreamOffer) -> None:
    """Name the stream, now that the socket has room to send; raises OSError if it was not connected."""
    if error := caller.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
        raise OSError(error, os.strerror(error))
    caller.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    caller.sendall(HELLO.pack(MAGIC, offer.stream_id))
