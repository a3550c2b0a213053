"""The table of attention layouts against vLLM's own views: what a rule says is what vLLM finds there.

Backends that need a GPU cannot run here; but how they split a cache into K and V is plain tensor code of
theirs, and it is asked where a cell is.
"""

import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)

import torch
import vllm
from vllm.v1.attention.backends.b12x import B12xPagedAttentionBackend
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.rocm_aiter_fa import AiterFlashAttentionBackend
from vllm.v1.attention.backends.rocm_attn import RocmAttentionBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend
from vllm.v1.attention.ops.paged_attn import PagedAttention
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, KVQuantMode

from kvferry import Manifest, compare
from kvferry.core.view import View
from kvferry.integrations.vllm.worker.layouts import ATTENTION_LAYOUTS, RECURRENT_LAYOUTS
from kvferry.testing.oracle import byte_offset
from tests.vllm.corpus.allocated import Cut, Worker, bare, workers
from tests.vllm.corpus.families import gqa

HEADS, WIDTH, BLOCK = 4, 32, 64
NAME = "model.layers.0.self_attn.attn"


def one_layer(backend: type, cut: Cut | None = None, **attributes: Any) -> Worker:
    """An engine of one attention layer."""
    cut = cut or Cut(block=BLOCK)

    def family(cut: Cut) -> dict[str, Any]:
        layer = gqa(cut, HEADS, WIDTH, backend=backend)
        for name, value in attributes.items():
            setattr(layer, name, value)
        return {NAME: layer}

    return workers(family, [cut], "toy")[0]


Find = Callable[[torch.Tensor, str, int, int, int, int], torch.Tensor]
"""A cell of a cache: part, kernel block, token, head, channel."""


def in_rows(cache: torch.Tensor, part: str, block: int, token: int, head: int, channel: int) -> torch.Tensor:
    """FlashAttention and Triton: [block, token, head, channel] of K and of V."""
    return cache.transpose(1, 2).split(WIDTH, dim=-1)["kv".index(part)][block, token, head, channel]


def in_planes(
    cache: torch.Tensor, part: str, block: int, token: int, head: int, channel: int
) -> torch.Tensor:
    """B12X: a plane of K and one of V."""
    return cache.unbind(1)["kv".index(part)].unflatten(-1, (HEADS, WIDTH))[block, token, head, channel]


