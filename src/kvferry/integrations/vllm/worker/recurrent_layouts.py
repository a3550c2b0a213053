"""What a recurrent layer's slot is made of: one rule per layer class.

A slot holds what the layer's own ``get_state_shape`` lists, one after another: as a rule a convolution's
last inputs and a recurrent state. A layer that is not listed, or keeps more than its rule knows (rings and
records of speculative decoding), is opaque (``opaque``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.model_executor.layers.linear import MergedColumnParallelLinear
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.kv_cache_interface import MambaSpec

from kvferry.core.shard import Sharding
from kvferry.core.state import Kind
from kvferry.integrations.vllm.worker.attention_layouts import CacheTensor, Contents, class_path, dtype_of
from kvferry.layout.order import Order
from kvferry.layout.pages import Page, delta_net, mamba1, mamba2, time_major
from kvferry.layout.parts import Dim, Item, PagePart


@dataclass(frozen=True)
class _Slot:
    """How a slot's convolution and state are stored."""

    kernel: int
    """Taps of the convolution, with those that speculation may take back."""
    conv: Item
    ssm: Item
    is_time_major: bool
    tp_replicated: bool

    @classmethod
    def of(cls, spec: MambaSpec) -> _Slot:
        is_time_major = not is_conv_state_dim_first()
        items = [Item(dtype_of(dtype), dtype.itemsize) for dtype in spec.dtypes]
        time = spec.shapes[0][0 if is_time_major else 1]
        return cls(time + 1, items[0], items[-1], is_time_major, spec.tp_replicated)

    def ordered(self, page: Page) -> Contents:
        """A page of a convolution and a recurrent state, in the order that vLLM is set to."""
        return Contents(time_major(page) if self.is_time_major else page)


def _mamba1(layer: Any, slot: _Slot) -> Contents:
    sizes = (layer.intermediate_size, layer.ssm_state_size)
    return slot.ordered(mamba1(*sizes, slot.kernel, slot.conv, slot.ssm))


def _mamba2(layer: Any, slot: _Slot) -> Contents:
    """A model's one group is copied to every rank and counted as one of each: no merged convolution then."""
    groups = layer.n_groups if isinstance(layer.conv1d, MergedColumnParallelLinear) else 1
    sizes = (layer.num_heads, layer.head_dim, groups, layer.ssm_state_size)
    return slot.ordered(mamba2(*sizes, slot.kernel, slot.conv, slot.ssm))


def _gated_delta_net(layer: Any, slot: _Slot) -> Contents:
    heads = (layer.num_k_heads, layer.head_k_dim, layer.num_v_heads, layer.head_v_dim)
    return slot.ordered(delta_net(*heads, slot.kernel, slot.conv, slot.ssm))


def _kimi_delta(layer: Any, slot: _Slot) -> Contents:
    heads = (layer.num_heads, layer.head_dim) * 2
    return slot.ordered(delta_net(*heads, slot.kernel, slot.conv, slot.ssm))


def _short_conv(num_channels: int, slot: _Slot) -> Contents:
    sharding = Sharding.WHOLE if slot.tp_replicated else Sharding.EVEN
    dims = (Dim("channel", num_channels, sharding), Dim("time", slot.kernel - 1))
    order: Order = ("time", "channel") if slot.is_time_major else ("channel", "time")
    return Contents(Page((PagePart("conv.x", dims, slot.conv),), order, Kind.RECURRENT))


def _linear(layer: Any, slot: _Slot) -> Contents:
    """A matrix per head, and no convolution."""
    dims = (
        Dim("head", layer.num_heads, Sharding.EVEN),
        Dim("channel", layer.head_dim),
        Dim("state", layer.head_dim),
    )
    order: Order = ("head", "channel", "state")
    return Contents(Page((PagePart("state", dims, slot.ssm),), order, Kind.RECURRENT))


Rule = Callable[[Any, _Slot], Contents]

_MAMBA = "vllm.model_executor.layers.mamba"

RECURRENT_LAYOUTS: dict[str, tuple[int, Rule]] = {
    f"{_MAMBA}.mamba_mixer.MambaMixer": (2, _mamba1),
    f"{_MAMBA}.mamba_mixer2.MambaMixer2": (2, _mamba2),
    f"{_MAMBA}.gdn.qwen_gdn_linear_attn.QwenGatedDeltaNetAttention": (2, _gated_delta_net),
    f"{_MAMBA}.gdn.olmo_gdn_linear_attn.OlmoHybridGatedDeltaNetAttention": (2, _gated_delta_net),
    f"{_MAMBA}.gdn.kimi_gdn_linear_attn.KimiGatedDeltaNetAttention": (2, _kimi_delta),
    "vllm.models.kimi_k3.nvidia.kda.KimiK3DeltaAttention": (2, _kimi_delta),
    "vllm.models.glm5next.common.kda.Glm5NextLinearAttention": (2, _kimi_delta),
    "vllm.model_executor.models.bailing_moe_v3.BailingMoeV3KimiDeltaAttention": (2, _kimi_delta),
    f"{_MAMBA}.short_conv.ShortConv": (1, lambda layer, slot: _short_conv(layer.conv_dim, slot)),
    "vllm.models.qwen4_exp.nvidia.ple_layer.Qwen4ExpPLELayer": (
        1,
        lambda layer, slot: _short_conv(layer.hc_hidden_size, slot),
    ),
    f"{_MAMBA}.linear.bailing_linear_attn.BailingMoELinearAttention": (1, _linear),
    f"{_MAMBA}.linear.minimax_linear_attn.MiniMaxText01LinearAttention": (1, _linear),
}
"""By the class of the layer: how many arrays its slot holds, and what they are."""


def known_state(cache: CacheTensor) -> Contents | None:
    """The contents of a recurrent layer's slot, if there is a rule that knows all of it."""
    num_arrays, rule = RECURRENT_LAYOUTS.get(class_path(type(cache.layer)), (0, None))
    if rule is None or num_arrays != len(cache.spec.shapes):
        return None
    return rule(cache.layer, _Slot.of(cache.spec))
