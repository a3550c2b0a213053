"""The manifest of a running vLLM server, by its HTTP address.

The server prefills a short prompt; the answer's ticket has the address of the engine, which describes itself.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from kvferry.core.manifest import Manifest
from kvferry.endpoint.asking import manifest_of
from kvferry.endpoint.secret_source import secret_from_environment
from kvferry.errors import SpecError
from kvferry.wire.ticket import Ticket, from_text

SECONDS = 60.0
"""A busy server may queue the prompt."""
MAX_ANSWER_BYTES = 1 << 20
PROMPT = "kvferry plan prefills this prompt to find the engine, and transfers nothing."
PARAMS = {"do_remote_decode": True, "do_remote_prefill": False}


def served_manifest(url: str) -> Manifest:
    """Raises SpecError if the server is not a prefill engine with kvferry's connector."""
    return manifest_of(_ticket(url.rstrip("/")), secret_from_environment())


def _ticket(url: str) -> Ticket:
    models = _answer(f"{url}/v1/models")
    try:
        model = models["data"][0]["id"]
    except (LookupError, TypeError):
        raise SpecError("it names no model at /v1/models: expected the address of vllm serve") from None
    body = {"model": model, "prompt": PROMPT, "max_tokens": 1, "kv_transfer_params": PARAMS}
    params = _answer(f"{url}/v1/completions", body).get("kv_transfer_params")
    text = params.get("kvferry_ticket") if isinstance(params, dict) else None
    if not isinstance(text, str):
        raise SpecError(
            "it returned no ticket: expected a vLLM engine with KVFerryConnector and kv_role kv_producer or"
            ' kv_both. For a decode engine, set the connector\'s option "dump": "FOLDER", and pass its file'
        )
    return from_text(text)


def _answer(url: str, body: object = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data, {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=SECONDS) as answer:
            found = json.loads(answer.read(MAX_ANSWER_BYTES))
    except HTTPError as error:
        raise SpecError(f"{url} answered {error.code} {error.reason}") from None
    except URLError as error:
        raise SpecError(f"{url} cannot be reached: {error.reason}") from None
    except (OSError, ValueError) as error:
        raise SpecError(f"{url} sent no valid answer: {error}") from None
    if not isinstance(found, dict):
        raise SpecError(f"{url} sent no JSON object")
    return found
