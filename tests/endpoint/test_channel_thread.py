"""What a channel's thread is asked to send in the middle of its own work goes out at once."""

import threading
import time

from kvferry.channel import Channel, Received
from kvferry.endpoint.edges import ChannelThread


def test_what_it_sends_goes_out_while_it_is_busy() -> None:
    """An answer that is handed over to another thread waits until that one gets the interpreter."""
    hold, listener = threading.Event(), ChannelThread(Channel(listen="tcp://127.0.0.1:*"))

    def receive(received) -> None:
        if isinstance(received, Received):
            listener.send(received.reply_to, b"at once")
            hold.wait(60)

    listener.start("listener", receive, lambda: False)
    caller = Channel()
    caller.send(listener.address, b"hello")
    heard: list = []
    deadline = time.monotonic() + 20
    while not heard and time.monotonic() < deadline:
        heard += [one.data for one in caller.wait(0.1) if isinstance(one, Received)]
    hold.set()
    caller.close()
    listener.close()
    assert heard == [b"at once"]
