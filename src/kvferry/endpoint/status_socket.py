"""Where an endpoint of this host can be asked how it is: a socket in a folder of this user's alone.

Whoever connects is told, and nothing that it says is read. Only this user and root may connect.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from time import monotonic, sleep
from typing import Any, Protocol

from kvferry.errors import KVFerryError, SpecError
from kvferry.host.private_files import own_folder
from kvferry.host.user_server import UserServer
from kvferry.log import log_of

log = log_of(__name__)

MAX_FILES = 256
MAX_NAME_CHARACTERS = 32
MAX_PATH_BYTES = 107
"""Of a socket's address, says Linux."""
MAX_REPORT_BYTES = 4 << 20
MAX_WAITING = 64
"""Callers that wait to be told. Where there are more, a caller tries again."""
AGAIN_SECONDS = 0.05
CALL_SECONDS = 2.0
"""How long a caller may take to read what it is told."""
ANSWER_SECONDS = 15.0
"""How long an endpoint may take to answer; more than its owner is waited for."""

StatusReport = Mapping[str, object]


class OpenStatus(Protocol):
    """What stays open until it is closed."""

    def close(self) -> None:
        """Nobody is told anything any more."""
        ...


class StatusSocket:
    """Tells every process of this user that connects."""

    def __init__(self, path: Path, report: Callable[[], StatusReport]) -> None:
        self._path, self._report = path, report
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.bind(str(path))
            path.chmod(0o600)
            listening.listen(MAX_WAITING)
        except OSError:
            listening.close()
            raise
        self._server = UserServer(listening, self._answer, name="kvferry-status", seconds=CALL_SECONDS)

    def close(self) -> None:
        """Nobody is told anything any more."""
        self._path.unlink(missing_ok=True)
        self._server.close()

    def _answer(self, caller: socket.socket) -> None:
        caller.sendall(self._text())

    def _text(self) -> bytes:
        try:
            return json.dumps(self._report()).encode()
        except KVFerryError as error:
            return json.dumps({"error": str(error)}).encode()
        except Exception:
            log.exception("an unexpected error while somebody asked for the status")
            return json.dumps({"error": "a bug; the engine's log says where"}).encode()


def status_folder() -> Path:
    """Where this user's sockets are; made if it is not there."""
    folder = own_folder() / "status"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def open_status(name: str, report: Callable[[], StatusReport]) -> OpenStatus | None:
    """Let an endpoint be asked. One that cannot be asked works all the same: it says so once, in the log."""
    try:
        folder = status_folder()
        if len(os.listdir(folder)) >= MAX_FILES:
            live_sockets()
        if len(os.listdir(folder)) >= MAX_FILES:
            raise SpecError(f"{folder} has {MAX_FILES} files or more")
        plain = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[-MAX_NAME_CHARACTERS:].lstrip(".")
        path = folder / f"{plain}-{os.getpid()}-{secrets.token_hex(2)}.sock"
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            raise SpecError(f"{path} is too long: a socket's address has at most {MAX_PATH_BYTES} bytes")
        return StatusSocket(path, report)
    except (SpecError, OSError) as error:
        log.info("`kvferry status` cannot ask %s, which works all the same: %s", name, error)
        return None


def is_listening(path: Path) -> bool:
    """Whether anybody listens at a socket. Where its process was killed, the file is removed."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(CALL_SECONDS)
        try:
            asking.connect(str(path))
        except OSError as error:
            if error.errno == errno.ECONNREFUSED:
                path.unlink(missing_ok=True)
            return error.errno not in (errno.ECONNREFUSED, errno.ENOENT)
    return True


def read_status(path: Path) -> dict[str, Any]:
    """What an endpoint says at its socket; raises SpecError if nobody does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(ANSWER_SECONDS)
        try:
            _connect(asking, path)
            found = b"".join(_received(asking))
        except OSError as error:
            hint = ": the engine that it belonged to is gone" if error.errno == errno.ECONNREFUSED else ""
            raise SpecError(f"{path}: {error.strerror or error}{hint}") from None
    try:
        answer = json.loads(found)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise SpecError(f"{path}: this is no socket of an engine of kvferry's, or you are not its user")
    return answer


def _connect(asking: socket.socket, path: Path) -> None:
    deadline = monotonic() + ANSWER_SECONDS
    while True:
        try:
            asking.connect(str(path))
            return
        except BlockingIOError:  # too many callers wait already
            if monotonic() > deadline:
                raise
            sleep(AGAIN_SECONDS)


def _received(asking: socket.socket) -> Iterator[bytes]:
    num_bytes = 0
    while num_bytes < MAX_REPORT_BYTES and (part := asking.recv(1 << 16)):
        num_bytes += len(part)
        yield part


def sockets() -> list[Path]:
    """The sockets of this user's endpoints, and of those that were killed."""
    return sorted(status_folder().glob("*.sock"))


def live_sockets() -> list[Path]:
    """The sockets of this user's endpoints that run; those of dead ones are removed."""
    for path in sockets():
        is_listening(path)
    return sockets()
