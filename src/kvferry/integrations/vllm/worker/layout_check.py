"""Verifies layout rules: the layer's own writer stores a pattern, and the check reads it back by the rule.

The writer is the operation that stores keys and values in each forward pass (``do_kv_cache_update``). It
writes to the null block, which no request owns; the previous contents are restored. A rule is thus verified
in this process, with this version, platform and backend, before any transfer relies on it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from time import perf_counter

import torch
from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVQuantMode

from kvferry.core.box import TOKEN
from kvferry.core.state import Kind
from kvferry.core.view import View
from kvferry.errors import SpecError
from kvferry.integrations.vllm.worker.described_layer import DescribedLayer, regions_of
from kvferry.integrations.vllm.worker.layouts import DTYPES, class_path, opaque
from kvferry.log import log_of

log = log_of(__name__)

CODES = 8
"""Largest value in patterns: every cache dtype has the integers up to 8 (e5m2 has no 9). 0: not written."""
NUM_PATTERNS = 2
LATENT = "latent"
DECODED = {name: dtype for dtype, name in DTYPES.items() if name != "uint8"}

Codes = Mapping[str, torch.Tensor]
"""Part name -> [token, head, channel] or [token, channel]."""
Writer = Callable[[Codes], None]


class Untried(Exception):
    """The layer has no usable writer, or its cells cannot be decoded here."""


class LayoutDiffers(Exception):
    """The pattern is not where the rule places it."""


@dataclass(frozen=True)
class KindChecked:
    was_tried: bool
    problem: str = ""
    """Why the rule is not used; empty if it is used."""


@dataclass(frozen=True)
class LayoutCheck:
    """Handles layers whose rule fails or cannot be checked."""

    dtype: torch.dtype
    """The model's compute dtype, which writers expect."""
    is_tested: bool
    """Whether this version of vLLM is tested: rules that cannot be checked are then trusted."""
    is_required: bool = False
    """Whether a failed rule stops the engine; otherwise the layer is transferred as opaque blocks."""
    fused: str = ""
    """Enabled fusion passes that also write caches and cannot be checked; empty if none."""

    @classmethod
    def of(cls, vllm_config: VllmConfig, *, is_tested: bool, is_required: bool) -> LayoutCheck:
        passes = vars(vllm_config.compilation_config.pass_config)
        fused = [name for name in passes if name.startswith("fuse_") and "kvcache" in name and passes[name]]
        return cls(vllm_config.model_config.dtype, is_tested, is_required, ", ".join(fused))

    def settle(self, layers: Iterable[DescribedLayer]) -> list[DescribedLayer]:
        """The layers, with opaque contents where the rule fails. Each kind is checked once."""
        started, checked, settled = perf_counter(), dict[Hashable, KindChecked](), list[DescribedLayer]()
        for layer in layers:
            kind = _kind(layer)
            if kind not in checked:
                checked[kind] = self._check(layer)
            is_known = not checked[kind].problem
            settled.append(layer if is_known else replace(layer, contents=opaque(layer.cache)))
        milliseconds = 1e3 * (perf_counter() - started)
        num_tried = sum(each.was_tried for each in checked.values())
        log.info(
            "layout check: %d of %d kinds of caches checked in %.0f ms",
            num_tried,
            len(checked),
            milliseconds,
        )
        return settled

    def _check(self, layer: DescribedLayer) -> KindChecked:
        if layer.contents == opaque(layer.cache):
            return KindChecked(was_tried=False)
        name = f"{layer.name} ({class_path(layer.cache.backend or type(layer.cache.layer))})"
        try:
            if self.fused and layer.page.kind is Kind.PAGED:
                raise LayoutDiffers(f"the fused pass {self.fused} also writes it and cannot be checked")
            look(layer, self.dtype)
            return KindChecked(was_tried=True)
        except Untried as why:
            log.debug("layout check: %s was not checked: %s", name, why)
            if self.is_tested:
                return KindChecked(was_tried=False)
            was_tried = False
            problem = f"its layout cannot be checked ({why}), and this version of vLLM was not tested"
        except LayoutDiffers as why:
            was_tried = True
            problem = f"its cache is not laid out as kvferry expects ({why})"
        if self.is_required:
            raise SpecError(f"{name}: {problem}; layout_check is required")
        log.warning("%s: %s: only identically configured engines can exchange it", name, problem)
        return KindChecked(was_tried, problem)


def look(layer: DescribedLayer, dtype: torch.dtype) -> None:
    """Write patterns, and read them where the layer's views say. Raises LayoutDiffers or Untried."""
    # The scheduler assigns tokens to context-parallel ranks; the writer is unaware of them.
    layer = replace(layer, cache=replace(layer.cache, num_turns=1))
    tensor = layer.cache.tensor
    write = _writer(layer, dtype)
    views = {view.state.rpartition("/")[2]: view for view in layer.views(regions_of({"": tensor}))}
    null_block = tensor[: tensor.shape[0] // layer.cache.num_blocks]
    before = null_block.clone()
    try:
        for seed in range(NUM_PATTERNS):
            codes = {name: _codes(layer, name, seed) for name in views}
            null_block.zero_()
            try:
                write(codes)
            except Exception as error:  # an unknown writer may raise anything
                raise Untried(f"its writer failed: {type(error).__name__}: {error}") from error
            for name, view in views.items():
                wrong = int((_found(layer, name, view) != codes[name].flatten()).sum())
                if wrong:
                    raise LayoutDiffers(f"{wrong} of {codes[name].numel()} cells of {name}")
    finally:
        null_block.copy_(before)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)


