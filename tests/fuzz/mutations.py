"""Bytes that were cut, repeated, spliced, or have something extreme in them."""

from __future__ import annotations

import random
import struct

EXTREME = (
    b"\x00",
    b"\x7f",
    b"\x80",
    b"\xff",
    b"\xc0",
    b"\xff" * 8,
    b"\x00" * 8,
    b"\xcf" + b"\xff" * 8,
    b"\xd3\x80" + bytes(7),
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\x91" * 2000,
    b"\r\n\r\n",
    b": ",
)


def mutated(pick: random.Random, data: bytes, other: bytes = b"") -> bytes:
    """A few changes of one input; ``other`` is another one to take parts of."""
    for _ in range(pick.randrange(1, 6)):
        at = pick.randrange(len(data) + 1)
        stop = min(len(data), at + pick.randrange(40))
        cut = pick.randrange(len(other) + 1)
        new = pick.choice(
            (
                pick.choice(EXTREME),
                pick.randbytes(pick.randrange(8)),
                data[at:stop] * pick.randrange(3),
                other[cut : cut + 40],
                struct.pack(">I", pick.choice((0, 1, 0x7FFFFFFF, 0xFFFFFFFF, len(data)))),
                bytes([data[at] ^ 1 << pick.randrange(8)]) if at < len(data) else b"",
            )
        )
        data = data[:at] + new + data[max(at, stop - pick.randrange(40)) :]
    return data
