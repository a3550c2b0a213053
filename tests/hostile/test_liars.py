"""A reader without a secret calls a liar, because a forged ticket says so."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvferry.channel import Channel
from kvferry.errors import ChannelError
from kvferry.runtime.failure import refusal
from kvferry.wire.secret import Trust
from kvferry.wire.ticket import Ticket

SECONDS = 5


def rss_mib():
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmRSS"))


@pytest.mark.timed
@pytest.mark.parametrize("takes", [True, False], ids=["taken", "not taken"])
@pytest.mark.parametrize("kind", ["long", "short", "endless"])
def test_a_liar_that_floods_its_caller(kind, takes):
    """4.4 GB, once, through one ticket."""
    path = Path(__file__).with_name("liar.py")
    with subprocess.Popen([sys.executable, str(path), kind], stdout=subprocess.PIPE, text=True) as liar:
        assert liar.stdout is not None
        address = f"tcp://127.0.0.1:{liar.stdout.readline().strip()}"
        caller, before, most = Channel(), rss_mib(), 0
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            caller.send(address, b"hello")
            for _ in range(20):
                caller.wait(0.01, is_behind=not takes)
            most = max(most, rss_mib())
        caller.close()
        liar.kill()
    print(f"a liar, {kind}: {most - before} MiB more")
    assert most - before < 300


def test_what_is_no_tcp_address_of_this_host_is_not_called():
    for authority in ("ipc:///run/docker.sock", "inproc://wake", "udp://127.0.0.1:5"):
        ticket = Ticket("prefill", 7, 1, "r", authority, 3, {}, 30_000, host="here")
        assert refusal(ticket, Trust(), "here") is not None
    caller = Channel()
    caller.send("ipc:///tmp/any", b"hello")
    assert caller.dropped == {"address": 1}
    assert not caller._calls
    caller.close()
    with pytest.raises(ChannelError, match="tcp://HOST:PORT"):
        Channel(listen="ipc:///tmp/any")
