"""The connector for vLLM 0.32, from outside vLLM's tree.

--kv-transfer-config '{"kv_connector": "KVFerryConnector",
                       "kv_connector_module_path": "kvferry.integrations.vllm", "kv_role": "kv_both"}'
"""

from contextlib import suppress

from kvferry.integrations.vllm.version import check_version

check_version()  # before anything of vLLM's is imported, whose absence would say less

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: E402

from kvferry.integrations.vllm.connector import KVFerryConnector  # noqa: E402

with suppress(ValueError):  # it is there already
    # Inside MultiConnector, vLLM finds the class of a connector's figures by the connector's name alone.
    KVConnectorFactory.register_connector("KVFerryConnector", __name__, "KVFerryConnector")

__all__ = ["KVFerryConnector"]
