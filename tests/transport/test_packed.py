"""The packed way between two processes: the laws of transports, and what only this way has."""

from typing import ClassVar

import pytest

from kvferry.testing.packed import AskingTransport
from kvferry.testing.sources import serving
from kvferry.testing.transport_laws import TransportLaws
from kvferry.testing.transport_world import REGION_BYTES, World, stale_memory

pytest.importorskip("nixl", exc_type=ImportError)

PACKED = {"KVFERRY_PACKED_READS": "require"}


class PackedLaws(TransportLaws):
    env: ClassVar[dict[str, str]] = PACKED

    @pytest.fixture(scope="class")
    @classmethod
    def served(cls):
        with serving(3, REGION_BYTES, "cpu", cls.env) as served:
            yield served

    @pytest.fixture
    def world(self, served, monkeypatch):
        for name, value in self.env.items():
            monkeypatch.setenv(name, value)
        return World(AskingTransport, stale_memory(), served.sources)


class TestPacked(PackedLaws):
    pass


class TestPackedOverTcp(PackedLaws):
    env: ClassVar[dict[str, str]] = PACKED | {"UCX_TLS": "tcp,self"}
