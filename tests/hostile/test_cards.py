"""Cards reach the fabric only from who knows the secret: 3 of 305 mutated ones ended the reader inside NIXL.

A source engine has died, and somebody else sits at its address. Readers still have its tickets.
"""

import random
import socket
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from kvferry.endpoint import Destination, SourceEngine
from kvferry.models import Topology, describe, model_from_config
from kvferry.runtime import FailureCode, Timing
from kvferry.transport.memory import Hub, MemoryTransport
from kvferry.wire.messages import PROTOCOL, RankDescription, RankDescriptions, Welcome, encode
from kvferry.wire.secret import Secret, Trust

FLEET = Trust(Secret(b"of this fleet, 128 bit"))
MODEL = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 64}
NUM_CARDS = 10_000


def frame(data, kind=0):
    """A frame of ZMTP: 4 is a command, 2 one with a long length."""
    length = len(data).to_bytes(8, "big") if len(data) > 255 else bytes([len(data)])
    return bytes([kind | (2 if len(data) > 255 else 0)]) + length + data


def greeting(mechanism):
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + b"\x01" + bytes(31)


READY = frame(b"\x05READY\x0bSocket-Type\x00\x00\x00\x06ROUTER\x08Identity\x00\x00\x00\x00", kind=4)


class Impostor:
    """Sits at an address, speaks ZMTP, and says mutated descriptions of itself to everybody who calls."""

    def __init__(self, address, mechanism, generation):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._mechanism, self._generation, self.num_calls = mechanism, generation, 0
        self._chance = random.Random(7)
        self._cards = b"".join(frame(said) for _ in range(NUM_CARDS) for said in self._mutated())
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind((host, int(port)))
        self._socket.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _mutated(self):
        card = bytearray(self._chance.randbytes(200))
        card[self._chance.randrange(len(card))] ^= 1 << self._chance.randrange(8)
        ranks = {0: RankDescription(b"layout", ((4096, "cpu"),), bytes(card))}
        welcome = Welcome(PROTOCOL, "prefill", self._generation, "memory", bytes(card))
        return encode(welcome), encode(RankDescriptions(1, self._generation, ranks))

    def _serve(self):
        while True:
            try:
                call, _ = self._socket.accept()
            except OSError:
                return
            self.num_calls += 1
            threading.Thread(target=self._say, args=(call,), daemon=True).start()

    def _say(self, call):
        with call:
            try:
                call.sendall(greeting(self._mechanism) + READY)
                time.sleep(0.2)  # what comes with the handshake is dropped with it
                call.sendall(self._cards)
                call.settimeout(2)
                while call.recv(1000):
                    pass
            except OSError:
                pass

    def close(self):
        self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


class Watched(MemoryTransport):
    """Counts who comes as far as the fabric."""

    num_connects = 0

    def connect(self, *args, **kwargs):
        self.num_connects += 1
        return super().connect(*args, **kwargs)


def reader(transport, trust):
    """A destination with real memory."""
    manifest = describe(model_from_config(MODEL), Topology.parse("block=16,blocks=8"), "decode")
    (rank,) = manifest.ranks
    buffers = [np.zeros(region.num_bytes, np.uint8) for region in rank.regions]
    regions = [
        replace(region, address=buffer.ctypes.data)
        for region, buffer in zip(rank.regions, buffers, strict=True)
    ]
    manifest = replace(manifest, ranks=(replace(rank, regions=tuple(regions)),))
    timing = Timing(meet=60, retry=0.1)
    destination = Destination(
        manifest, 0, transport, trust=trust, timing=timing, accept_unknown_identity=True
    )
    return destination, buffers


def orphan(trust):
    """A ticket whose engine is gone."""
    engine = SourceEngine("prefill", 1, trust=trust)
    ticket = engine.offer("request", {}, 3)
    engine.close()
    return ticket


@pytest.mark.parametrize("mechanism", [b"NULL", b"CURVE"])
def test_no_card_of_somebody_without_the_secret_reaches_the_fabric(mechanism):
    ticket = orphan(FLEET)
    impostor = Impostor(ticket.authority, mechanism, ticket.generation)
    transport, heard = Watched(Hub()), []
    destination, _buffers = reader(transport, FLEET)

    def hear(*args):
        heard.append(args)
        return []

    destination._reader.receive = hear
    try:
        handle = destination.hold(ticket)
        deadline = time.monotonic() + 10
        while not impostor.num_calls and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(2)
        called = f"{mechanism.decode()}: {impostor.num_calls} calls"
        print(f"\n{called}, {NUM_CARDS} mutated cards on offer in each: {len(heard)} heard")
        destination.abort(handle)
        assert (heard, transport.num_connects) == ([], 0)
        assert impostor.num_calls
        (report,) = destination.poll() or [None]
        assert report is None or report.failure is not None
    finally:
        destination.close()
        impostor.close()


def test_without_a_secret_they_do_which_is_why_it_serves_its_own_host_only():
    """The control: the impostor is good enough to be believed where nothing proves who it is."""
    ticket = orphan(Trust())
    impostor = Impostor(ticket.authority, b"NULL", ticket.generation)
    destination, _buffers = reader(Watched(Hub()), Trust())
    try:
        handle = destination.hold(ticket)
        deadline = time.monotonic() + 20
        reports: list = []
        while not reports and time.monotonic() < deadline:
            time.sleep(0.05)
            reports = destination.poll()
        assert [report.handle for report in reports] == [handle]
        assert reports[0].failure.code is FailureCode.BAD_MANIFEST, "its description was looked at"
    finally:
        destination.close()
        impostor.close()
