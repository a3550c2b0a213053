"""The connector by its name alone."""

import sys
from importlib.metadata import entry_points

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.plugins import load_general_plugins


@pytest.fixture
def _unknown(monkeypatch):
    monkeypatch.setattr("vllm.plugins.plugins_loaded", False)
    monkeypatch.delitem(KVConnectorFactory._registry, "KVFerryConnector", raising=False)


@pytest.mark.usefixtures("_unknown")
def test_vllm_finds_the_connector_by_its_name():
    load_general_plugins()
    config = KVTransferConfig(kv_connector="KVFerryConnector", kv_role="kv_both")
    found = KVConnectorFactory.get_connector_class(config)
    assert found.__module__ == "kvferry.integrations.vllm.connector"


@pytest.mark.usefixtures("_unknown")
def test_twice_is_once_and_nothing_is_loaded_by_it():
    (plugin,) = entry_points(group="vllm.general_plugins", name="kvferry")
    register = plugin.load()
    register()
    known = KVConnectorFactory._registry["KVFerryConnector"]
    register()
    assert KVConnectorFactory._registry["KVFerryConnector"] is known


def test_a_vllm_of_another_shape_starts_all_the_same(monkeypatch):
    """Whoever uses another connector must not notice that kvferry is installed."""
    (plugin,) = entry_points(group="vllm.general_plugins", name="kvferry")
    register = plugin.load()
    monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer.kv_connector.factory", None)
    register()
