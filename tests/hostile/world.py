"""A source engine and a good reader, each a process; and how the reader fares while others attack."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ANSWER_SECONDS = 60.0
MORE_MEMORY, MORE_MIB = 1.1, 32
"""A process under attack may grow by a tenth, and by so many MiB."""
STRAY = "bytes outside of the request were written"
MAX_STARVED_SECONDS = 5.0
"""A good reader has a load done at least so often."""


def environment(secret_file: str = "", *, code: Path = ROOT, **more: str) -> dict[str, str]:
    """What a process of ours gets: ``code`` is the checkout whose kvferry it runs."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("UCX_", "NIXL_", "KVFERRY_"))
    }
    kept["PYTHONPATH"] = f"{code / 'src'}:{ROOT}"
    return kept | ({"KVFERRY_SECRET_FILE": secret_file} if secret_file else {}) | more


class Process:
    """A process that answers lines by lines. What it logs is kept in a file."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log: Path | None = None) -> None:
        self._log = log.open("wb") if log else None
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=dict(env)
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._asked, self._said = self._process.stdin, self._process.stdout
        self._lock = threading.Lock()
        line = self._said.readline()
        assert line, f"{argv[-2:]} ended with {self._process.wait()}"
        self.said: dict[str, Any] = json.loads(line)

    @property
    def pid(self) -> int:
        return int(self.said["pid"])

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def return_code(self) -> int | None:
        return self._process.poll()

    def ask(self, line: str) -> str:
        """The answer; empty if the process has ended."""
        with self._lock:
            try:
                self._asked.write(f"{line}\n")
                self._asked.flush()
                return self._said.readline().strip()
            except OSError:
                return ""

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._asked, self._said, self._log):
            if stream is not None:
                stream.close()


@dataclass
class Fared:
    """How the good reader fared."""

    seconds: list[float] = field(default_factory=list)
    """How long each good load took."""
    errors: list[str] = field(default_factory=list)
    starved_seconds: float = 0.0
    """The longest time without a good load."""
    stall_seconds: float = 0.0
    """The longest that the source's own Python was held up."""
    grown_mib: int = 0
    """What the source keeps when it is over."""
    peak_mib: int = 0
    """What it had meanwhile, beyond what it had before."""
    is_too_large: bool = False
    is_written: bool = False
    num_files: int = 0
    is_alive: bool = True

    @property
    def num_loads(self) -> int:
        return len(self.seconds)

    @property
    def is_fine(self) -> bool:
        return (
            self.is_alive
            and not self.is_written
            and not self.is_too_large
            and self.num_loads > 0
            and self.starved_seconds <= MAX_STARVED_SECONDS
            and not {"wrong bytes", STRAY} & {*self.errors}
        )


class World:
    """A source engine at a host, and a good reader of it."""

    def __init__(
        self,
        host: str,
        env: Mapping[str, str],
        *,
        source_in: Sequence[str] = (),
        reader_in: Sequence[str] = (),
        logs: Path | None = None,
    ) -> None:
        """``source_in``, ``reader_in``: commands before a command, such as ``ip netns exec NAME``."""
        folder = Path(__file__).parent
        self.source = Process(
            [*source_in, sys.executable, str(folder / "source_process.py"), host],
            env,
            logs / "source.log" if logs else None,
        )
        with ExitStack() as ends:
            ends.callback(self.source.close)
            self.reader = Process(
                [*reader_in, sys.executable, str(folder / "reader_process.py")],
                env,
                logs / "reader.log" if logs else None,
            )
            ends.callback(self.reader.close)
            for number in range(6):  # memory that a first load needs is no growth
                assert not self.load(is_fresh=number % 2 == 1), "the first load failed"
            ends.pop_all()  # all is well
        self.before = self.state()

    @property
    def addresses(self) -> dict[str, str]:
        """Where the source listens, by what it is: HOST:PORT."""
        return {
            name: str(said).removeprefix("tcp://") for name, said in self.source.said.items() if name != "pid"
        }

    def state(self) -> dict[str, Any]:
        """How the source is; empty if it has ended."""
        answer = self.source.ask("state")
        return dict(json.loads(answer)) if answer else {}

    def load(self, *, is_fresh: bool = False) -> str:
        """Offer and load a request; what went wrong, if anything. ``is_fresh``: by a reader that is new."""
        ticket = self.source.ask("offer")
        if not ticket:
            return "the source has ended"
        answer = self.reader.ask(f"fresh {ticket}" if is_fresh else ticket)
        return str(json.loads(answer)["error"]) if answer else "the reader has ended"

    @contextmanager
    def loading(self, pause: float = 0.1, *, more_mib: int = MORE_MIB) -> Iterator[Fared]:
        """Load again and again meanwhile; all is known when it is over."""
        fared, is_over, before = Fared(), threading.Event(), self.state()
        thread = threading.Thread(target=self._load_on, args=(fared, is_over, pause))
        thread.start()
        try:
            yield fared
        finally:
            is_over.set()
            thread.join()
            after = self.state()
            fared.is_alive = bool(after) and self.source.is_alive and self.reader.is_alive
            if after:
                fared.grown_mib = after["rss"] - before["rss"]
                fared.peak_mib = after["peak"] - before["rss"]
                fared.is_too_large = after["rss"] > before["rss"] * MORE_MEMORY + more_mib
                fared.is_written = after["is_written"]
                fared.stall_seconds, fared.num_files = after["stall"], after["files"]

    def _load_on(self, fared: Fared, is_over: threading.Event, pause: float) -> None:
        good_at = time.monotonic()
        while self.source.is_alive and self.reader.is_alive:
            is_last = is_over.is_set()
            began = time.monotonic()
            error = self.load(is_fresh=len(fared.errors) + fared.num_loads & 1 == 1)
            now = time.monotonic()
            if error:
                fared.errors.append(error)
            fared.starved_seconds = max(fared.starved_seconds, now - good_at)
            if not error:
                fared.seconds.append(now - began)
                good_at = now
            if is_last and (not error or now - good_at > 3 * MAX_STARVED_SECONDS):
                return
            is_over.wait(pause)

    def close(self) -> None:
        self.reader.close()
        self.source.close()
