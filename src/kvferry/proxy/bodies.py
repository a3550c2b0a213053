"""What a client's request becomes for a prefill server, and for a decode server."""

from __future__ import annotations

from typing import Any

JsonObject = dict[str, Any]

TRANSFER = "kv_transfer_params"
"""The field in which tickets travel."""

TRANSFER_FIELDS = frozenset({TRANSFER, "ec_transfer_params"})
INTERNAL_FIELDS = TRANSFER_FIELDS | {"request_id"}
"""What servers and the proxy say to each other. From a client it would name a stranger's cache, or pin blocks
for nobody, or take the name of another request."""
EXTRA_ARGUMENTS = "vllm_xargs"
"""vLLM takes the fields of a transfer from here, too."""

ABOUT_THE_ANSWER = frozenset({"stream_options", "max_completion_tokens", "min_tokens", "n", "best_of"})
"""What a prefill is not asked: it answers once, with one token."""
ASK_FOR_TICKET = {"do_remote_decode": True, "do_remote_prefill": False}


def without_internal_fields(body: JsonObject) -> JsonObject:
    """The request as a client may send it.

    >>> without_internal_fields({"prompt": "a", "kv_transfer_params": {}, "vllm_xargs": {"x": 1}})
    {'prompt': 'a', 'vllm_xargs': {'x': 1}}
    """
    kept = {key: value for key, value in body.items() if key not in INTERNAL_FIELDS}
    extra = kept.get(EXTRA_ARGUMENTS)
    if isinstance(extra, dict) and not TRANSFER_FIELDS.isdisjoint(extra):
        kept[EXTRA_ARGUMENTS] = {key: value for key, value in extra.items() if key not in TRANSFER_FIELDS}
    return kept


def fits_a_ticket(body: JsonObject) -> bool:
    """Whether a decode server will make one request of it, and needs nothing of the prompt but its cache.

    What does not fit is for the decode server alone: slower there, and right.

    >>> fits_a_ticket({"prompt": [1, 2, 3]}), fits_a_ticket({"prompt": ["a", "b"]}), fits_a_ticket({"n": 2})
    (True, False, False)
    """
    prompt = body.get("prompt")
    is_many = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    is_many = is_many or any(body.get(key) not in (None, 1) for key in ("n", "best_of"))
    asks_of_prompt = body.get("echo") or body.get("prompt_logprobs") is not None
    return not (is_many or asks_of_prompt or body.get("use_beam_search"))


def prefill_body(body: JsonObject) -> JsonObject:
    """The request that a prefill server gets."""
    kept = {key: value for key, value in body.items() if key not in ABOUT_THE_ANSWER}
    return {**kept, "max_tokens": 1, "stream": False, TRANSFER: ASK_FOR_TICKET}


def decode_body(body: JsonObject, transfer: JsonObject) -> JsonObject:
    """The request that a decode server gets; ``transfer`` is what the prefill server gave, as it is."""
    return {**body, TRANSFER: transfer} if transfer else body
