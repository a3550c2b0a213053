"""Logging: every line begins with ``kvferry:``, since not every log format shows the logger."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any


class NamedLog(logging.LoggerAdapter[logging.Logger]):
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        return f"kvferry: {msg}", kwargs


def is_worth_a_line(number: int) -> bool:
    """Whether to log the number-th event of a kind: the 1st, 2nd, 4th, 8th …

    >>> [number for number in range(1, 20) if is_worth_a_line(number)]
    [1, 2, 4, 8, 16]
    """
    return number.bit_count() == 1


def log_of(name: str) -> NamedLog:
    """The log of a module; ``name`` is the module's.

    >>> log_of("kvferry.endpoint.owner").process("started", {})
    ('kvferry: started', {})
    """
    return NamedLog(logging.getLogger(name))
