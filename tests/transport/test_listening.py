"""UCX authenticates nobody: where only this host is served, it listens on loopback only."""

from dataclasses import replace
from ipaddress import ip_address

import numpy as np
import pytest

from kvferry import Region
from kvferry.transport.ucx import UCX_DEVICES, UcxSettings

pytest.importorskip("nixl", reason="NIXL is not installed")

from kvferry.transport.nixl import NixlTransport
from tests.transport.listening import listening


def test_an_agent_of_one_host_listens_on_loopback_only(monkeypatch):
    monkeypatch.delenv(UCX_DEVICES, raising=False)
    memory = np.zeros(1 << 16, np.uint8)
    before = listening()
    settings = replace(UcxSettings.from_environment({}), is_one_host=True)
    transport = NixlTransport(settings=settings)
    try:
        transport.register([Region("kv", memory.nbytes, address=memory.ctypes.data)])
        opened = listening() - before
        assert opened, "UCX wires up over TCP"
        assert [address for address, _ in opened if not ip_address(address).is_loopback] == []
    finally:
        transport.close()
