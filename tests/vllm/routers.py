"""What other projects' routers send to the two engines of a request, as data: facts from their sources.

No router runs here. A flow says which fields of a client's body it changes for either engine, and what it
does with ``kv_transfer_params``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Body = dict[str, Any]
"""Of a request to vLLM's OpenAI server, or what comes to the same."""
PARAMS = "kv_transfer_params"
ASK = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""NixlConnector's request for a prefill, which all of these send."""


@dataclass(frozen=True)
class Flow:
    """One router's two requests. Both have the same X-Request-Id, so that vLLM gives both one name."""

    name: str
    source: str
    """Project, commit and date, file, function."""
    prefill: Mapping[str, Any]
    """Fields that are set for the prefill engine."""
    dropped: tuple[str, ...] = ()
    """Fields that are left out there."""
    decode_params: Mapping[str, Any] | None = field(default_factory=dict)
    """Keys that are set in the prefill engine's answer for the decode engine; None: the answer is dropped."""

    def to_prefill(self, body: Body) -> Body:
        return {key: value for key, value in body.items() if key not in self.dropped} | dict(self.prefill)

    def to_decode(self, body: Body, answered: Mapping[str, Any] | None) -> Body:
        if self.decode_params is None or not answered:
            return dict(body)
        return {**body, PARAMS: {**answered, **self.decode_params}}


_LLM_D = "llm-d/llm-d-router ebab687, 21 August 2026, pkg/sidecar/proxy/connector_nixlv2.go"
_STACK = "vllm-project/production-stack a6c01db, 5 August 2026, request_service/request.py"
_DYNAMO = "ai-dynamo/dynamo bb3100e, 22 August 2026, components/src/dynamo/vllm"
_ONE_TOKEN = {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 1}

FLOWS = (
    Flow(
        "llm-d",
        f"{_LLM_D}, handleNIXLV2",
        {**_ONE_TOKEN, "stream": False, PARAMS: ASK},
        dropped=("stream_options",),
    ),
    Flow(
        "llm-d-with-kv-source",
        f"{_LLM_D}, handleNIXLV2 with addP2PPullToPrefill of connector_p2p.go",
        {
            **_ONE_TOKEN,
            "stream": False,
            PARAMS: {
                **ASK,
                "remote_kv_source": {"kv_request_id": "a", "remote_host": "10.0.0.9", "remote_port": 7},
            },
        },
        dropped=("stream_options",),
    ),
    Flow(
        "production-stack-orchestrated",
        f"{_STACK}, route_orchestrated_disaggregated_request",
        {"max_tokens": 1, "stream": False, PARAMS: ASK},
        dropped=("stream_options",),
        decode_params={"remote_host": "prefill-0"},  # the host of the prefill engine's URL
    ),
    Flow(
        "production-stack-disaggregated-prefill",
        f"{_STACK}, route_disaggregated_prefill_request; made for connectors with a store",
        {"max_tokens": 1, "stream": False},
        dropped=("stream_options", "min_tokens", "max_completion_tokens"),
        decode_params=None,
    ),
    Flow(
        "dynamo",
        f"{_DYNAMO}/kv_connector_protocols.py, NixlConnectorProtocol; handlers.py, _generate_token_mode",
        {"max_tokens": 1, "min_tokens": 1, PARAMS: {**ASK, "router_hint": {"worker": 3}}},
    ),
)

DYNAMO_NAMES = {"NixlConnector", "MooncakeConnector"}
"""The connectors that Dynamo accepts (KV_CONNECTOR_PROTOCOLS of kv_connector_protocols.py). Inside of
MultiConnector exactly one child must have one of these names."""
