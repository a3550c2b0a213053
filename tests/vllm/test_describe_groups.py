"""What a group needs, and what it is on each stage, as vLLM's own managers and grouping have it."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)

import torch
from vllm.v1.core.single_type_kv_cache_manager import ChunkedLocalAttentionManager, SlidingWindowManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)

import kvferry
from kvferry import SpecError, compare
from kvferry.core.manifest import merge
from kvferry.integrations.vllm.shared.groups import describe_group, needed_tokens
from tests.vllm.corpus import families
from tests.vllm.corpus.allocated import Cut, Worker, workers
from tests.vllm.corpus.carrying import carry

WINDOW, CHUNK = 96, 64


def config_of(spec: KVCacheSpec, **attributes: Any) -> KVCacheConfig:
    return KVCacheConfig(8, [], [KVCacheGroupSpec(["layer"], spec, **attributes)])


def spec_of(cls: type, **attributes: Any) -> Any:
    return cls(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, **attributes)


@pytest.mark.parametrize(
    ("manager", "spec"),
    [
        (SlidingWindowManager, spec_of(SlidingWindowSpec, sliding_window=WINDOW)),
        (ChunkedLocalAttentionManager, spec_of(ChunkedLocalAttentionSpec, attention_chunk_size=CHUNK)),
    ],
)
@pytest.mark.parametrize("num_tokens", [1, 63, 64, 95, 96, 97, 127, 128, 129, 300])
def test_a_load_needs_what_vllm_does_not_skip(manager: Any, spec: Any, num_tokens: int) -> None:
    """A block of skipped tokens is a null block: to need one of them would be to fail."""
    fields = {"sliding_window": WINDOW, "attention_chunk_size": CHUNK, "extra_retained_tokens": 0}
    skipped = manager.get_num_skipped_tokens(SimpleNamespace(**fields), num_tokens)
    spans = needed_tokens(config_of(spec), 0, num_tokens)
    assert sorted(token for span in spans for token in range(span.start, span.stop)) == list(
        range(skipped, num_tokens)
    )


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (
            config_of(CrossAttentionSpec(block_size=32, num_kv_heads=1, head_size=64, dtype=torch.bfloat16)),
            "cross",
        ),
        (config_of(spec_of(SlidingWindowSpec, sliding_window=9), host_resident=True), "host"),
    ],
)
def test_what_is_not_a_requests_cache_on_the_device_is_refused(config: KVCacheConfig, word: str) -> None:
    with pytest.raises(SpecError, match=word):
        describe_group(config, 0)


# -- pipeline stages -----------------------------------------------------------------------------------


def staged(name: str, sizes: tuple[int, ...], tp: int = 1) -> list[Worker]:
    """Gemma-4 with its layers dealt out to stages."""
    heads = tuple(families.HEADS["gemma4"].items())

    def own(cut: Cut) -> dict[str, Any]:
        first = sum(sizes[: cut.stage])
        return dict(list(families.gemma4(cut).items())[first : first + sizes[cut.stage]])

    cuts = [
        Cut(tp, 32, rank=rank, pp=len(sizes), stage=stage, heads=heads)
        for stage in range(len(sizes))
        for rank in range(tp)
    ]
    return workers(own, cuts, name)


def test_a_stage_knows_groups_of_which_it_has_no_layer() -> None:
    """vLLM groups the layers of the whole model: a group's number means the same on every stage."""
    first, last = (worker.manifest for worker in staged("toy", (2, 4)))
    assert first.groups == last.groups
    assert {view.group for view in first.ranks[0].views} < {group.name for group in first.groups}


def test_manifests_of_stages_merge_into_the_engines() -> None:
    stages, whole = merge([w.manifest for w in staged("toy", (1, 5))]), staged("toy", (6,))[0].manifest
    assert not compare(stages, whole)
    assert not compare(whole, stages)
    for rank in (0, 1):
        kvferry.prove(kvferry.plan(whole, stages, dst_rank=rank))


@pytest.mark.parametrize(
    ("src", "dst"), [((6,), (2, 4)), ((2, 4), (6,)), ((1, 5), (4, 2)), ((2, 2, 2), (3, 3))], ids=str
)
@pytest.mark.parametrize("tp", [1, 2])
def test_cells_cross_unequal_stages(src: tuple[int, ...], dst: tuple[int, ...], tp: int) -> None:
    wrong, _ = carry(staged("src", src), staged("dst", dst, tp), 300)
    assert not wrong


# -- layers that share a cache -------------------------------------------------------------------------


def sharing(cut: Cut) -> dict[str, Any]:
    """Gemma-3n's last layers use the caches of earlier ones."""
    layers = families.gemma4(cut)
    first, *_, last = layers
    layers[last] = families.gqa(cut, 4, 64)
    layers[last].kv_sharing_target_layer_name = first
    return layers


def test_layers_that_share_a_cache_are_one_state_with_two_names() -> None:
    manifest = workers(sharing, [Cut(block=32)], "toy")[0].manifest
    first, last = (f"model.layers.{i}.self_attn.attn/k" for i in (0, 5))
    assert manifest.state_by_name[last].name == first
    assert last not in {view.state for view in manifest.ranks[0].views}
    wrong, _ = carry(workers(sharing, [Cut(block=32)], "src"), workers(sharing, [Cut(block=16)], "dst"), 100)
    assert not wrong
