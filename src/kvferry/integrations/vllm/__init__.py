"""kvferry's out-of-tree connector for vLLM.

--kv-transfer-config '{"kv_connector": "KVFerryConnector",
                       "kv_connector_module_path": "kvferry.integrations.vllm", "kv_role": "kv_both"}'
"""

from contextlib import suppress

import vllm

from kvferry.integrations.known_vllm import supported_text

try:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvferry.integrations.vllm.connector import KVFerryConnector
except ImportError as error:
    raise ImportError(
        f"kvferry's connector does not work with vLLM {vllm.__version__}: {error}. Tested"
        f" versions: {supported_text()} (docs/vllm.md)"
    ) from error

with suppress(ValueError):  # already registered
    # Inside MultiConnector, vLLM looks up a connector's statistics class by the connector's name.
    KVConnectorFactory.register_connector("KVFerryConnector", __name__, "KVFerryConnector")

__all__ = ["KVFerryConnector"]
