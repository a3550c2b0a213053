"""A vLLM plugin: with it, ``"kv_connector": "KVFerryConnector"`` needs no module path.

vLLM calls ``register`` in each of its processes, whichever connector is configured, so it is cheap and never
fails. The connector checks the vLLM version when it is created.
"""

from __future__ import annotations

from contextlib import suppress

NAME = "KVFerryConnector"


def register() -> None:
    """Register the connector's module path, without importing the connector."""
    with suppress(ImportError, ValueError):  # another vLLM layout, or already registered
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        KVConnectorFactory.register_connector(NAME, "kvferry.integrations.vllm", NAME)
