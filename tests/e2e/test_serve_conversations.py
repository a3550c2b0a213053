"""Conversations through ``kvferry proxy`` with real ``vllm serve``: later turns are read back."""

import json
import os
import shlex
import signal
from importlib.metadata import version
from urllib.request import Request, urlopen
from uuid import uuid4

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("nixl", reason="NIXL is not installed")

from tests.e2e.needs import needs_vllm
from tests.e2e.test_serve import Ask, Pair, events, post, proxy, send, tokens, until

pytestmark = [pytest.mark.slow, *needs_vllm]

TRANSFER = {
    "kv_connector": "KVFerryConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"bidirectional_kv_xfer": True},
}
NUM_TURNS, NUM_TOKENS = 5, 40
HAS_OFFERS_IN_STREAMS = not version("vllm").startswith("0.32.")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    both = shlex.join(["--kv-transfer-config", json.dumps(TRANSFER)])
    log = tmp_path_factory.mktemp("serve") / "pair.log"
    pair = Pair(log, PREFILL_ARGS=both, DECODE_ARGS=both, VLLM_SERVER_DEV_MODE="1")
    try:
        pair.wait_ready()
        yield pair
    finally:
        if pair.process.poll() is None:
            pair.end(signal.SIGTERM)


@pytest.mark.parametrize("is_streaming", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("form", ["token ids", "chat"])
def test_turns_are_read_back_and_every_token_is_one_servers_own(pair, form, is_streaming, tmp_path, capsys):
    """The prefill server forgets each turn. Whether an engine serves a claim in time is up to the machine."""
    prefill, decode = pair.server("prefill"), pair.server("decode")
    before = prefill.num_fetched()
    messages = [{"role": "user", "content": "How deep is the Styx? " * 15}]
    prompt, salt = list(os.urandom(300)), uuid4().hex
    with proxy([prefill.url], [decode.url], tmp_path / "proxy.log") as url:
        for _ in range(NUM_TURNS):
            more = {"stream": is_streaming, "cache_salt": salt}
            if form == "chat":
                body = {"messages": messages, "max_completion_tokens": NUM_TOKENS}
                ask = Ask("/v1/chat/completions", {**body, **more})
            else:
                ask = Ask("/v1/completions", {"prompt": prompt, "max_tokens": NUM_TOKENS, **more})
            found, text = answer(url, ask)
            assert [found] == tokens(prefill.url, Ask(ask.path, {**ask.body, "cache_salt": uuid4().hex}))
            prompt = [*prompt, *found, *os.urandom(30)]
            messages = [
                *messages,
                {"role": "assistant", "content": text},
                {"role": "user", "content": "And?"},
            ]
            until(lambda: forgets(prefill.url), "the prefill server forgets")
        with urlopen(f"{url}/metrics") as metrics:
            hits = [
                line for line in metrics.read().decode().splitlines() if 'turns_total{result="hit"' in line
            ]
    num_read = prefill.num_fetched() - before
    with capsys.disabled():
        print(f"\n{form}, {'stream' if is_streaming else 'whole'}: {num_read:.0f} tokens read back")
    has_offers = HAS_OFFERS_IN_STREAMS or not is_streaming
    assert [line.rpartition(" ")[2] for line in hits] == [f"{NUM_TURNS - 1}.0"] * has_offers
    assert (num_read > 256) == has_offers


def answer(url: str, ask: Ask) -> tuple[list[int], str]:
    """Tokens and text; nothing in it says what servers say to each other."""
    found: list[int] = []
    text = ""
    with post(url, ask) as response:
        parts = list(events(response)) if ask.body["stream"] else [json.load(response)]
    for part in parts:
        assert "kv_transfer_params" not in part
        for choice in part["choices"]:
            said = choice.get("message") or choice.get("delta") or choice
            found += choice.get("token_ids") or ()
            text += said.get("content") or said.get("text") or ""
    return found, text


def forgets(url: str) -> bool:
    with send(Request(f"{url}/reset_prefix_cache", b"", method="POST")) as response:
        return bool(json.load(response)["success"])
