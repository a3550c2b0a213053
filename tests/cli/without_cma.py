"""Runs a command in which process_vm_readv and process_vm_writev are refused, as a seccomp filter may.

python without_cma.py COMMAND …
"""

import ctypes
import os
import platform
import struct
import sys

NUMBERS = {"x86_64": (310, 311), "aarch64": (270, 271)}
"""Of the two calls."""
LOAD_NUMBER, JUMP_IF_EQUAL, RETURN = 0x20, 0x15, 0x06
REFUSE_EPERM, ALLOW = 0x0005_0001, 0x7FFF_0000
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, FILTER = 22, 38, 2


class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))


def refuse(numbers: tuple[int, int]) -> None:
    first, second = numbers
    steps = b"".join(
        struct.pack("HBBI", *step)
        for step in (
            (LOAD_NUMBER, 0, 0, 0),
            (JUMP_IF_EQUAL, 1, 0, first),
            (JUMP_IF_EQUAL, 0, 1, second),
            (RETURN, 0, 0, REFUSE_EPERM),
            (RETURN, 0, 0, ALLOW),
        )
    )
    room = ctypes.create_string_buffer(steps, len(steps))
    program = Program(len(steps) // 8, ctypes.addressof(room))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(
        PR_SET_SECCOMP, FILTER, ctypes.byref(program), 0, 0
    ):
        sys.exit(f"no filter: {os.strerror(ctypes.get_errno())}")


if __name__ == "__main__":
    refuse(NUMBERS[platform.machine()])
    os.execvp(sys.argv[1], sys.argv[1:])
