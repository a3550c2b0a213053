"""The connector for vLLM, from outside vLLM's tree.

--kv-transfer-config '{"kv_connector": "KVFerryConnector",
                       "kv_connector_module_path": "kvferry.integrations.vllm", "kv_role": "kv_both"}'
"""

from contextlib import suppress

import vllm

from kvferry.integrations.supported import supported_text

try:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvferry.integrations.vllm.connector import KVFerryConnector
except ImportError as error:
    raise ImportError(
        f"kvferry's connector does not work with vLLM {vllm.__version__}: {error}. Tested are vLLM"
        f" {supported_text()} (docs/vllm.md)"
    ) from error

with suppress(ValueError):  # it is there already
    # Inside MultiConnector, vLLM finds the class of a connector's figures by the connector's name alone.
    KVConnectorFactory.register_connector("KVFerryConnector", __name__, "KVFerryConnector")

__all__ = ["KVFerryConnector"]
