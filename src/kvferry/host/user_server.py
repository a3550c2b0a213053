"""A server for processes of the same user on this host, checked by peer credentials."""

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
"""After an error of ``accept``, such as too many open files."""


class UserServer:
    """Answers one caller after another in its own thread; only this user and root may connect.

    ``seconds`` is the time limit per caller. No error of a caller ends the thread; a PermissionError from
    ``answer`` is logged.
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
            return  # the caller has disconnected
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
            log.debug("%s: failed to answer a request: %s", self._name, error)

    @staticmethod
    def _check_user(caller: socket.socket) -> None:
        """Raises PermissionError for other users. The credentials come from the kernel."""
        _, user, _ = PEER.unpack(caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))
        if user not in (ROOT, os.geteuid()):
            raise PermissionError(f"the caller runs as user {user}, this process as user {os.geteuid()}")

    def _warn(self, why: str) -> None:
        self._num_refused += 1
        if is_worth_a_line(self._num_refused):
            log.warning("%s: rejected a request (%d so far): %s", self._name, self._num_refused, why)

    def close(self) -> None:
        self._loop.put(self._loop.stop)
        self._loop.join(self._seconds)
        self._socket.close()
