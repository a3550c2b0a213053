"""Which sockets a transport listens at: none of its own, and with NIXL none that another host could reach."""

from contextlib import suppress
from ipaddress import ip_address

import numpy as np
import pytest

from kvferry import Region
from kvferry.cli.processes import FABRICS
from kvferry.errors import TransportError
from kvferry.host.listening import listeners
from kvferry.transport.process import ProcessTransport
from kvferry.transport.settings import UCX_DEVICES, UCX_TRANSPORTS, Expose


def opened(**options):
    """Where a transport that is registered listens, and what its card's agent is called."""
    memory, before = np.zeros(1 << 16, np.uint8), listeners()
    transport = ProcessTransport(**options)
    try:
        transport.register([Region("kv", memory.nbytes, address=memory.ctypes.data)])
        return listeners() - before
    finally:
        transport.close()


@pytest.mark.parametrize("expose", [None, Expose.NOTHING, Expose.HOST])
def test_a_transport_listens_nowhere(monkeypatch, expose):
    monkeypatch.delenv("KVFERRY_EXPOSE", raising=False)
    assert opened(expose=expose) == set()


def test_without_word_of_the_environment_ucx_opens_no_port(monkeypatch):
    """Where there is no RDMA either, it may not make an agent at all."""
    pytest.importorskip("nixl", reason="NIXL is not installed")
    for name in (UCX_TRANSPORTS, UCX_DEVICES):
        monkeypatch.delenv(name, raising=False)
    with suppress(TransportError):
        assert opened(expose=Expose.FABRIC) == set()


def test_where_ucx_is_told_to_use_tcp_it_listens_on_loopback(monkeypatch):
    pytest.importorskip("nixl", reason="NIXL is not installed")
    monkeypatch.setenv(UCX_TRANSPORTS, FABRICS["cma"][UCX_TRANSPORTS])
    found = opened(expose=Expose.FABRIC)
    assert found, "UCX connects by TCP"
    assert [each for each in found if not ip_address(each.host).is_loopback] == []


def test_ucx_is_not_allowed_to_listen_elsewhere(monkeypatch):
    monkeypatch.setenv(UCX_TRANSPORTS, "all")
    monkeypatch.setenv(UCX_DEVICES, "eth0")
    with pytest.raises(TransportError, match="opens TCP ports through which every client"):
        opened(expose=Expose.FABRIC)
