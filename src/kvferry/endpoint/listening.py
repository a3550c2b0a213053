"""Where an engine or a rank listens, and what others are told to call."""

from __future__ import annotations

from kvferry.errors import SpecError
from kvferry.wire.trust import Trust

EVERY_HOST = ("0.0.0.0", "*", "[::]")


def check_listen(listen: str, advertise: str, trust: Trust) -> None:
    """Raise unless one may listen there, and others could call it."""
    if not advertise and any(f"//{host}:" in listen for host in EVERY_HOST):
        raise SpecError(f"listen={listen} is no address that a reader could call: say advertise=HOST")
    trust.check_listen(listen)


def advertised(address: str, host: str) -> str:
    """The address with another host.

    >>> advertised("tcp://0.0.0.0:5555", "10.0.0.7"), advertised("tcp://127.0.0.1:5555", "")
    ('tcp://10.0.0.7:5555', 'tcp://127.0.0.1:5555')
    """
    return f"tcp://{host}:{address.rpartition(':')[2]}" if host else address