def in_hip_planes(
    cache: torch.Tensor, part: str, block: int, token: int, head: int, channel: int
) -> torch.Tensor:
    """ROCm: vLLM's own split, [block, head, pack, token, channel] and [block, head, channel, token]."""
    k, v = PagedAttention.split_kv_cache(cache.transpose(0, 1), HEADS, WIDTH)
    pack = k.shape[-1]
    return (
        k[block, head, channel // pack, token, channel % pack]
        if part == "k"
        else v[block, head, channel, token]
    )


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC"])
@pytest.mark.parametrize(
    ("backend", "find"),
    [
        (FlashAttentionBackend, in_rows),
        (TritonAttentionBackend, in_rows),
        (AiterFlashAttentionBackend, in_rows),
        (B12xPagedAttentionBackend, in_planes),
        (RocmAttentionBackend, in_hip_planes),
    ],
)
def test_a_line_says_where_vllm_finds_a_cell(backend: type, find: Find, layout: str) -> None:
    supported = backend.supported_kv_cache_layouts()  # type: ignore[attr-defined]
    if supported is not None and layout not in {known.name for known in supported}:
        pytest.skip(f"{backend.__name__} does not support {layout}")
    worker = one_layer(backend, Cut(block=BLOCK, layout=layout))
    cache = worker.caches[NAME]
    ratio = BLOCK // cache.shape[2]
    views = worker.manifest.ranks[0].by_state
    for part in "kv":
        for token, head, channel in ((0, 0, 0), (5, 1, 17), (63, 3, 31), (16, 2, 8)):
            kernel_block = 3 * ratio + token // cache.shape[2]
            cell = find(cache, part, kernel_block, token % cache.shape[2], head, channel)
            assert cell.untyped_storage().data_ptr() == cache.untyped_storage().data_ptr()
            assert offset_of(views[f"{NAME}/{part}"], 3, token, head, channel) == (
                cell.storage_offset() * cell.element_size()
            )


def offset_of(view: View, block: int, token: int, head: int, channel: int) -> int:
    at = {"token": token, "head": head, "channel": channel}
    offsets = [byte_offset(axis, at[name]) for name, axis in view.axes]
    assert None not in offsets
    return view.offset + block * view.block_stride + sum(offset or 0 for offset in offsets)


def test_a_backend_is_known_by_its_class_not_by_its_name() -> None:
    """AITER's backend has FlashAttention's name."""
    assert AiterFlashAttentionBackend.get_name() == FlashAttentionBackend.get_name()


@pytest.mark.parametrize("path", [*ATTENTION_LAYOUTS, *RECURRENT_LAYOUTS])
def test_every_rule_is_for_a_class_that_vllm_has(path: str) -> None:
    """Read, not imported: most need a GPU. A wrong name would make the layer opaque without a word."""
    module, _, name = path.rpartition(".")
    file = Path(vllm.__file__).parents[1].joinpath(*module.split("."))
    text = file.with_suffix(".py").read_text(encoding="utf-8")
    assert re.search(rf"^\s*(class {name}\b|{name} = )", text, re.MULTILINE)


def test_scales_of_their_own_travel_with_each_head_and_token() -> None:
    worker = one_layer(
        TritonAttentionBackend, kv_cache_dtype="int8_per_token_head", kv_cache_torch_dtype=torch.int8
    )
    k = worker.manifest.state_by_name[f"{NAME}/k"]
    assert (k.item_bytes, k.encoding, k.cell_bytes) == (WIDTH + 4, "int8_per_token_head", HEADS * (WIDTH + 4))


def test_fp8_with_another_scale_is_refused_by_name() -> None:
    one, other = (
        one_layer(
            FlashAttentionBackend,
            kv_cache_dtype="fp8",
            kv_cache_torch_dtype=torch.uint8,
            _k_scale_float=scale,
            _v_scale_float=1.0,
        ).manifest
        for scale in (1.0, 0.5)
    )
    (finding,) = compare(one, other)
    assert str(finding) == (
        f"state-differs: {NAME}/k: encoding: source has fp8, scale 1.0, destination has fp8, scale 0.5"
    )


def test_chunked_attention_keeps_its_backends_memory() -> None:
    """vLLM wraps the backend in a class of its own, which changes how metadata is built and no more."""
    wrapped = type("ChunkedFlashAttention", (FlashAttentionBackend,), {"get_builder_cls": lambda: None})
    assert parts_of(one_layer(wrapped).manifest) == {"k", "v"}


def test_a_subclass_that_changes_more_is_opaque() -> None:
    other = type("Other", (FlashAttentionBackend,), {"get_impl_cls": lambda: None})
    assert parts_of(one_layer(other).manifest) == {"block"}


def parts_of(manifest: Manifest) -> set[str]:
    return {name.rpartition("/")[2] for name in manifest.state_by_name}


# -- opaque --------------------------------------------------------------------------------------------


def turbo(tp: int = 1, block: int = BLOCK) -> list[Worker]:
    """Engines whose blocks only their kernel can read."""

    def family(cut: Cut) -> dict[str, Any]:
        layer = gqa(cut, HEADS, WIDTH, backend=TurboQuantAttentionBackend)
        layer.kv_cache_dtype, layer.kv_cache_torch_dtype = "turboquant_4bit_nc", torch.uint8
        return {NAME: layer}

    heads = (("num_key_value_heads", HEADS),)
    return workers(family, [Cut(tp, block, rank=rank, heads=heads) for rank in range(tp)], "toy")


def test_an_unknown_kernel_is_opaque() -> None:
    worker = turbo()[0]
    (state,) = worker.manifest.states
    page = worker.caches[NAME][0]
    assert state.name == f"{NAME}/block"
    assert state.item_bytes == page.numel() * page.element_size()
    assert state.tokens_per_cell == BLOCK
    for trait in ("TurboQuantAttentionBackend", "turboquant_4bit_nc", f"kernel block of {BLOCK} tokens"):
        assert trait in state.encoding


def test_opaque_engines_that_are_equal_can_talk() -> None:
    src, dst = turbo(2)[1].manifest, turbo(2)[1].manifest
    assert not compare(src, dst)
    assert src.states[0].axes[0].size == 2  # each rank has heads of its own


@pytest.mark.parametrize(("tp", "block"), [(2, BLOCK), (1, 2 * BLOCK)])
def test_opaque_engines_that_differ_are_refused_by_name(tp: int, block: int) -> None:
    findings = compare(turbo()[0].manifest, turbo(tp, block)[0].manifest)
    assert {finding.state for finding in findings} == {f"{NAME}/block"}
    assert "encoding" in {finding.field for finding in findings}


def test_quantised_modes_without_a_line_are_opaque() -> None:
    """NVFP4 has two slots for each head; what is in one is FlashInfer's own."""
    worker = one_layer(
        TritonAttentionBackend, kv_cache_dtype="nvfp4", kv_cache_torch_dtype=torch.uint8, attn_type="decoder"
    )
    assert worker.config.kv_cache_groups[0].kv_cache_spec.kv_quant_mode is KVQuantMode.NVFP4
    assert parts_of(worker.manifest) == {"block"}


def test_a_layer_without_an_object_is_opaque() -> None:
    spec = ChunkedLocalAttentionSpec(
        block_size=BLOCK, num_kv_heads=HEADS, head_size=WIDTH, dtype=torch.bfloat16, attention_chunk_size=64
    )
    layer = bare(torch.nn.Module, get_attn_backend=lambda: None, get_kv_cache_spec=lambda config: spec)
    layer.bind_kv_cache = lambda cache: None

    class Nameless:
        @staticmethod
        def supported_kv_cache_layouts() -> None:
            return None

        @staticmethod
        def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
            return [BLOCK]

        @classmethod
        def customize_spec(cls, spec: Any) -> Any:
            return spec

    layer.get_attn_backend = lambda: Nameless
    assert parts_of(workers(lambda cut: {NAME: layer}, [Cut(block=BLOCK)], "toy")[0].manifest) == {"block"}
