"""What UCX reads by, from the tables that it prints of its own choices (``UCX_PROTO_INFO=y``)."""

from __future__ import annotations

import re

_ROW = re.compile(r"\|\s*\S+\s*\|\s*(?P<how>[^|]*?)\s*\|\s*(?P<by>[^|]*?/[^|]*?)\s*\|")


def carrier_in(log: str) -> str:
    """What the last reads of another process are carried by; empty if nothing.

    >>> carrier_in('''
    ... [1.5] [vm:7:0]   | an-agent intra-node cfg#1                                        |
    ... [1.5] [vm:7:0]   | remote memory read by ucp_get*(multi) into host memory from host |
    ... [1.5] [vm:7:0]   +--------+-------------+-------------------------------------------+
    ... [1.5] [vm:7:0]   | Range  | Description |                  Config                   |
    ... [1.5] [vm:7:0]   +--------+-------------+-------------------------------------------+
    ... [1.5] [vm:7:0]   | 0..inf | zero-copy   | cma/memory                                |
    ... [1.5] [vm:7:0]   +--------+-------------+-------------------------------------------+''')
    'cma/memory'
    """
    found, is_read, is_self = "", False, False
    for line in log.splitlines():
        if " cfg#" in line:
            is_self, is_read = " self cfg#" in line, False
        elif " by ucp_" in line:
            is_read = "ucp_get" in line and not is_self
        elif is_read and (row := _ROW.search(line)):
            found = row["by"]
    return found
