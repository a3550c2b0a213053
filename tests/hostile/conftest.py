"""What strangers do to a source engine that lives in a process of its own."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq

from kvferry.wire.messages import decode_from_authority, encode


class Victim:
    """A source engine that is attacked."""

    def __init__(self, card_bytes):
        argv = [sys.executable, str(Path(__file__).with_name("victim.py")), str(card_bytes)]
        self._process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._asked, self._said = self._process.stdin, self._process.stdout
        self.address = self._said.readline().strip()
        self.before = self.state()

    def state(self):
        """Its memory in MiB, its longest stall, its status."""
        self._asked.write("\n")
        self._asked.flush()
        return json.loads(self._said.readline())

    def close(self):
        self._process.kill()
        self._process.wait()
        self._asked.close()
        self._said.close()


@pytest.fixture
def victim_of():
    victims = []

    def victim(card_bytes=1000):
        victims.append(Victim(card_bytes))
        return victims[-1]

    yield victim
    for one in victims:
        one.close()


class Stranger:
    """A socket of this host's that knows the address."""

    def __init__(self, address, **options):
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        for name, value in {"LINGER": 0, **options}.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.socket.connect(address)

    def say(self, message):
        self.socket.send(message if isinstance(message, bytes) else encode(message))

    def hear(self, seconds=30):
        assert self.socket.poll(seconds * 1000), f"no answer within {seconds} s"
        return decode_from_authority(self.socket.recv())

    def ask(self, question, answer, seconds=60):
        """As the protocol has it: what is not answered is asked again."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.say(question)
            while self.socket.poll(1000):
                heard = decode_from_authority(self.socket.recv())
                if isinstance(heard, answer):
                    return heard
        raise AssertionError(f"no {answer.__name__} within {seconds} s")

    def close(self):
        self.socket.close(0)


@pytest.fixture
def stranger_at():
    strangers = []

    def stranger(address, **options):
        strangers.append(Stranger(address, **options))
        return strangers[-1]

    yield stranger
    for one in strangers:
        one.close()
