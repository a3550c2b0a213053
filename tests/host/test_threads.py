"""The loop of sockets: whoever says much to its thread keeps no socket waiting."""

import socket
import threading

from kvferry.host.threads import SocketLoop


def test_events_that_never_end_keep_no_socket_waiting() -> None:
    loop = SocketLoop("loop", lambda now: float("inf"))
    heard = threading.Event()
    ours, theirs = socket.socketpair()

    def again() -> None:
        if not heard.is_set():
            loop.put(again)

    with ours, theirs:
        loop.watch(ours, heard.set)
        loop.put(again)
        loop.start()
        theirs.send(b"!")
        was_heard = heard.wait(30)
        heard.set()
        loop.put(loop.stop)
        assert loop.join(30)
    assert was_heard


def test_what_an_event_says_is_done_before_the_end() -> None:
    loop, done = SocketLoop("loop", lambda now: float("inf")), []
    loop.put(lambda: loop.put(lambda: done.append("last")))
    loop.put(loop.stop)
    loop.start()
    assert loop.join(30)
    assert done == ["last"]
