"""What ``kv_connector_extra_config`` may say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvferry.errors import SpecError
from kvferry.runtime import Timing

_TEXTS = ("listen", "advertise", "secret", "dump")
_SECONDS = {"lease_seconds": "lease", "meet_seconds": "meet", "read_seconds": "read"}


@dataclass(frozen=True)
class Options:
    """The connector's few options, checked at start-up; unknown keys are refused by name.

    >>> Options.of({"lease_seconds": 10}, host="10.0.0.7").listen
    'tcp://10.0.0.7:*'
    >>> Options.of({"leese_seconds": 10}, host="10.0.0.7")
    Traceback (most recent call last):
    kvferry.errors.SpecError: kv_connector_extra_config: unknown leese_seconds; known are advertise, dump, ...
    """

    listen: str
    """Where the lease authority listens; ``*`` takes a free port."""
    advertise: str = ""
    """The host that readers call, where it is not the one of ``listen``."""
    secret: bytes = field(default=b"", repr=False)
    """Known to all engines that may talk to each other; empty: nobody is asked for one."""
    dump: str = ""
    """A folder for manifests: of this engine at the start, and of both sides where a peer is refused."""
    timing: Timing = field(default_factory=Timing)

    @classmethod
    def of(cls, extra: Mapping[str, Any], *, host: str) -> Options:
        """Options from the configuration; ``host`` is where this machine can be reached."""
        known = {*_TEXTS, *_SECONDS}
        if unknown := sorted(set(extra) - known):
            names, all_names = ", ".join(unknown), ", ".join(sorted(known))
            raise SpecError(f"kv_connector_extra_config: unknown {names}; known are {all_names}")
        texts = {name: _text(name, extra.get(name, "")) for name in _TEXTS}
        seconds = {_SECONDS[name]: _number(name, extra[name]) for name in _SECONDS if name in extra}
        address = f"[{host}]" if ":" in host else host
        return cls(
            listen=texts["listen"] or f"tcp://{address}:*",
            advertise=texts["advertise"],
            secret=texts["secret"].encode(),
            dump=texts["dump"],
            timing=Timing(**seconds),
        )


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise SpecError(f"kv_connector_extra_config: {name} must be text, got {value!r}")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SpecError(f"kv_connector_extra_config: {name} must be a number of seconds, got {value!r}")
    return float(value)
