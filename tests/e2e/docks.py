"""Engines of tiny models, cut in many ways, for one test after another."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvferry.cli.processes import FABRICS
from kvferry.transport.settings import UCX_TRANSPORTS
from tests.e2e.harness import KVFERRY, MLA_ARGS, PROMPTS, STOCK, Engine, Nursery, ferry
from tests.e2e.needs import HAS_AMX, needs_cpu
from tests.support.vllm.tiny import FAMILIES

MAX_ENGINES = 5
"""That run at a time."""
LAYERS = {"llama": 4, "gemma3": 6, "gemma3n": 3}
"""How many layers have a cache of their own, of families in which all that are not shared do."""
DRAFTS = {
    "eagle": ("eagle", "llama-eagle"),
    "draft_model": ("draft_model", "llama-draft"),
    "itself": ("draft_model", "llama"),
}
"""What drafts for Llama: vLLM's method, and the family."""
PREFIXES: dict[str, dict[str, Any]] = {
    "": {"enable_prefix_caching": False},
    "sparse": {"enable_prefix_caching": True},
    "dense": {"enable_prefix_caching": True, "prefix_cache_retention_interval": None},
}
"""Of a window, vLLM's default keeps the blocks that a repeated prompt would hit; dense is all of them."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
HEAD_SIZE, LATENT = 64, 576
"""Of all families; the width of MLA's one row per token."""


