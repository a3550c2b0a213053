"""The one door to the log: every line of ours begins with the product's name.

Lines of several programs stand in one log, and not every log shows which logger wrote a line.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any


class NamedLog(logging.LoggerAdapter[logging.Logger]):
    """Writes lines that begin with ``kvferry:``."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return f"kvferry: {msg}", kwargs


def is_worth_a_line(number: int) -> bool:
    """Whether the number-th of its kind is written down: the 1st, 2nd, 4th, 8th … Others may cause them, and
    must not fill the log.

    >>> [number for number in range(1, 20) if is_worth_a_line(number)]
    [1, 2, 4, 8, 16]
    """
    return number.bit_count() == 1


def log_of(name: str) -> NamedLog:
    """The log of a module; ``name`` is the module's.

    >>> log_of("kvferry.endpoint.owner").process("it goes on", {})
    ('kvferry: it goes on', {})
    """
    return NamedLog(logging.getLogger(name))
