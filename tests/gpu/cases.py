"""What is tried, as values: each case has a name under which its result is kept.

A case says what a GPU is asked for; ``Setting.on`` says what that becomes on a device, or why it cannot run
there.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from kvferry.cli.processes import FABRICS
from tests.e2e.devices import Device

GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""CUDA graphs of decoding steps. ``FULL`` with this mode does not repeat its own tokens, connector or not."""
CPU_BLOCK_TOKENS = 32
"""vLLM's attention on a CPU wants blocks of a multiple of this."""


class NotHere(Exception):
    """A case cannot run on this machine, and why."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How one of a case's engines is started."""

    block: int | None = None
    """Tokens per block; None is vLLM's choice."""
    layout: str = ""
    """vLLM's name of the order of heads and tokens; empty is the connector's wish."""
    backend: str = ""
    """vLLM's name of the attention backend; empty is vLLM's choice."""
    dtype: str = "bfloat16"
    cache_dtype: str = ""
    """``fp8``, or empty: as the model's."""
    has_graphs: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)
    """Further engine arguments."""
    features: tuple[str, ...] = ()
    """What else of vLLM is switched on or off: keys of ``FEATURES``."""
    tp: int = 1
    """Ranks, on a CPU."""
    draft: str = ""
    """The family of a model that drafts, and by which of vLLM's methods: ``METHOD:FAMILY``."""

    def args(self) -> dict[str, Any]:
        """vLLM's engine arguments, but for the drafting model."""
        args: dict[str, Any] = {"dtype": self.dtype, **self.more}
        for name in self.features:
            args |= FEATURES[name].args
        if self.tp > 1:
            args["tensor_parallel_size"] = self.tp
        if self.block is not None:
            args["block_size"] = self.block
        if self.backend:
            args["attention_backend"] = self.backend
        if self.cache_dtype:
            args["kv_cache_dtype"] = self.cache_dtype
        if self.has_graphs:
            args |= {"enforce_eager": False, "compilation_config": GRAPHS}
        return args

    def env(self) -> dict[str, str]:
        env = {"VLLM_KV_CACHE_LAYOUT": self.layout} if self.layout else {}
        for name in self.features:
            env |= FEATURES[name].env
        return env

    def on(self, device: Device, family: str) -> Setting:
        """What this becomes on a device; raises NotHere."""
        if device.name == "cpu":
            return _on_cpu(self, family)
        if self.tp > 1:
            raise NotHere(f"{self.tp} ranks need {self.tp} GPUs")
        return self

    def __str__(self) -> str:
        words = [
            f"tp{self.tp}" if self.tp > 1 else "",
            f"b{self.block}" if self.block else "",
            self.layout,
            self.backend,
            SHORT[self.dtype],
        ]
        words += [self.cache_dtype, "graphs" if self.has_graphs else "", *self.features]
        words += [self.draft.replace(":", "-")]
        return "-".join(word for word in words if word).lower()


@dataclass(frozen=True, slots=True)
class Feature:
    """How vLLM is told of something that changes when, and where, a cache is written."""

    args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    is_a_gpus: bool = True


