"""The same connector under the name ``NixlConnector``, for routers that accept only names they know.

--kv-transfer-config '{"kv_connector": "NixlConnector",
                       "kv_connector_module_path": "kvferry.integrations.vllm.as_nixl", "kv_role": "kv_both"}'

docs/vllm.md lists what vLLM itself does for this name. The class keeps its own name: vLLM looks up statistics
and metrics by it.
"""

from kvferry.integrations.vllm import KVFerryConnector as NixlConnector

__all__ = ["NixlConnector"]
