"""Makes ``"kv_connector": "KVFerryConnector"`` enough: vLLM calls ``register`` in each of its processes.

It runs in every vLLM of an environment that has kvferry, whoever's connector is used. So it does next to
nothing, and never fails: whether this vLLM is one that kvferry knows is looked at when the connector is made.
"""

from __future__ import annotations

from contextlib import suppress

NAME = "KVFerryConnector"


def register() -> None:
    """Tell vLLM where the connector is; nothing of it is loaded."""
    with suppress(ImportError, ValueError):  # a vLLM of another shape, or it is known already
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        KVConnectorFactory.register_connector(NAME, "kvferry.integrations.vllm", NAME)