PREFIX, DENSE, OTHER = "prefix", "dense", "other-vllm"
OTHER_SITE = "KVFERRY_OTHER_VLLM"
"""The variable that names a folder with another vLLM, in front of the packages of this Python."""
SENT = {"KVFERRY_WAY": "packed"}
SECRET = {"KVFERRY_SECRET": "R4tJm3k1Zz0c9Xw7QpVbS5uYhE2dNfLg", "VLLM_HOST_IP": "127.0.0.2"}
"""With a secret an engine listens at the address of its host, and what it sends is sealed."""
FEATURES = {
    PREFIX: Feature({"enable_prefix_caching": True}, is_a_gpus=False),
    DENSE: Feature({"enable_prefix_caching": True, "prefix_cache_retention_interval": None}, is_a_gpus=False),
    "async": Feature({"async_scheduling": True}),
    "sync": Feature({"async_scheduling": False}),
    "runner1": Feature(env={"VLLM_USE_V2_MODEL_RUNNER": "0"}),
    "runner2": Feature(env={"VLLM_USE_V2_MODEL_RUNNER": "1"}),
    "conv-ds": Feature(env={"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}, is_a_gpus=False),
    "sent": Feature(env=SENT, is_a_gpus=False),
    "sealed": Feature(env=SENT | SECRET, is_a_gpus=False),
    "direct": Feature(env=FABRICS["cma"], is_a_gpus=False),
    OTHER: Feature(is_a_gpus=False),
}
"""Prefix caching, and the same with every block of a window kept; a step that is scheduled while the last one
runs; vLLM's two model runners; the order of dimensions and steps in the state of a convolution; and how
bytes are read: sent as they are, sent sealed, or directly by NIXL; and another version of vLLM."""
SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
NOT_ON_CPU = {
    "kimi_linear": "vLLM has no kernels for KDA on a CPU",
    "jamba": "vLLM has no kernels for Mamba-1 on a CPU",
    "deepseek_v32": "vLLM has no sparse MLA on a CPU",
}
OTHER_ON_GPU = {"deepseek_v3": "deepseek_v3-wide"}
"""Families whose tiny model has heads that no kernel of a GPU is made for, and what stands in for them."""
BF16_ON_CPU = {"qwen3_next"}
"""Families that a CPU computes in bf16 only. All others run there in fp32, where equal means equal."""
ON_BOTH = ("max_num_batched_tokens", "num_gpu_blocks_override")
"""Engine arguments that a case says for a CPU, too."""
MLA = {"deepseek_v3", "deepseek_v3-wide", "deepseek_v3-wide-all"}
CPU_MLA = {"attention_backend": "CPU_MLA", "compilation_config": {"custom_ops": ["none"]}}
"""Without them MLA in fp32 is wrong on a CPU, connector or not."""


def _on_cpu(setting: Setting, family: str) -> Setting:
    """The same with what a CPU has: one backend, one layout, no graphs, blocks of 32 tokens at least."""
    if family in NOT_ON_CPU:
        raise NotHere(NOT_ON_CPU[family])
    if setting.backend:
        raise NotHere(f"the backend {setting.backend} is a GPU's")
    if setting.layout:
        raise NotHere("vLLM has one layout on a CPU")
    if setting.has_graphs:
        raise NotHere("a CPU has no CUDA graphs")
    if of_gpus := [name for name in setting.features if FEATURES[name].is_a_gpus]:
        raise NotHere(f"{' and '.join(of_gpus)}: vLLM's worker for a CPU has no such choice")
    if family in STATES and {PREFIX, DENSE} & set(setting.features):
        raise NotHere("with prefix caching, vLLM's CPU build serves no model with states")
    if family in MLA and {PREFIX, DENSE} & set(setting.features):
        raise NotHere("vLLM's CPU build has no prefix caching for MLA")
    if setting.dtype == "float16":
        raise NotHere("on a CPU the same case runs in fp32, which the case in bf16 does already")
    if setting.cache_dtype and platform.machine() == "aarch64":
        raise NotHere("vLLM keeps caches in fp8 on CPUs of the kind x86-64 only")
    is_fp32 = family not in BF16_ON_CPU and not setting.cache_dtype
    block = setting.block and -(-setting.block // CPU_BLOCK_TOKENS) * CPU_BLOCK_TOKENS
    if family in MLA and is_fp32:
        block = None
    return replace(
        setting,
        block=block,
        dtype="float32" if is_fp32 else "bfloat16",
        more={key: value for key, value in setting.more.items() if key in ON_BOTH}
        | (CPU_MLA if family in MLA and is_fp32 else {}),
    )


# -- kinds of cases ----------------------------------------------------------------------------------------


class Kind(StrEnum):
    """What is asked of a case."""

    DESCRIBE = "describe"
    PAIR = "pair"
    REUSE = "reuse"
    CONVERSATION = "conversation"
    OFFLOAD = "offload"
    TURNS = "turns"
    OVERLAP = "overlap"
    FAULT = "fault"
    TIME = "time"
    SERVE = "serve"


@dataclass(frozen=True, slots=True)
class DescribeCase:
    """One engine, asked to describe its cache."""

    family: str
    setting: Setting

    @property
    def name(self) -> str:
        return f"{Kind.DESCRIBE}/{self.family}/{self.setting}"


@dataclass(frozen=True, slots=True)
class PairCase:
    """Two engines of one model: the decode engine's tokens, and every cell that was moved."""

    family: str
    src: Setting
    dst: Setting

    @property
    def name(self) -> str:
        return f"{Kind.PAIR}/{self.family}/{self.src}/{self.dst}"


@dataclass(frozen=True, slots=True)
class ReuseCase:
    """Blocks that a load left in the decode engine's prefix cache, and the next requests that hit them."""

    family: str
    src: Setting
    dst: Setting

    @property
    def name(self) -> str:
        return f"{Kind.REUSE}/{self.family}/{self.src}/{self.dst}"


@dataclass(frozen=True, slots=True)
class ConversationCase:
    """Random conversations with shared heads, some loaded, some not."""

    family: str
    src: Setting
    dst: Setting
    num_steps: int = 125

    @property
    def name(self) -> str:
        return f"{Kind.CONVERSATION}/{self.family}/{self.src}/{self.dst}/{self.num_steps}-steps"


class Order(StrEnum):
    """Of the two connectors in vLLM's MultiConnector, which loads from the first that has something."""

    KVFERRY_FIRST = "kvferry-first"
    OFFLOADING_FIRST = "offloading-first"


@dataclass(frozen=True, slots=True)
class OffloadCase:
    """kvferry beside vLLM's OffloadingConnector: loads, evictions, reads from the host, preemptions."""

    family: str
    setting: Setting
    order: Order

    @property
    def name(self) -> str:
        return f"{Kind.OFFLOAD}/{self.family}/{self.setting}/{self.order}"


@dataclass(frozen=True, slots=True)
class TurnsCase:
    """Conversations whose earlier turns are read back, also by vLLM's own connector, and not read back."""

    family: str
    src: Setting
    dst: Setting
    must_read_back: bool = True
    """Whether vLLM's prefix cache keeps something of this model's answers."""

    @property
    def name(self) -> str:
        return f"{Kind.TURNS}/{self.family}/{self.src}/{self.dst}"


@dataclass(frozen=True, slots=True)
class FullPoolCase:
    """The same, where running requests fill the decode engine's blocks."""

    family: str
    src: Setting
    dst: Setting

    @property
    def name(self) -> str:
        return f"{Kind.TURNS}/{self.family}/{self.src}/{self.dst}/full-pool"


@dataclass(frozen=True, slots=True)
class TurnTimeCase:
    """Time to first token of later turns, with read-back and without, beside vLLM's own connector."""

    model: str
    src: Setting
    dst: Setting
    history: int = 16_000
    """Tokens of the first turn."""
    token_bytes: int = 128 << 10

    @property
    def name(self) -> str:
        return f"{Kind.TIME}/{self.model}/{self.src}/{self.dst}/turns-after-{self.history}"


@dataclass(frozen=True, slots=True)
class OverlapCase:
    """Both legs of a request at once; the prefill takes many steps."""

    family: str
    src: Setting
    dst: Setting

    @property
    def name(self) -> str:
        return f"{Kind.OVERLAP}/{self.family}/{self.src}/{self.dst}"


@dataclass(frozen=True, slots=True)
class OverlapTimeCase:
    """Time to first token with both legs at once, and one after the other."""

    model: str
    src: Setting
    dst: Setting
    lengths: tuple[int, ...]

    @property
    def name(self) -> str:
        lengths = "-".join(map(str, self.lengths))
        return f"{Kind.TIME}/{self.model}/{self.src}/{self.dst}/overlap-{lengths}"


class Fault(StrEnum):
    """What is done to the prefill engine, or to its ticket."""

    KILLED_BEFORE = "killed-before"
    KILLED_DURING = "killed-during"
    KILLED_AFTER = "killed-after"
    STOPPED = "stopped"
    RESTARTED = "restarted"
    USED_TWICE = "used-twice"
    EXPIRED = "expired-and-reused"


LOOK_AT_MEMORY = frozenset({Fault.KILLED_BEFORE, Fault.KILLED_DURING, Fault.KILLED_AFTER})
"""After which the GPU's memory must be back: whoever looks at it must be alone."""


@dataclass(frozen=True, slots=True)
class FaultCase:
    """Something goes wrong; the decode engine lives and never says a wrong token."""

    family: str
    setting: Setting
    fault: Fault

    @property
    def name(self) -> str:
        return f"{Kind.FAULT}/{self.family}/{self.setting}/{self.fault}"


@dataclass(frozen=True, slots=True)
class TimeCase:
    """How long a load takes, beside vLLM's own connector in turns."""

    model: str
    """One of ``tests.gpu.models``: true caches, made-up weights."""
    src: Setting
    dst: Setting
    lengths: tuple[int, ...]
    """Tokens of the prompts."""

    @property
    def name(self) -> str:
        return f"{Kind.TIME}/{self.model}/{self.src}/{self.dst}/{'-'.join(map(str, self.lengths))}"


@dataclass(frozen=True, slots=True)
class LatencyCase:
    """The time between two tokens of running decodes, while loads arrive."""

    model: str
    setting: Setting
    num_decodes: int = 32
    num_tokens: int = 4096
    """Of each load."""
    loads_per_second: float = 20.0

    @property
    def name(self) -> str:
        loads = f"{self.num_tokens}-tokens-{self.loads_per_second:g}-per-second"
        return f"{Kind.TIME}/{self.model}/{self.setting}/latency-of-{self.num_decodes}/{loads}"


@dataclass(frozen=True, slots=True)
class ServeCase:
    """``vllm serve`` twice behind the proxy, many clients at a time, beside vLLM's own connector in turns."""

    model: str
    src: Setting
    dst: Setting
    num_clients: int = 64
    num_requests: int = 384
    num_tokens: int = 96
    """Of each answer."""

    @property
    def name(self) -> str:
        return f"{Kind.SERVE}/{self.model}/{self.src}/{self.dst}/{self.num_clients}-clients"


Loading = PairCase | ReuseCase | ConversationCase | OffloadCase | TurnsCase | FullPoolCase | OverlapCase
Timed = TimeCase | LatencyCase | TurnTimeCase | OverlapTimeCase | ServeCase
Case = DescribeCase | Loading | FaultCase | Timed

OVERLAP_CHUNK = 64
"""Tokens of a step of a prefill that is read meanwhile: prompts of 900 tokens take 15."""
FULL_POOL_BLOCKS = 88
"""Of 32 tokens: eight requests of 200 and 90 tokens take 80, and more with each turn."""

# -- the table ---------------------------------------------------------------------------------------------

ONE, WIDER, NARROWER = (16, 16), (16, 64), (64, 16)
BLOCKS = (ONE, WIDER, NARROWER)
PLAIN = Setting()
FP8 = Setting(cache_dtype="fp8")
NHD, HND = "NHD", "HND"
DELTA = Setting(more={"gdn_prefill_backend": "triton"})
"""The one that needs no further package, and the only one that vLLM takes for Kimi-Linear."""
DELTA_STATES = ("qwen3_next", "kimi_linear")
STATES = ("nemotron_h", "granite", "falcon_h1", "jamba", "mamba2")
"""Families whose blocks vLLM chooses: pages of states and of attention must have one size."""


def _pair(family: str, setting: Setting, blocks: tuple[int, int] = ONE) -> PairCase:
    src, dst = blocks
    return PairCase(family, replace(setting, block=src), replace(setting, block=dst))


def _pairs() -> Iterator[PairCase]:
    # Vanilla attention: every block, layout, backend, dtype and way to launch.
    for blocks in BLOCKS:
        for setting in (PLAIN, Setting(has_graphs=True), Setting(dtype="float16"), FP8):
            yield _pair("llama", setting, blocks)
        for backend in ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER"):
            yield _pair("llama", Setting(backend=backend), blocks)
        for backend in ("FLASH_ATTN", "TRITON_ATTN"):
            src, dst = (
                Setting(block, layout, backend) for block, layout in zip(blocks, (NHD, HND), strict=True)
            )
            yield PairCase("llama", src, dst)
    yield PairCase("llama", Setting(16, HND, "FLASH_ATTN"), Setting(16, NHD, "FLASH_ATTN"))
    yield PairCase("llama", Setting(16, "BLHNC", "FLASH_ATTN"), Setting(64, NHD, "FLASH_ATTN"))
    yield PairCase("llama", Setting(16, backend="FLASH_ATTN"), Setting(64, backend="TRITON_ATTN"))
    yield _pair("llama", Setting(backend="FLEX_ATTENTION"))
    # Windows, sinks, shared caches, unequal heads.
    for family in ("gemma3", "gpt_oss", "gemma3n", "gemma4"):
        for blocks in BLOCKS:
            yield _pair(family, PLAIN, blocks)
    yield _pair("gemma3", Setting(has_graphs=True), WIDER)
    yield PairCase("gemma3", Setting(16, NHD, "FLASH_ATTN"), Setting(64, HND, "FLASH_ATTN"))
    # MLA.
    for backend, blocks in (("TRITON_MLA", ONE), ("TRITON_MLA", WIDER), ("TRITON_MLA", NARROWER)):
        yield _pair("deepseek_v3", Setting(backend=backend), blocks)
    for backend in ("FLASHMLA", "FLASH_ATTN_MLA"):  # blocks of 64 only, and of 16 too
        yield _pair("deepseek_v3", Setting(backend=backend), (64, 64))
    yield _pair("deepseek_v3", PLAIN)
    yield _pair("deepseek_v3", Setting(has_graphs=True, backend="TRITON_MLA"))
    yield _pair("deepseek_v32", Setting(), (64, 64))
    # States.
    for family in STATES:
        yield PairCase(family, PLAIN, PLAIN)
    for family in DELTA_STATES:
        yield PairCase(family, DELTA, DELTA)
    yield PairCase("nemotron_h", Setting(has_graphs=True), Setting(has_graphs=True))
    yield PairCase("nemotron_h", Setting(dtype="float16"), Setting(dtype="float16"))
    yield PairCase("nemotron_h", Setting(features=("conv-ds",)), PLAIN)
    # What changes when a cache is written: both schedulers and runners, prefix caching on both sides.
    for feature in ("async", "sync", "runner1", "runner2", PREFIX):
        yield _pair("llama", Setting(features=(feature,)), WIDER)
    yield _pair("gemma3", Setting(features=(PREFIX, "async")))
    yield PairCase("nemotron_h", Setting(features=("async",)), Setting(features=("async",)))
    # Packed and direct reads, where mapped ones are usual.
    for feature in ("sent", "sealed", "direct"):
        yield _pair("llama", Setting(features=(feature,)), WIDER)
        yield PairCase("nemotron_h", Setting(features=(feature,)), Setting(features=(feature,)))
    # Two versions of vLLM, each as the source of the other.
    of_other = Setting(features=(OTHER,))
    for other, this in ((of_other, PLAIN), (PLAIN, of_other)):
        yield PairCase("llama", replace(other, block=16), replace(this, block=64))
        yield PairCase("gemma3", replace(other, block=16), replace(this, block=16))
        yield PairCase("deepseek_v3", other, this)
        yield PairCase("nemotron_h", other, this)
    # Drafts: of the same kind, and of another (mixed regions).
    yield _pair("llama", Setting(draft="eagle:llama-eagle"), WIDER)
    yield _pair("llama", Setting(draft="draft_model:llama-draft"))
    yield _pair("deepseek_v3", Setting(draft="draft_model:llama-draft"))
    yield _pair("llama", Setting(draft="draft_model:deepseek_v3"))


def _reuses() -> Iterator[ReuseCase]:
    dense = Setting(features=(DENSE,))
    exact = replace(dense, backend="TRITON_ATTN", dtype="float32")
    for family in ("gemma3", "gpt_oss-all", "mistral"):
        for setting in (dense, exact):
            for src, dst in ((16, 48), (48, 16), WIDER, NARROWER, (48, 48)):
                yield ReuseCase(family, replace(setting, block=src), replace(setting, block=dst))


def _conversations() -> Iterator[ConversationCase]:
    prefix, dense = Setting(features=(PREFIX,)), Setting(features=(DENSE,))
    exact = replace(prefix, backend="TRITON_ATTN", dtype="float32")
    for family, setting, src, dst in (
        ("gemma3", prefix, 16, 48),
        ("gemma3", exact, 48, 16),
        ("gpt_oss-all", dense, 48, 16),
        ("gpt_oss-all", exact, 16, 48),
        ("mistral", prefix, 64, 16),
        ("llama", prefix, 16, 64),
        ("nemotron_h", prefix, None, None),
    ):
        yield ConversationCase(family, replace(setting, block=src), replace(setting, block=dst))


def _offloads() -> Iterator[OffloadCase]:
    prefix = Setting(16, features=(PREFIX,))
    exact = replace(prefix, backend="TRITON_ATTN", dtype="float32")
    for setting in (exact, prefix):
        for family in ("llama", "gemma3"):
            for order in Order:
                yield OffloadCase(family, setting, order)


def _turns() -> Iterator[TurnsCase | FullPoolCase]:
    dense = Setting(features=(DENSE,))
    one, two = replace(dense, block=32), replace(dense, block=64)
    for src, dst in ((one, one), (replace(dense, block=16), two)):
        yield TurnsCase("llama", src, dst)
        yield TurnsCase("gemma3", src, dst)
    yield TurnsCase("deepseek_v3-wide-all", dense, dense)
    conv_ds = replace(dense, features=(DENSE, "conv-ds"))  # the only one that vLLM's own connector takes
    yield TurnsCase("nemotron_h", conv_ds, conv_ds, must_read_back=False)
    yield TurnsCase("llama", replace(one, tp=2), one)
    yield TurnsCase("llama", one, replace(one, tp=2))
    yield FullPoolCase("llama", one, replace(one, more={"num_gpu_blocks_override": FULL_POOL_BLOCKS}))


def _overlaps() -> Iterator[OverlapCase]:
    chunks = {"max_num_batched_tokens": OVERLAP_CHUNK}
    small, large = Setting(16, more=chunks), Setting(64)
    for feature in ((), ("sent",)):
        for family in ("llama", "gemma3"):
            yield OverlapCase(family, replace(small, features=feature), replace(large, features=feature))
        for family in ("deepseek_v3", "nemotron_h"):
            src, dst = Setting(more=chunks, features=feature), Setting(features=feature)
            yield OverlapCase(family, src, dst)


def _describes() -> Iterator[DescribeCase]:
    for family in ("llama", "gemma3", "gpt_oss", "gemma3n", "gemma4"):
        for block in (16, 64):
            yield DescribeCase(family, Setting(block))
    for backend in ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER"):
        for layout in (HND, NHD):
            yield DescribeCase("llama", Setting(16, layout, backend))
    yield DescribeCase("llama", Setting(16, cache_dtype="fp8"))
    for backend in ("TRITON_MLA", "FLASHMLA", "FLASH_ATTN_MLA"):
        yield DescribeCase("deepseek_v3", Setting(64, backend=backend))
    yield DescribeCase("deepseek_v3", PLAIN)
    yield DescribeCase("deepseek_v32", Setting(64))
    for family in STATES:
        yield DescribeCase(family, PLAIN)
    for family in DELTA_STATES:
        yield DescribeCase(family, DELTA)


def _times() -> Iterator[TimeCase | LatencyCase | TurnTimeCase | OverlapTimeCase]:
    lengths = (128, 1024, 4096, 16384)
    for src, dst in BLOCKS:
        yield TimeCase("8b", Setting(src), Setting(dst), lengths)
    for src, dst in BLOCKS:
        yield TimeCase("8b", Setting(src, NHD), Setting(dst, HND), lengths)
    yield TimeCase("8b", Setting(16, HND), Setting(16, NHD), lengths)
    yield LatencyCase("8b", Setting(16))
    yield TurnTimeCase("8b", Setting(16), Setting(16))
    yield OverlapTimeCase("8b", Setting(16), Setting(16), (16_384, 32_768))
    for model in ("70b-tp8-shard", "deepseek-v3", "hybrid"):
        yield TimeCase(model, PLAIN, PLAIN, (4096, 16384))
    yield TimeCase("70b-tp8-shard", Setting(16), Setting(64), (4096, 16384))


def _serves() -> Iterator[ServeCase]:
    yield ServeCase("8b", Setting(16), Setting(16))
    yield ServeCase("8b", Setting(16), Setting(64))
    yield ServeCase("8b", Setting(16, has_graphs=True), Setting(16, has_graphs=True))


def all_cases() -> tuple[Case, ...]:
    """The whole table, in the order in which it is worth the most if time runs out."""
    faults = [FaultCase(family, PLAIN, fault) for family in ("llama", "nemotron_h") for fault in Fault]
    times, serves = list(_times()), list(_serves())
    pairs: list[Case] = [*_pairs(), *_reuses(), *_conversations(), *_offloads(), *_turns(), *_overlaps()]
    return (*pairs, *times[:3], *serves[:1], *faults, *_describes(), *times[3:], *serves[1:])
