"""Engines for the cases of one run: started as a case says, and a sentence for whatever does not start."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.e2e.devices import Device
from tests.e2e.harness import KVFERRY, Engine, EngineError, Nursery
from tests.gpu.cases import OTHER, OTHER_ON_GPU, OTHER_SITE, NotHere, Setting
from tests.gpu.models import ARGS, SMALL, make_config
from tests.gpu.servers import Servers

WARM_UP, WARM_UP_SECONDS = [255] * 400, 400.0
_ERROR = re.compile(r"\b([\w.]*(?:Error|Exception|Refused|NotHere)): (\S.*)")
_BARE = re.compile(r"\b(\w+(?:Error|Exception))\s*$")
_OF_ANOTHER = (
    "Engine core initialization failed",
    "EngineCore encountered an issue",
    "WorkerProc initialization failed",
)
"""What vLLM says besides the cause."""


@dataclass(frozen=True)
class Engines:
    """Starts engines; several cases may ask at a time."""

    nursery: Nursery
    device: Device
    folder: Path
    """For configurations."""
    servers: Servers
    other: Nursery | None = None
    """Starts engines of another vLLM."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def pair(
        self, family: str, src: Setting, dst: Setting, connector: Mapping[str, Any] = KVFERRY
    ) -> Iterator[tuple[Engine, Engine]]:
        """Two engines that are ready; they end with the case."""
        with self.started(family, {"src": src, "dst": dst}, connector) as engines:
            yield engines["src"], engines["dst"]

    @contextmanager
    def started(
        self,
        family: str,
        settings: Mapping[str, Setting],
        connector: Mapping[str, Any] | None = KVFERRY,
        *,
        until: Callable[[Engine], None] | None = None,
    ) -> Iterator[dict[str, Engine]]:
        """Engines of one tiny model, by the names of their settings; raises NotHere where vLLM refuses.

        ``until`` waits for as much as a case needs of them; if not said, for a first answer.
        """
        fitted = {name: setting.on(self.device, family) for name, setting in settings.items()}
        model = self.tiny(family)
        engines: dict[str, Engine] = {}
        try:
            for name, setting in fitted.items():
                engines[name] = self.begin(model, setting, connector)
            for name, engine in engines.items():
                self.wait(engine, partial(self.begin, model, fitted[name], None), until or warm_up)
            yield engines
        finally:
            close_all(engines.values())

    def tiny(self, family: str) -> Path:
        """The directory of a tiny model; raises NotHere where no such model can be made."""
        if self.device.name != "cpu":
            family = OTHER_ON_GPU.get(family, family)
        with self._lock:
            try:
                return self.nursery.make(family)
            except EngineError:
                raise NotHere(f"this transformers makes no tiny model of the family {family}") from None

    def sized(self, model: str, max_tokens: int) -> Path:
        """The directory of a model with a true cache; on a CPU, of a small one."""
        if self.device.name == "cpu" and model != SMALL:
            raise NotHere(f"on a CPU nothing is measured: there the model {SMALL} shows that it runs")
        return make_config(model, self.folder, max_tokens=max_tokens, is_tiny=self.device.name == "cpu")

    def begin(
        self, model: Path, setting: Setting, connector: Mapping[str, Any] | None, **more: Any
    ) -> Engine:
        """An engine that will be ready."""
        args = {**setting.args(), **self._draft(setting), **more}
        nursery = self.nursery
        if OTHER in setting.features:
            if self.other is None:
                raise NotHere(f"{OTHER_SITE} names no folder with another vLLM")
            nursery = self.other
        with self._lock:
            return nursery.begin(model, connector, env=setting.env(), **args)

    def begin_sized(
        self, model: Path, setting: Setting, connector: Mapping[str, Any] | None, **more: Any
    ) -> Engine:
        """The same, of a model with a true cache."""
        return self.begin(model, setting, connector, **{**ARGS, **more})

    def wait(self, engine: Engine, begin_bare: Callable[[], Engine], until: Callable[[Engine], None]) -> None:
        """Until it serves. Whether what failed is vLLM's own, the same engine without a connector says."""
        try:
            until(engine)
        except EngineError:
            why, bare = cause(engine.log.read_text(errors="replace")), begin_bare()
            try:
                until(bare)
            except EngineError:
                own = cause(bare.log.read_text(errors="replace"))
                raise NotHere(f"such an engine does not serve without a connector either: {own}") from None
            finally:
                bare.close()
            raise EngineError(
                f"an engine with the connector does not serve, one without does: {why}"
            ) from None

    def _draft(self, setting: Setting) -> dict[str, Any]:
        if not setting.draft:
            return {}
        method, family = setting.draft.split(":")
        model = str(self.tiny(family))
        return {"speculative_config": {"method": method, "model": model, "num_speculative_tokens": 2}}


def close_all(engines: Iterable[Engine]) -> None:
    """Together: each may take seconds."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(Engine.close, engines))


def warm_up(engine: Engine) -> None:
    """A first answer: in bf16 a CPU wants a long first step; on a GPU kernels are compiled meanwhile."""
    engine.wait_ready()
    engine.begin(engine.new_id(), WARM_UP).result(WARM_UP_SECONDS)


def cause(log: str) -> str:
    """The error that ended an engine, from its log: the last one that is no echo of another."""
    found = [
        f"{match[1]}: {match[2]}"
        for match in map(_ERROR.search, log.splitlines())
        if match and not match[2].startswith(_OF_ANOTHER)
    ]
    if not found:  # an assertion without words is told by the line that made it
        found = [
            f"{match[1]}: {before.strip()}"
            for before, match in ((one, _BARE.search(next_)) for one, next_ in pairwise(log.splitlines()))
            if match
        ]
    return found[-1][:300] if found else log.strip()[-300:]
