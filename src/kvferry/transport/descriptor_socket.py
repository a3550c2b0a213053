"""File descriptors from one process to another of the same host and user, for those who know a token.

The socket has no name in the file system: it goes with its process, and is seen in its network namespace.
"""

from __future__ import annotations

import hmac
import os
import secrets
import socket
import struct
import threading
from collections.abc import Sequence
from time import monotonic, sleep

from kvferry.errors import TransportError
from kvferry.log import is_worth_a_line, log_of

log = log_of(__name__)

TOKEN_BYTES = 32
MAX_AT_ONCE = 250
"""Descriptors in one message; the kernel takes 253."""
ANSWER_SECONDS = 5.0
PAUSE_SECONDS = 0.1
ROOT = 0
PEER = struct.Struct("3i")
"""Process, user and group, as the kernel tells them of whoever connected."""


class DescriptorServer:
    """Hands the same descriptors to everybody who shows the token, in a thread of its own."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._descriptors = list(descriptors)
        self._secret = secrets.token_bytes(TOKEN_BYTES)
        self.name, self.token = f"kvferry-{secrets.token_hex(16)}", self._secret.hex()
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen()
        self._is_closed, self._num_refused = False, 0
        self._thread = threading.Thread(target=self._serve, name="kvferry-descriptors", daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                caller, _ = self._socket.accept()
            except OSError as error:
                if self._is_closed:
                    return
                log.warning("a reader on this host could not be heard: %s", error)
                sleep(PAUSE_SECONDS)  # no room for another file, perhaps: that may pass
                continue
            try:
                with caller:
                    caller.settimeout(ANSWER_SECONDS)
                    self._answer(caller)
            except OSError as error:
                self._refuse(str(error))

    def _answer(self, caller: socket.socket) -> None:
        user = user_of(caller)
        if user not in (os.geteuid(), ROOT):  # at once: nobody else may keep others waiting
            self._refuse(f"it belongs to user {user}, and this process to user {os.geteuid()}")
            return
        shown = caller.recv(TOKEN_BYTES, socket.MSG_WAITALL)
        if not hmac.compare_digest(shown, self._secret):
            self._refuse("its token is wrong")
            return
        for at in range(0, len(self._descriptors), MAX_AT_ONCE):
            socket.send_fds(caller, [b"."], self._descriptors[at : at + MAX_AT_ONCE])

    def _refuse(self, why: str) -> None:
        self._num_refused += 1
        if is_worth_a_line(self._num_refused):
            log.warning("a process on this host got no descriptors (number %d): %s", self._num_refused, why)

    def close(self) -> None:
        """Hand out nothing more. The descriptors stay with whoever gave them."""
        self._is_closed = True
        # Closing alone would leave the thread in accept().
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        finally:
            self._socket.close()
        self._thread.join(timeout=ANSWER_SECONDS)


def user_of(caller: socket.socket) -> int:
    """Whose process has connected; nobody can claim to be another."""
    return int(PEER.unpack(caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))[1])


def receive_descriptors(name: str, token: str, number: int) -> list[int]:
    """So many descriptors, which are the caller's to close; or TransportError, and none."""
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
                if not descriptors:  # the end; or bytes alone, of which there could be any number
                    break
        if len(received) == number:
            return received
        reason = f"{len(received)} of {number} descriptors came"
    except (OSError, ValueError) as error:
        reason = str(error)
    for descriptor in received:
        socket.close(descriptor)
    raise TransportError("no-descriptors", f"the source's memory cannot be opened: {reason}")
