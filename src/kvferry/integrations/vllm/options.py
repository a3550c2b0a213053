"""What ``kv_connector_extra_config`` may say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvferry.errors import SpecError
from kvferry.runtime import Timing


@dataclass(frozen=True)
class Options:
    """The connector's few options, checked at start-up; unknown keys are refused by name."""

    listen: str = "tcp://127.0.0.1:*"
    """Where the lease authority listens; ``*`` takes a free port."""
    advertise: str = ""
    """The host that readers call, where it is not the one of ``listen``."""
    secret: bytes = b""
    """Known to all engines that may talk to each other; empty: nobody is asked for one."""
    timing: Timing = field(default_factory=Timing)

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Options:
        """Options from the configuration."""
        known = {"listen", "advertise", "secret", "lease_seconds", "meet_seconds", "read_seconds"}
        if unknown := set(extra) - known:
            raise SpecError(
                f"kv_connector_extra_config: unknown {sorted(unknown)}: known are {', '.join(sorted(known))}"
            )
        default = Timing()
        timing = Timing(
            lease=float(extra.get("lease_seconds", default.lease)),
            meet=float(extra.get("meet_seconds", default.meet)),
            read=float(extra.get("read_seconds", default.read)),
        )
        return cls(
            listen=str(extra.get("listen", "tcp://127.0.0.1:*")),
            advertise=str(extra.get("advertise", "")),
            secret=str(extra.get("secret", "")).encode(),
            timing=timing,
        )