@dataclass(frozen=True, slots=True)
class Side:
    """How one of the two engines is cut; no block size means vLLM's choice."""

    tp: int = 1
    block: int | None = None
    dtype: str = "float32"
    stages: tuple[int, ...] = ()
    """Pipeline parallelism: the layers of each stage."""
    draft: str = ""
    """What drafts for it."""
    has_fp8_cache: bool = False
    chunk: int = 0
    """Tokens of a step at most; 0: vLLM's choice."""
    prefixes: str = ""
    """Which blocks its prefix cache keeps, a key of ``PREFIXES``; empty: it has none."""

    def args(self, family: str) -> dict[str, Any]:
        """vLLM's engine arguments, but for the drafting model."""
        args: dict[str, Any] = {
            "tensor_parallel_size": self.tp,
            "dtype": self.dtype,
            **PREFIXES[self.prefixes],
        }
        if self.block is not None:
            args["block_size"] = self.block
        if self.has_fp8_cache:
            args["kv_cache_dtype"] = "fp8"
        if self.chunk:
            args["max_num_batched_tokens"] = self.chunk
        if family == "deepseek_v3" and self.dtype == "float32":
            args |= MLA_ARGS
        if self.stages:
            # On a CPU an eager engine does not make the buffers between its stages; this mode does, and does
            # not compile either where TORCH_COMPILE_DISABLE was set when torch was imported.
            args |= {
                "pipeline_parallel_size": len(self.stages),
                "enforce_eager": False,
                "compilation_config": {"mode": 1, "backend": "eager"},
            }
        return args

    def env(self) -> dict[str, str]:
        if not self.stages:
            return {}
        return {"TORCH_COMPILE_DISABLE": "0", "VLLM_PP_LAYER_PARTITION": ",".join(map(str, self.stages))}

    def token_bytes(self, family: str) -> int:
        """What one rank keeps of one token in one attention layer."""
        item_bytes = 1 if self.has_fp8_cache else ITEM_BYTES[self.dtype]
        if family == "deepseek_v3":
            return LATENT * item_bytes
        heads = max(1, FAMILIES[family]["num_key_value_heads"] // self.tp)
        return 2 * heads * HEAD_SIZE * item_bytes

    def __str__(self) -> str:
        words = [f"tp{self.tp}"]
        words += [f"b{self.block}"] if self.block is not None else []
        words += ["bf16"] if self.dtype == "bfloat16" else []
        words += ["fp8"] if self.has_fp8_cache else []
        words += [f"chunk{self.chunk}"] if self.chunk else []
        words += ["pp" + "+".join(map(str, self.stages))] if self.stages else []
        return "".join([*words, self.prefixes, self.draft])


UCX_OF_ONE_HOST = {UCX_TRANSPORTS: FABRICS["cma"][UCX_TRANSPORTS]}
"""Where an engine exposes its caches to NIXL; nobody else looks at it."""


@dataclass
class Docks:
    """Engines for one test after another: the least recently used ones make room."""

    nursery: Nursery
    _engines: dict[tuple, Engine] = field(default_factory=dict)
    _expected: dict[tuple, list[list[int]]] = field(default_factory=dict)

    def pair(
        self, family: str, src: Side, dst: Side, connector: Mapping[str, Any] = KVFERRY
    ) -> tuple[Engine, Engine]:
        """Two engines that are ready, and are cut as they were asked to be."""
        sides = {"src": src, "dst": dst}
        for side in sides.values():
            needs_cpu(side.dtype, has_fp8_cache=side.has_fp8_cache, is_mla=family == "deepseek_v3")
        both = [self._begin(family, side, role, connector) for role, side in sides.items()]
        for engine, side in zip(both, sides.values(), strict=True):
            engine.wait_ready()
            check_cut(engine, family, side)
            if side.dtype == "bfloat16":
                engine.ask(PROMPTS[1])  # vLLM sets up AMX in a long step, and dies if the first one is short
        return both[0], both[1]

    def alone(self, family: str) -> Engine:
        """An engine without a connector that is ready."""
        engine = self._begin(family, Side(), "alone", None)
        engine.wait_ready()
        return engine

    def expected(self, family: str, side: Side, dst: Engine) -> list[list[int]]:
        """What the answer to each prompt should be.

        In fp32 that is what one engine alone says. In bf16 every cut rounds in its own way: there the decode
        engine's own tokens count, and for MLA, whose decoding rounds otherwise than its prefill, those of a
        pair with vLLM's own connector and the decode engine's block size on both sides.
        """
        if side.dtype == "float32":
            return self._cached((family,), lambda: self._alone(family))
        if family == "deepseek_v3":
            return self._cached((family, side), lambda: self._by_stock(family, side))
        return [dst.ask(prompt).tokens for prompt in PROMPTS]

    def _cached(self, key: tuple, make: Callable[[], list[list[int]]]) -> list[list[int]]:
        if key not in self._expected:
            self._expected[key] = make()
        return self._expected[key]

    def _alone(self, family: str) -> list[list[int]]:
        alone = self.alone(family)
        return [alone.ask(prompt).tokens for prompt in PROMPTS]

    def _by_stock(self, family: str, side: Side) -> list[list[int]]:
        src, dst = self.pair(family, side, side, STOCK)
        return [ferry(src, dst, prompt).tokens for prompt in PROMPTS]

    def _begin(self, family: str, side: Side, role: str, connector: Mapping[str, Any] | None) -> Engine:
        key = (family, side, role, repr(sorted((connector or {}).items())))
        engine = self._engines.pop(key, None)
        if engine is None or not engine.is_alive:
            while len(self._engines) >= MAX_ENGINES:
                self._engines.pop(next(iter(self._engines))).close()
            args = {**side.args(family), **self._draft(side)}
            env = {**side.env(), **UCX_OF_ONE_HOST}
            engine = self.nursery.begin(self.nursery.make(family), connector, env=env, **args)
        self._engines[key] = engine
        return engine

    def _draft(self, side: Side) -> dict[str, Any]:
        if not side.draft:
            return {}
        method, family = DRAFTS[side.draft]
        model = str(self.nursery.make(family))
        return {"speculative_config": {"method": method, "model": model, "num_speculative_tokens": 2}}


def check_cut(engine: Engine, family: str, side: Side) -> None:
    """A live engine has the ranks, blocks, items and stages that its side says."""
    groups = [group for group in engine.groups() if group.kind != "MambaSpec"]
    for group in groups:
        assert side.block in (None, group.block_size)
        assert group.page_bytes == group.block_size * side.token_bytes(family)
    if family == "deepseek_v3":
        assert engine.kernels() == {"CPU_MLA" if side.dtype == "float32" else "AMX_MLA"}
    elif family in ("llama", "gemma3") and HAS_AMX:  # then CPU attention packs bf16 in tiles
        assert engine.kernels() == {f"CPU_ATTN {'vec' if side.dtype == 'float32' else 'amx'}"}
    if family in LAYERS:  # with stages, the scheduler knows the groups of the first
        num_drafting = {"": 0, "itself": LAYERS[family]}.get(side.draft, 1)
        num_layers = side.stages[0] if side.stages else LAYERS[family] + num_drafting
        assert sum(group.num_layers for group in groups) == num_layers
