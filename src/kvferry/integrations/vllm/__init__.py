"""The connector for vLLM 0.32, from outside vLLM's tree.

--kv-transfer-config '{"kv_connector": "KVFerryConnector",
                       "kv_connector_module_path": "kvferry.integrations.vllm", "kv_role": "kv_both"}'
"""

from kvferry.integrations.vllm.connector import KVFerryConnector

__all__ = ["KVFerryConnector"]
