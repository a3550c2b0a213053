"""A liar at an address that a ticket names: ``python liar.py KIND``. It says its port, and floods callers."""

import contextlib
import socket
import sys
import threading

from tests.hostile import zmtp

ANSWERS = {
    "long": zmtp.frame(bytes(8 << 20)),
    "short": zmtp.frame(b"?") * 50_000,
    "endless": zmtp.frame(bytes(60_000), has_more=True),
}


def flood(caller: socket.socket, data: bytes) -> None:
    ready = b"\x05READY" + zmtp.property_of(b"Socket-Type", b"ROUTER")
    caller.sendall(zmtp.GREETING + b"\x04" + bytes([len(ready)]) + ready)
    with contextlib.suppress(OSError):
        while True:
            caller.sendall(data)


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            work = server.accept()[0], ANSWERS[sys.argv[1]]
            threading.Thread(target=flood, args=work, daemon=True).start()


if __name__ == "__main__":
    main()
