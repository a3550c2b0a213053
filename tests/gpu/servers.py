"""``vllm serve`` and a proxy, as processes of their own: started for a case, and all ended with the run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.error import URLError
from urllib.request import urlopen

from tests.e2e.harness import EngineError, lasting_port

READY_SECONDS, END_SECONDS, LOOK_SECONDS = 900.0, 20.0, 0.5
VLLM_SERVE = (sys.executable, "-m", "vllm.entrypoints.cli.main", "serve")
PROXY = (sys.executable, "-m", "kvferry", "proxy")
LOCAL = "127.0.0.1"


def flags(args: Mapping[str, Any]) -> list[str]:
    """Engine arguments as ``vllm serve`` hears them.

    >>> flags({"block_size": 16, "enforce_eager": True, "enable_prefix_caching": False, "x": {"mode": 0}})
    ['--block-size=16', '--enforce-eager', '--no-enable-prefix-caching', '--x={"mode": 0}']
    """
    found = []
    for key, value in args.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{name}" if value else f"--no-{name}")
        else:
            found.append(f"--{name}={json.dumps(value) if isinstance(value, Mapping) else value}")
    return found


@dataclass(frozen=True, slots=True)
class Server:
    """A process that answers HTTP."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    def wait_ready(self) -> None:
        """Until it says that it is healthy; raises EngineError if it ends, or takes too long."""
        deadline = time.monotonic() + READY_SECONDS
        while not self._is_healthy():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise EngineError(f"{self.log.stem} does not serve: {self.log.read_text(errors='replace')}")
            time.sleep(LOOK_SECONDS)

    def num_loaded(self) -> int:
        """Prompt tokens that came by loads, say vLLM's metrics."""
        with urlopen(f"{self.url}/metrics", timeout=READY_SECONDS) as answer:
            return loaded_in(answer.read().decode())

    def end(self) -> None:
        """All of its processes: kindly, then by force."""
        if self.process.poll() is None:
            self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _is_healthy(self) -> bool:
        try:
            with urlopen(f"{self.url}/health", timeout=READY_SECONDS) as answer:
                return bool(answer.status == 200)
        except (URLError, OSError):
            return False


def loaded_in(metrics: str) -> int:
    """Prompt tokens that came by loads.

    >>> loaded_in('vllm:prompt_tokens_by_source_total{source="external_kv_transfer"} 64.0')
    64
    """
    line = r'vllm:prompt_tokens_by_source_total{[^}]*source="external_kv_transfer"[^}]*} (\S+)'
    return int(sum(float(value) for value in re.findall(line, metrics)))


@dataclass
class Servers:
    """Starts processes, and ends them all, also those of a case that was given up."""

    logs: Path
    _started: list[Server] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_closed: bool = False

    def serve(self, name: str, model: Path, args: Mapping[str, Any], env: Mapping[str, str]) -> Server:
        """``vllm serve``."""
        command = (*VLLM_SERVE, str(model), f"--host={LOCAL}", *flags(args))
        return self.start(name, command, "--port={port}", env)

    def proxy(self, name: str, prefill: Server, decode: Server) -> Server:
        """kvferry's, before one server of each kind."""
        command = (*PROXY, f"--prefill={prefill.url}", f"--decode={decode.url}")
        return self.start(name, command, f"--listen={LOCAL}:{{port}}", {})

    def start(self, name: str, command: Sequence[str], port_flag: str, env: Mapping[str, str]) -> Server:
        """A process in a group of its own, that will listen on a port."""
        path = os.pathsep.join(filter(None, sys.path))
        with self._lock:
            if self._is_closed:
                raise EngineError("the run is over")
            port, log = lasting_port(), self.logs / f"{name}-{len(self._started)}.log"
            with log.open("wb") as sink:
                process = subprocess.Popen(
                    [*command, port_flag.format(port=port)],
                    env={**os.environ, "PYTHONPATH": path, **env},
                    stdin=subprocess.DEVNULL,
                    stdout=sink,
                    stderr=sink,
                    start_new_session=True,
                )
            self._started.append(Server(f"http://{LOCAL}:{port}", log, process))
            return self._started[-1]

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for server in self._started:
                server.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
