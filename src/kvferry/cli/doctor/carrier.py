"""What UCX reads by, from the tables that it prints of its own choices (``UCX_PROTO_INFO=y``)."""

from __future__ import annotations

import re
from typing import NamedTuple

_ROW = re.compile(r"\|\s*\S+\s*\|\s*(?P<how>[^|]*?)\s*\|\s*(?P<by>[^|]*?/[^|]*?)\s*\|")


class ReadCarrier(NamedTuple):
    """What UCX chose for reads of another process."""

    name: str = ""
    """Empty if it chose none."""
    is_emulated: bool = False
    """Whether the other process must help."""


def carrier_in(log: str) -> ReadCarrier:
    """What the last reads of another process are carried by.

    >>> carrier_in('''
    ... [1.5] [vm:7:0]   | an-agent intra-node cfg#1                                        |
    ... [1.5] [vm:7:0]   | remote memory read by ucp_get*(multi) into host memory from host |
    ... [1.5] [vm:7:0]   +--------+-------------+-------------------------------------------+
    ... [1.5] [vm:7:0]   | Range  | Description |                  Config                   |
    ... [1.5] [vm:7:0]   +--------+-------------+-------------------------------------------+
    ... [1.5] [vm:7:0]   | 0..inf | zero-copy   | cma/memory                                |
    ... [1.5] [vm:7:0]   +--------+-------------+-------------------------------------------+''')
    ReadCarrier(name='cma/memory', is_emulated=False)
    """
    found, is_read, is_self = ReadCarrier(), False, False
    for line in log.splitlines():
        if " cfg#" in line:
            is_self, is_read = " self cfg#" in line, False
        elif " by ucp_" in line:
            is_read = "ucp_get" in line and not is_self
        elif is_read and (row := _ROW.search(line)):
            found = ReadCarrier(row["by"], "emulation" in row["how"])
    return found