def _kind(layer: DescribedLayer) -> Hashable:
    """Equal for layers of which only one needs to be checked."""
    cache = layer.cache
    return (
        class_path(cache.backend),
        class_path(type(cache.layer)),
        class_path(type(getattr(cache.layer, "impl", None))),
        str(getattr(cache.layer, "kv_cache_dtype", "")),
        repr(cache.spec),
        tuple(cache.tensor.shape),
        tuple(cache.tensor.stride()),
        layer.page,
    )


def _codes(layer: DescribedLayer, name: str, seed: int) -> torch.Tensor:
    """A deterministic pattern for a part of one block, different for each part and seed."""
    part, spec = layer.page.part(name), layer.cache.spec
    num_tokens = layer.cache.kernel_tokens * (layer.cache.tensor.shape[0] // layer.cache.num_blocks)
    sizes = {"head": int(getattr(spec, "num_kv_heads", 1))}
    shape = [num_tokens, *(sizes.get(dim.axis, dim.size) for dim in part.dims)]
    generator = torch.Generator().manual_seed(1000 * seed + sum(name.encode()))
    return torch.randint(1, CODES + 1, shape, generator=generator).to(torch.float32)


def _found(layer: DescribedLayer, name: str, view: View) -> torch.Tensor:
    """The values in a view's cells of block 0, in the order of a pattern."""
    tensor, item = layer.cache.tensor, layer.page.part(name).item
    places = torch.tensor([view.offset])
    axes = dict(view.axes)
    for axis in (TOKEN, *layer.page.part(name).axes):
        places = (places[:, None] + torch.from_numpy(axes[axis].offsets().copy())[None, :]).flatten()
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    bytes_of = places[:, None] + torch.arange(item.num_bytes)[None, :]
    cells = memory[bytes_of.to(tensor.device)].cpu()
    return cells.view(DECODED[item.dtype]).to(torch.float32).flatten()


# -- writers -------------------------------------------------------------------------------------------


def _writer(layer: DescribedLayer, dtype: torch.dtype) -> Writer:
    owner, parts = layer.cache.layer, layer.page.parts
    takes, write = _WRITERS.get(tuple(part.name for part in parts), ((), None))
    items = [(DECODED.get(part.item.dtype), part.item.num_bytes) for part in parts]
    are_elements = all(dtype is not None and dtype.itemsize == num_bytes for dtype, num_bytes in items)
    if write is None or not are_elements or layer.page.tokens_per_cell != 1:
        raise Untried("only its kernels know its internal layout")
    update = getattr(getattr(owner, "impl", None), "do_kv_cache_update", None)
    if update is None:
        raise Untried("its backend has no separate write operation")
    bound = getattr(owner, "kv_cache", None)
    if not isinstance(bound, torch.Tensor) or not bound.numel():
        raise Untried("its cache is not bound")
    taken = [name for name, given in signature(update).parameters.items() if given.default is given.empty]
    if taken != list(takes):
        raise Untried(f"its writer has unknown parameters: {', '.join(taken)}")
    return partial(write, layer, update, dtype)


def _write_k_and_v(
    layer: DescribedLayer, update: Callable[..., None], dtype: torch.dtype, codes: Codes
) -> None:
    owner = layer.cache.layer
    k, v = (_scaled(layer, name, codes[name], dtype) for name in "kv")
    update(owner, k, v, owner.kv_cache, _slots(layer, len(k)))


def _write_latents(
    layer: DescribedLayer, update: Callable[..., None], dtype: torch.dtype, codes: Codes
) -> None:
    owner = layer.cache.layer
    rows, width = _scaled(layer, "k", codes[LATENT], dtype), int(owner.kv_lora_rank)
    latents, keys = rows[:, :width].contiguous(), rows[:, None, width:].contiguous()
    update(latents, keys, owner.kv_cache, _slots(layer, len(rows)), owner.kv_cache_dtype, owner._k_scale)


_WRITERS = {
    ("k", "v"): (("layer", "key", "value", "kv_cache", "slot_mapping"), _write_k_and_v),
    (LATENT,): (
        ("kv_c_normed", "k_pe", "kv_cache", "slot_mapping", "kv_cache_dtype", "k_scale"),
        _write_latents,
    ),
}
"""A page's parts -> the writer's parameters, and the function that calls it."""


def _scaled(layer: DescribedLayer, scale: str, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The writer's input that stores these codes: the writer divides by the layer's scale."""
    cache = layer.cache
    factor = 1.0
    if cache.spec.kv_quant_mode is not KVQuantMode.NONE:
        factor = float(getattr(cache.layer, f"_{scale}_scale_float", 1.0))
    return (codes * factor).to(cache.tensor.device, dtype)


def _slots(layer: DescribedLayer, num_tokens: int) -> torch.Tensor:
    return torch.arange(num_tokens, dtype=torch.int64, device=layer.cache.tensor.device)
