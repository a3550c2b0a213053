"""The connector for vLLM 0.32, from outside vLLM's tree.

--kv-transfer-config '{"kv_connector": "KVFerryConnector",
                       "kv_connector_module_path": "kvferry.integrations.vllm", "kv_role": "kv_both"}'
"""

from kvferry.integrations.vllm.version import check_version

check_version()  # before anything of vLLM's is imported, whose absence would say less

from kvferry.integrations.vllm.connector import KVFerryConnector  # noqa: E402

__all__ = ["KVFerryConnector"]
