"""A server for processes of the same user on this host: the kernel says whose process has connected."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from time import sleep

from kvferry.host.threads import SocketLoop
from kvferry.log import is_worth_a_line, log_of

log = log_of(__name__)

ROOT = 0
PEER = struct.Struct("3i")
"""Process, user and group."""
PAUSE_SECONDS = 0.1
"""After an error of the listening socket: the process may have no room for another file, which may pass."""


class UserServer:
    """Answers one caller after another, in a thread of its own; others than this user and root are refused.

    A caller may keep those behind it waiting for ``seconds``. No error of a caller ends the thread; a
    PermissionError that ``answer`` raises is worth a line in the log.
    """

    def __init__(
        self, listening: socket.socket, answer: Callable[[socket.socket], None], *, name: str, seconds: float
    ) -> None:
        self._socket, self._answer, self._name, self._seconds = listening, answer, name, seconds
        self._num_refused = 0
        listening.setblocking(False)
        self._loop = SocketLoop(name, lambda _: float("inf"))
        self._loop.watch(listening, self._serve)
        self._loop.start()

    def _serve(self) -> None:
        try:
            caller, _ = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # it has gone by itself
        except OSError as error:
            self._warn(str(error))
            sleep(PAUSE_SECONDS)
            return
        try:
            with caller:
                caller.settimeout(self._seconds)
                self._check_user(caller)
                self._answer(caller)
        except PermissionError as error:
            self._warn(str(error))
        except OSError as error:
            log.debug("%s: a request was not answered: %s", self._name, error)

    @staticmethod
    def _check_user(caller: socket.socket) -> None:
        """Raises PermissionError, before anything is waited for. No process can claim another user."""
        _, user, _ = PEER.unpack(caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
        if user not in (ROOT, os.geteuid()):
            raise PermissionError(f"it belongs to user {user}, and this process to user {os.geteuid()}")

    def _warn(self, why: str) -> None:
        self._num_refused += 1
        if is_worth_a_line(self._num_refused):
            log.warning("%s: a request was not answered (%d so far): %s", self._name, self._num_refused, why)

    def close(self) -> None:
        self._loop.put(self._loop.stop)
        self._loop.join(self._seconds)
        self._socket.close()
