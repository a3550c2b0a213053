"""The status of an endpoint: its report, its socket, and requests over the socket."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from kvferry.endpoint.metric_table import METRICS, MetricSide
from kvferry.errors import KVFerryError, SpecError
from kvferry.host.this_user import UserServer, own_folder
from kvferry.log import log_of
from kvferry.runtime.figures import Figures
from kvferry.wire.messages import PROTOCOL

log = log_of(__name__)


def status_report(
    side: MetricSide, status: Mapping[str, object], figures: Figures, up_seconds: float
) -> dict[str, Any]:
    about = {
        "side": side.value,
        "kvferry": _version(),
        "protocol": PROTOCOL,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "up_seconds": round(up_seconds, 3),
    }
    return {**about, **{key: _plain(value) for key, value in status.items()}, "figures": _shown(figures)}


def _version() -> str:
    try:
        return version("kvferry")
    except PackageNotFoundError:  # run from its source, not installed
        return "unknown"


def _shown(figures: Figures) -> list[dict[str, Any]]:
    return [
        {
            "metric": METRICS[name].exposed,
            "labels": dict(zip(METRICS[name].label_names, labels, strict=True)),
            "value": value,
        }
        for (name, *labels), value in figures.items()
        if value
    ]


def _plain(value: Any) -> Any:
    """A value for JSON, which has no infinity, and only text as keys."""
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {str(key): _plain(each) for key, each in value.items()}
        case list() | tuple():
            return [_plain(each) for each in value]
        case _:
            return value


MAX_FILES = 256
MAX_NAME_CHARACTERS = 32
MAX_PATH_BYTES = 106
"""Linux's limit for a socket's address, which begins with a dot until it listens."""
MAX_REPORT_BYTES = 4 << 20
MAX_WAITING = 64
"""Waiting callers per socket."""
AGAIN_SECONDS = 0.05
CALL_SECONDS = 2.0
"""How long a caller may take to read the report."""
ANSWER_SECONDS = 15.0
"""How long an endpoint may take to answer; more than the timeout of its owner thread."""

StatusReport = Mapping[str, object]


class StatusSocket:
    """Sends the report to every process of this user that connects."""

    def __init__(self, path: Path, report: Callable[[], StatusReport]) -> None:
        self._path, self._report = path, report
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        unlisted = path.with_name(f".{path.name}")
        try:
            listening.bind(str(unlisted))
            unlisted.chmod(0o600)
            listening.listen(MAX_WAITING)
            unlisted.rename(path)  # a listed socket without a listener is removed
        except OSError:
            listening.close()
            raise
        self._server = UserServer(listening, self._answer, name="kvferry-status", seconds=CALL_SECONDS)

    def close(self) -> None:
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
            log.exception("unexpected error in a status request")
            return json.dumps({"error": "an internal error; see the engine's log"}).encode()


def status_folder() -> Path:
    """The folder of this user's sockets; created if missing."""
    folder = own_folder() / "status"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def open_status(name: str, report: Callable[[], StatusReport]) -> StatusSocket | None:
    """Open an endpoint's status socket; None, and a log line, if that fails."""
    try:
        folder = status_folder()
        if len(os.listdir(folder)) >= MAX_FILES:
            live_sockets()
        if len(os.listdir(folder)) >= MAX_FILES:
            raise SpecError(f"{folder} has {MAX_FILES} files or more: remove some")
        plain = re.sub(r"[^A-Za-z0-9_.-]", "_", name)[-MAX_NAME_CHARACTERS:].lstrip(".")
        path = folder / f"{plain}-{os.getpid()}-{secrets.token_hex(2)}.sock"
        if len(os.fsencode(path)) > MAX_PATH_BYTES:
            raise SpecError(
                f"{path} is too long for a Unix socket (limit: {MAX_PATH_BYTES} bytes): set a shorter TMPDIR"
            )
        return StatusSocket(path, report)
    except (SpecError, OSError) as error:
        log.info("`kvferry status` is unavailable for %s; transfers are not affected: %s", name, error)
        return None


def is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(CALL_SECONDS)
        try:
            asking.connect(str(path))
        except OSError as error:
            return error.errno not in (errno.ECONNREFUSED, errno.ENOENT)
    return True


def read_status(path: Path) -> dict[str, Any]:
    """The report of the endpoint at a socket; raises SpecError if there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(ANSWER_SECONDS)
        try:
            _connect(asking, path)
            found = b"".join(_received(asking))
        except OSError as error:
            why = error.strerror or str(error)
            if error.errno == errno.ECONNREFUSED:
                why = "its engine has exited" if path.is_socket() else "not a socket"
            raise SpecError(f"{path}: {why}") from None
    try:
        answer = json.loads(found)
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise SpecError(f"{path}: not the status socket of a kvferry engine, or owned by another user")
    return answer


def _connect(asking: socket.socket, path: Path) -> None:
    deadline = monotonic() + ANSWER_SECONDS
    while True:
        try:
            asking.connect(str(path))
            return
        except BlockingIOError:  # too many callers wait
            if monotonic() > deadline:
                raise
            sleep(AGAIN_SECONDS)


def _received(asking: socket.socket) -> Iterator[bytes]:
    num_bytes = 0
    while num_bytes < MAX_REPORT_BYTES and (part := asking.recv(1 << 16)):
        num_bytes += len(part)
        yield part


def sockets() -> list[Path]:
    """The sockets of this user's endpoints, including killed ones."""
    return sorted(path for path in status_folder().glob("[!.]*.sock") if path.is_socket())


def live_sockets() -> list[Path]:
    """The sockets of this user's running endpoints; removes those of killed ones."""
    for path in sockets():
        if not is_listening(path):
            path.unlink(missing_ok=True)
    return sockets()
