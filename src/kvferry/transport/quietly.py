"""Tidying up in a thread that others depend on."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

from kvferry.errors import TransportError
from kvferry.log import log_of

P = ParamSpec("P")

log = log_of(__name__)


def quietly(work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Do it; what goes wrong is worth a line, not a dead thread."""
    try:
        work(*args, **kwargs)
    except TransportError as error:
        log.warning("%s", error)
    except Exception:
        log.exception("unexpected; the thread goes on")
