"""Whatever a load makes reusable is right: the decode engine's prefix cache, by vLLM's own hash table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")
pytest.importorskip("nixl", reason="NIXL is not installed")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

from kvferry.endpoint.metric_table import UNCACHED_BLOCKS
from kvferry.errors import SpecError
from kvferry.integrations.vllm import KVFerryConnector
from kvferry.integrations.vllm.scheduler.incoming import PrefixCache
from kvferry.wire.ticket import from_text
from tests.vllm.conftest import Docks
from tests.vllm.engine import Engine, Setup
from tests.vllm.pairs import Pair, case
from tests.vllm.registered import Registered

Prompt = Callable[[int], list[int]]

SHARED = 257
"""Tokens of the reproduction's head: a window of 96 that ends behind it begins inside of most blocks."""
PAIRS = [(src, dst) for src in (16, 32, 48, 64, 96) for dst in (16, 32, 48, 64, 96)]


@pytest.fixture(autouse=True)
def any_block(monkeypatch: pytest.MonkeyPatch):
    """The CPU's kernel takes blocks of 32 n tokens; the toy model calls no kernel."""
    sizes = staticmethod(lambda kv_cache_spec=None: [MultipleOf(16)])
    monkeypatch.setattr(CPUAttentionBackend, "get_supported_kernel_block_sizes", sizes)


def reproduce(pair: Pair, prompt: Prompt, lengths: tuple[int, ...] = (SHARED,)) -> int:
    """Load a prompt, then ask the decode engine alone for others with its head; how much it had of them."""
    registered, num_local = Registered(pair.dst), 0
    for length in lengths:
        head = prompt(length)
        loaded = [*head, *prompt(30)]
        pair.assert_loaded(pair.ferry(loaded), loaded)
        assert registered.wrong() == []
        for tail in (1, 40, 100):
            alone = [*head, *prompt(tail)]
            answer = pair.decode(alone, None)
            num_local += answer.num_local
            pair.assert_right(answer, alone)
        again = [*loaded, *prompt(50)]
        pair.assert_right(pair.ferry(again), again)
        assert registered.wrong() == []
    assert registered.num_entries > 0
    registered.stop()
    return num_local


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "mistral"])
def test_what_a_load_leaves_behind_is_right(docks: Docks, prompt: Prompt, family: str):
    """Each side's blocks are every other side's: windows begin inside of blocks, and beside their edges."""
    sizes = dict.fromkeys(size for pair in PAIRS for size in pair)
    engines = {size: [docks.own(Setup(family, block=size)) for _ in range(2)] for size in sizes}
    num_local = {}
    for src, dst in PAIRS:
        with case(f"{family}, blocks {src} to {dst}"):
            num_local[src, dst] = reproduce(Pair(engines[src][0], engines[dst][1]), prompt)
    # The cure is not that nothing is reused: blocks that the source holds are loaded whole.
    assert all(num_local[pair] for pair in [(32, 32), (64, 32), (96, 32), (96, 48), (64, 64)])


