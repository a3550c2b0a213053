"""A liar at an address that a ticket names: ``python liar.py``. It says its port, and floods whoever calls."""

import socket
import threading

from tests.hostile import zmtp

ANSWERS = zmtp.frame(bytes(8 << 20)), zmtp.frame(b"?") * 50_000, zmtp.frame(bytes(60_000), has_more=True)


def flood(caller: socket.socket, data: bytes) -> None:
    ready = b"\x05READY" + zmtp.property_of(b"Socket-Type", b"ROUTER")
    caller.sendall(zmtp.GREETING + b"\x04" + bytes([len(ready)]) + ready)
    while True:
        caller.sendall(data)


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        print(server.getsockname()[1], flush=True)
        for number in range(1_000_000):
            work = server.accept()[0], ANSWERS[number % len(ANSWERS)]
            threading.Thread(target=flood, args=work, daemon=True).start()


if __name__ == "__main__":
    main()
