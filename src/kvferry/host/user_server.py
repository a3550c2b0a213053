"""A server for processes of the same user on this host: the kernel says whose process has connected."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

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
        self._is_closed, self._num_refused = False, 0
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while not self._is_closed:
            try:
                caller, _ = self._socket.accept()
            except OSError as error:
                if not self._is_closed:
                    self._warn(str(error))
                    threading.Event().wait(PAUSE_SECONDS)
                continue
            try:
                with caller:
                    caller.settimeout(self._seconds)
                    self._check_user(caller)
                    self._answer(caller)
            except PermissionError as error:
                self._warn(str(error))
            except OSError as error:
                log.debug("%s: a caller got no answer: %s", self._name, error)
            except Exception:
                log.exception("%s goes on after an unexpected error", self._name)

    @staticmethod
    def _check_user(caller: socket.socket) -> None:
        """Raises PermissionError, before anything is waited for."""
        user = user_of(caller)
        if user not in (ROOT, os.geteuid()):
            raise PermissionError(f"it belongs to user {user}, and this process to user {os.geteuid()}")

    def _warn(self, why: str) -> None:
        self._num_refused += 1
        if is_worth_a_line(self._num_refused):
            log.warning("%s: a caller got no answer (%d by now): %s", self._name, self._num_refused, why)

    def close(self) -> None:
        self._is_closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # closing alone would leave the thread in accept()
        self._thread.join(self._seconds)
        self._socket.close()


def user_of(caller: socket.socket) -> int:
    """Whose process has connected; no process can claim to be another user's."""
    return int(PEER.unpack(caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size))[1])
