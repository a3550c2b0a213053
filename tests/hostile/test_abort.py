"""Nobody ends another one's process by the way he connects: ZeroMQ aborts where it meets what it excluded."""

import os
import random
import signal
import struct
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing

import zmq

from tests.hostile import zmtp

SECONDS = 12


def come_and_go(address, seed, until):
    """Under a few names, with more messages than are taken, and gone in the middle of the answers."""
    pick, context = random.Random(seed), zmq.Context()
    names = [pick.randbytes(16).replace(b"\0", b"\1") for _ in range(3)]
    while time.monotonic() < until:
        caller: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        caller.setsockopt(zmq.IDENTITY, pick.choice(names))
        caller.connect(address)
        for _ in range(pick.randrange(1, 50)):
            caller.send(b"z" * pick.choice((1, 5000)))
        caller.poll(pick.choice((0, 0, 1, 5)))
        caller.close(0)
    context.term()


LISTEN = """
import sys, time
from kvferry.channel import Channel, Received
listener = Channel(listen="tcp://127.0.0.1:*")
print(listener.address, flush=True)
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end:
    for received in listener.wait(0.01):
        for _ in range(3):
            listener.send(received.reply_to, b"a" * 2000)
print("alive", flush=True)
"""


def test_callers_that_come_and_go_under_one_name():
    """Before: ``Assertion failed: !_io_error``, after 2 to 20 seconds."""
    command = [sys.executable, "-c", LISTEN, str(SECONDS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address, until = process.stdout.readline().strip(), time.monotonic() + SECONDS - 1
        callers = [threading.Thread(target=come_and_go, args=(address, i, until)) for i in range(3)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert process.stdout.readline() == "alive\n"


TALK = """
import zmq
talker = zmq.Context().socket(zmq.ROUTER)
talker.setsockopt(zmq.SNDHWM, 5000)
print(talker.bind_to_random_port("tcp://127.0.0.1"), flush=True)
who, _ = talker.recv_multipart()
while True:
    talker.send_multipart([who, b"x" * 3000])
"""

CALL = """
import sys, time
from kvferry.channel import Channel
caller, heard = Channel(), 0
caller.send(sys.argv[1], b"hello")
while heard < 5:
    heard += len(caller.wait(0.1))
print("busy", flush=True)
time.sleep(6.5)
for _ in range(20):
    caller.wait(0.1)
print("alive", flush=True)
"""


def test_a_peer_that_says_much_and_then_falls_silent():
    """Before: ``Assertion failed: _input_stopped``, where nobody took its messages for a while."""
    talk, call = ([sys.executable, "-c", text] for text in (TALK, CALL))
    with subprocess.Popen(talk, stdout=subprocess.PIPE, text=True) as talker:
        assert talker.stdout is not None
        address = f"tcp://127.0.0.1:{talker.stdout.readline().strip()}"
        with subprocess.Popen([*call, address], stdout=subprocess.PIPE, text=True) as caller:
            assert caller.stdout is not None
            assert caller.stdout.readline() == "busy\n"
            time.sleep(1.5)
            os.kill(talker.pid, signal.SIGSTOP)
            try:
                assert caller.stdout.readline() == "alive\n"
            finally:
                talker.kill()


ECHO = """
from kvferry.channel import Channel, Received
listener = Channel(listen="tcp://127.0.0.1:*")
print(listener.address, flush=True)
while True:
    for received in listener.wait(1.0):
        listener.send(received.reply_to, received.reply_to.encode() + received.data)
"""


def test_no_caller_chooses_its_routing_id():
    """Before: ``Assertion failed: ok``. The ids that ZeroMQ makes up count upwards from a number that is the
    same in every process; a caller that claimed the next one had the next anonymous caller end the process.
    """
    command = [sys.executable, "-c", ECHO]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, ExitStack() as stack:
        stack.callback(process.kill)
        assert process.stdout is not None
        address = process.stdout.readline().strip()

        def call(identity: bytes = b"") -> bytes:
            caller = stack.enter_context(closing(zmtp.connected(address, identity)))
            caller.sendall(zmtp.frame(b"?"))
            return bytes.fromhex(zmtp.heard(caller).decode()[1:-1].partition(".")[2])

        first = call()
        following = [
            first[:1] + struct.pack(">I", struct.unpack(">I", first[1:])[0] + i) for i in range(1, 9)
        ]
        claimed = [call(name) for name in reversed(following)]
        anonymous = [call() for _ in range(8)]
        assert len({first, *claimed, *anonymous}) == 17, "each has a route of its own"
        assert call(b"a name that is claimed twice") != call(b"a name that is claimed twice")
        assert process.poll() is None
