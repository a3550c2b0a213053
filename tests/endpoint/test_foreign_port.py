"""A ticket may name any port: who does not answer is called for as long as a meeting may take, not longer."""

import socket
import threading
import time

import msgspec
import pytest

from kvferry.runtime import Timing


class ForeignServer:
    """Something else that listens, and hangs up on what it does not understand."""

    def __init__(self):
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._socket.getsockname()[1]}"
        self.calls = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                call, _ = self._socket.accept()
            except OSError:
                return
            self.calls.append(time.monotonic())
            call.close()

    def close(self):
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


@pytest.fixture
def foreign():
    server = ForeignServer()
    yield server
    server.close()


@pytest.mark.timed
def test_a_foreign_port_is_not_called_after_its_fetch_has_failed(pair_of, foreign):
    """On the old code it was called for as long as the ticket's lease, here two minutes, and longer."""
    pair = pair_of(timing=Timing(meet=1.0, retry=0.1))
    ticket = msgspec.structs.replace(pair.offer(), authority=foreign.address, lease_ms=120_000)
    started, handle = time.monotonic(), pair.destination.hold(ticket)
    assert pair.reports()[handle].failure is not None
    ended = time.monotonic()
    time.sleep(3.0)
    late = [call for call in foreign.calls if call > ended + 0.5]
    print(f"\n{len(foreign.calls)} calls, the last {foreign.calls[-1] - started:.1f} s after the first")
    assert foreign.calls
    assert not late
    assert pair.destination.status()["settling"] == 0