@pytest.mark.parametrize(("src", "dst"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("blocks", [(32, 64), (64, 32), (96, 64)])
def test_ranks(docks: Docks, prompt: Prompt, src: int, dst: int, blocks: tuple[int, int]):
    setups = Setup("gpt_oss", block=blocks[0], tp=src), Setup("gpt_oss", block=blocks[1], tp=dst)
    reproduce(Pair(*map(docks.own, setups)), prompt, (SHARED, 300))


@pytest.mark.parametrize("blocks", [(32, 96), (96, 32), (32, 32)])
def test_chunks_of_local_attention(docks: Docks, prompt: Prompt, blocks: tuple[int, int]):
    """Also if the next token begins a chunk: 288 tokens are loaded, and none of them is needed there."""
    pair = Pair(*(docks.own(Setup("llama4", block=block)) for block in blocks))
    reproduce(pair, prompt, (SHARED, 289 - 30, 300))


@pytest.mark.parametrize("family", ["gemma3", "nemotron_h"])
def test_what_other_kinds_leave_behind_is_right(docks: Docks, prompt: Prompt, family: str):
    """Equal blocks of windows; states, of which one is registered if the loaded tokens end with a block."""
    setup = Setup(family, block=None if family == "nemotron_h" else 64)
    pair = Pair(docks.own(setup), docks.own(setup))
    block = pair.dst.workers[0]._groups[0].kv_cache_spec.block_size
    reproduce(pair, prompt, (SHARED, block - 29, block + 1))


def test_a_block_that_the_source_does_not_hold_is_kept_out_and_counted(docks: Docks, prompt: Prompt):
    """Of 189 tokens the window needs those from 94 on, the source has 64 on, and our block begins at 0."""
    src, dst = docks.own(Setup("gemma3")), docks.own(Setup("gemma3", block=96))
    pair, words = Pair(src, dst), prompt(190)
    assert ticket(pair.prefill(words)).held_from == 64
    pair.assert_loaded(pair.ferry(words), words)
    assert num_uncached(dst) == 2, "one of each group of windows"
    pair.assert_loaded(pair.ferry(words), words)  # it has no window to hit: the same again
    assert num_uncached(dst) == 4


def test_a_block_that_the_source_holds_is_loaded_whole(docks: Docks, prompt: Prompt):
    pair, words = Pair(docks.own(Setup("gemma3", block=64)), docks.own(Setup("gemma3"))), prompt(287)
    pair.assert_loaded(pair.ferry(words), words)
    again = pair.decode([*words[:257], 7], None)
    assert again.num_local == 256
    assert num_uncached(pair.dst) == 0


@pytest.mark.parametrize("prefix_caching", [False, True])
def test_an_engine_in_the_middle_does_not_hand_on_what_it_did_not_load(
    docks: Docks, prompt: Prompt, prefix_caching: bool
):
    """Its block is of its own table, and only the last tokens in it are there: a ticket must say so."""
    first = docks.own(Setup("gemma3"))
    middle = docks.own(Setup("gemma3", block=96, prefix_caching=prefix_caching))
    last = docks.own(Setup("gemma3"))
    registered, words = Registered(last), prompt(250)
    to_middle, onward = Pair(first, middle), Pair(middle, last)
    handed = middle.ask(words, 1, to_middle.prefill(words) | {"do_remote_decode": True})
    to_middle.drive(handed)
    assert handed.finish_reason == "length"
    assert handed.params is not None
    assert ticket(handed.params).held_from == 248 - 95, "it has loaded all but two tokens"
    onward.assert_right(onward.decode(words, handed.params), words)
    assert registered.wrong() == []


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_load_that_fails_leaves_nothing_behind(docks: Docks, prompt: Prompt, policy: str):
    """A spent ticket: the blocks were allocated, and kept out, for a request that loads nothing."""
    pair = Pair(docks.own(Setup("gemma3")), docks.own(Setup("gemma3", block=96, policy=policy)))
    registered, words = Registered(pair.dst), prompt(287)
    params = pair.prefill(words)
    pair.assert_loaded(pair.decode(words, params), words)
    pair.dst.core.scheduler.kv_cache_manager.reset_prefix_cache()
    pair.assert_refused(pair.decode(words, params), words)
    assert registered.wrong() == []
    alone = [*words[:257], *prompt(3)]
    pair.assert_right(pair.decode(alone, None), alone)
    assert not any(m.num_cached_block for m in managers(pair.dst)), "nothing is known of requests that ended"


def test_an_engine_without_a_prefix_cache_loads_what_it_needs(docks: Docks, prompt: Prompt):
    """Nothing is kept out there, and nothing more is read."""
    pair = Pair(docks.own(Setup("gemma3", block=64)), docks.own(Setup("gemma3", prefix_caching=False)))
    words = prompt(287)
    pair.assert_loaded(pair.ferry(words), words)
    assert num_uncached(pair.dst) == 0


# -- another vLLM


def cache_manager(**changes) -> SimpleNamespace:
    group = SimpleNamespace(**{"num_cached_block": {}, "block_size": 32, **changes})
    return SimpleNamespace(
        enable_caching=True, coordinator=SimpleNamespace(single_type_managers=(group, group))
    )


@pytest.mark.parametrize(
    "changes", [{"num_cached_block": None}, {"num_cached_block": []}, {"block_size": 16}]
)
def test_a_vllm_without_the_field_is_refused_by_its_name(changes: dict):
    with pytest.raises(SpecError, match=r"no SimpleNamespace\.num_cached_block of KV cache group 1"):
        PrefixCache.of(cache_manager(**changes), {1: 32})
    assert not PrefixCache.of(cache_manager(**changes), {}).is_on, "no windows"
    with pytest.raises(SpecError, match="num_cached_block of KV cache group 2"):
        PrefixCache.of(cache_manager(), {2: 32})


def test_a_vllm_that_does_not_call_the_hook_is_refused(docks: Docks):
    with (
        patch.object(KVFerryConnector, "bind_kv_cache_manager", KVConnectorBase_V1.bind_kv_cache_manager),
        pytest.raises(SpecError, match="bind_kv_cache_manager"),
    ):
        docks.own(Setup("gemma3"))


def test_chunks_that_end_inside_of_blocks_are_refused(docks: Docks):
    setup = Setup("llama4", block=64)
    with pytest.raises(SpecError, match="chunks of 96 tokens are not a multiple of the block size of 64"):
        docks.own(setup)
    docks.own(replace(setup, prefix_caching=False))
    docks.own(replace(setup, role="kv_producer"))


def num_uncached(engine: Engine) -> float:
    """What the counter of blocks that were kept out stands at."""
    return engine.core.scheduler.connector._side.incoming.figures[(UNCACHED_BLOCKS.name,)]


def managers(engine: Engine):
    return engine.core.scheduler.kv_cache_manager.coordinator.single_type_managers


def ticket(params: dict):
    return from_text(params["kvferry_ticket"])
