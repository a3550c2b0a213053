"""The second oracle: vLLM's own CPU kernels.

What ``layouts`` says of the order inside a block is compared with where the kernel that writes
the cache puts each cell. Then keys and values are written by that kernel at the source's block size, moved
by kvferry, and compared with what the same kernel writes at the destination's block size: cell by cell, and
in what attention reads from both.
"""

import importlib.util
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvferry import BlockTable, Manifest, Refused, Request, Span, lower, plan, prove, select
from kvferry.core.manifest import merge
from kvferry.layout.order import Fork, Order, Tile
from kvferry.testing.oracle import cells_of
from kvferry.transport.memory import Hub, MemoryTransport

pytestmark = pytest.mark.slow
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)

LAYER = "model.layers.0.self_attn.attn"
NUM_KV_HEADS, NUM_HEADS = 4, 8
"""Over all ranks."""
NUM_BLOCKS = 24
STALE = 0xFF
"""Every byte of a destination before the move: in each dtype a NaN, so that reading one is seen."""
LATENT, ROPE = 512, 64
"""The widths of MLA's two parts: the only ones that its CPU kernels take."""
SEED = 5


@dataclass(frozen=True)
class Line:
    """One line of the table that runs on a CPU."""

    backend: str
    isa: str
    dtype: str
    head_size: int = 64
    cache_dtype: str = "auto"
    blocks: tuple[int, ...] = (32, 64, 96, 128)

    @property
    def is_mla(self) -> bool:
        return self.backend.endswith("MLA")

    def __str__(self) -> str:
        words = (self.backend, self.isa, self.dtype, self.cache_dtype, f"{self.head_size}")
        return "-".join(word for word in words if word not in ("", "auto"))


LINES = [
    Line("CPU_ATTN", "vec", "float32"),
    Line("CPU_ATTN", "vec", "float16"),
    Line("CPU_ATTN", "vec", "bfloat16"),
    Line("CPU_ATTN", "vec16", "bfloat16", head_size=80),
    Line("CPU_ATTN", "amx", "bfloat16"),
    Line("CPU_ATTN", "amx", "bfloat16", head_size=96),
    Line("CPU_ATTN", "vec", "float16", cache_dtype="fp8_e5m2"),
    Line("CPU_ATTN", "amx", "bfloat16", cache_dtype="fp8"),
    Line("CPU_ATTN", "neon", "float32"),
    Line("CPU_ATTN", "neon", "float16"),
    Line("CPU_ATTN", "neon", "bfloat16"),
    Line("CPU_ATTN", "neon", "bfloat16", head_size=96),
    Line("CPU_MLA", "", "float32", LATENT + ROPE, blocks=(16,)),
    Line("CPU_MLA", "", "bfloat16", LATENT + ROPE, blocks=(16,)),
    Line("AMX_MLA", "", "bfloat16", LATENT + ROPE),
]
VEC_BF16, AMX_BF16 = LINES[2], LINES[4]
FP32 = Line("CPU_ATTN", "neon" if platform.machine() == "aarch64" else "vec", "float32")
"""The line of this machine."""
CPU_MLA_BF16, AMX_MLA_BF16 = LINES[-2:]


def has_arm_bf16() -> bool:
    """Whether an Arm CPU computes in bfloat16."""
    features = Path("/proc/cpuinfo").read_text().split()
    return "bf16" in features


def needs(line: Line, *, only_writing: bool = False) -> None:
    """Skip what this CPU cannot run; writing takes less than attending."""
    import torch

    machine = platform.machine()
    if (machine == "aarch64") is not (line.isa == "neon") and line.isa not in ("", "vec16"):
        pytest.skip(f"{machine} has kernels of its own")
    if machine == "aarch64" and line.dtype == "bfloat16" and not (only_writing or has_arm_bf16()):
        pytest.skip("this CPU has no instructions for bfloat16: vLLM's kernels end the process")
    if (line.isa == "amx" or line.backend == "AMX_MLA") and not torch.cpu._init_amx():
        pytest.skip("this CPU has no AMX")  # one that has it must be asked to allow it
    if line.cache_dtype != "auto" and not torch.cpu._is_avx512_supported():
        pytest.skip("an fp8 cache needs AVX-512")


@contextmanager
def cpu_of(line: Line) -> Iterator[None]:
    """The CPU that a line is about: bf16 on ``vec`` is what a CPU without AMX does, and this one can too."""
    with pytest.MonkeyPatch.context() as patch:
        if line.isa.startswith("vec"):
            patch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
        yield


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Where the configurations of models are."""
    return tmp_path_factory.mktemp("models")


# ------------------------------------------------------------------------------------------ one cache


@dataclass(frozen=True)
class Cells:
    """Tokens as a kernel takes them: [token, head, channel]; MLA has a latent and a rope key instead."""

    k: Any
    v: Any

    def heads(self, start: int, stop: int) -> "Cells":
        return Cells(self.k[:, start:stop].contiguous(), self.v[:, start:stop].contiguous())


class Rank:
    """One layer of one rank: vLLM's own layer, cache and backend, which writes and reads it."""

    def __init__(self, home: Path, line: Line, block: int, tp_rank: int = 0, tp_size: int = 1) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.utils.torch_utils import set_default_torch_dtype

        self.line, self.block, self.tp_rank, self.tp_size = line, block, tp_rank, tp_size
        self.config = config_of(line, block, home)
        dtype = self.config.model_config.dtype
        with cpu_of(line), set_current_vllm_config(self.config), set_default_torch_dtype(dtype):
            self.layer = mla_layer() if line.is_mla else attention_layer(self.config, line, tp_size)
            self.config.compilation_config.static_forward_context = {LAYER: self.layer}
            self.cache_config, self.tensor = allocate(self.config, self.layer)
            group = self.cache_config.kv_cache_groups[0]
            builder = self.layer.get_attn_backend().get_builder_cls()
            self.builder = builder(group.kv_cache_spec, [LAYER], self.config, self.tensor.device)
        assert group.kv_cache_spec.block_size == block
        assert self.layer.get_attn_backend().get_name() == line.backend
        assert getattr(self.layer, "isa", "") == line.isa

    @property
    def heads(self) -> tuple[int, int]:
        """The KV heads of this rank; ranks share one where there are more of them than heads."""
        first = self.tp_rank * NUM_KV_HEADS // self.tp_size
        return first, first + max(1, NUM_KV_HEADS // self.tp_size)

    def manifest(self, engine: str) -> Manifest:
        from kvferry.integrations.vllm.worker.describe import WorkerRank, describe

        place = WorkerRank(engine, self.tp_rank, self.tp_rank, self.tp_size)
        with cpu_of(self.line):
            return describe(self.config, self.cache_config, {LAYER: self.tensor}, place)

    def write(self, cells: Cells, blocks: Sequence[int]) -> None:
        """Tokens from the request's first on, into its blocks, by the backend's own op."""
        slots = self._slots(blocks)[: len(cells.k)]
        impl, layer = self.layer.impl, self.layer
        if self.line.is_mla:
            scale, tensor = layer._k_scale, self.tensor.squeeze(1)
            impl.do_kv_cache_update(cells.k, cells.v, tensor, slots, layer.kv_cache_dtype, scale)
        else:
            mine = cells.heads(*self.heads)
            impl.do_kv_cache_update(layer, mine.k, mine.v, self.tensor, slots)

    def attend(self, num_tokens: int, num_queries: int, blocks: Sequence[int]) -> Any:
        """What the last tokens of a request read, by the backend's own op."""
        import torch

        dtype = self.config.model_config.dtype
        metadata = self.builder.build(0, self._step(num_tokens, num_queries, blocks))
        generator = torch.Generator().manual_seed(SEED)
        if self.line.is_mla:
            query = torch.randn(num_queries, NUM_HEADS, LATENT + ROPE, generator=generator).to(dtype)
            return self.layer.impl.forward_mqa(query, self.tensor.squeeze(1), metadata, self.layer)[0]
        query = torch.randn(num_queries, NUM_HEADS, self.line.head_size, generator=generator).to(dtype)
        share = NUM_HEADS // self.tp_size
        query = query[:, self.tp_rank * share : (self.tp_rank + 1) * share].contiguous()
        output = torch.zeros_like(query)
        self.layer.impl.forward(self.layer, query, query, query, self.tensor, metadata, output)
        return output

    def bytes(self) -> np.ndarray:
        """The memory of the cache, block by block."""
        import torch

        return self.tensor.view(torch.uint8).numpy().reshape(NUM_BLOCKS, -1)

    def items(self) -> np.ndarray:
        """The same as unsigned numbers, one per cell."""
        return self.bytes().view(f"u{self.tensor.element_size()}")

    def _slots(self, blocks: Sequence[int]) -> Any:
        import torch

        return (torch.tensor(blocks)[:, None] * self.block + torch.arange(self.block)).flatten()

    def _step(self, num_tokens: int, num_queries: int, blocks: Sequence[int]) -> Any:
        import torch
        from vllm.v1.attention.backend import CommonAttentionMetadata

        starts = torch.tensor([0, num_queries], dtype=torch.int32)
        length = torch.tensor([num_tokens], dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=length,
            seq_lens_cpu_upper_bound=length,
            num_reqs=1,
            num_actual_tokens=num_queries,
            max_query_len=num_queries,
            max_seq_len=num_tokens,
            block_table_tensor=torch.tensor([blocks], dtype=torch.int32),
            slot_mapping=self._slots(blocks)[num_tokens - num_queries : num_tokens],
        )


def model_of(line: Line, home: Path) -> Path:
    """A directory with a configuration and no weights."""
    from transformers import AutoConfig

    directory = home / f"{'mla' if line.is_mla else 'attention'}-{line.head_size}"
    if not directory.exists():
        widths = (
            {"kv_lora_rank": LATENT, "qk_rope_head_dim": ROPE}
            if line.is_mla
            else {"head_dim": line.head_size}
        )
        AutoConfig.for_model(
            "deepseek_v3" if line.is_mla else "llama",
            architectures=["DeepseekV3ForCausalLM" if line.is_mla else "LlamaForCausalLM"],
            hidden_size=64,
            num_hidden_layers=1,
            num_attention_heads=NUM_HEADS,
            num_key_value_heads=NUM_KV_HEADS,
            **widths,
        ).save_pretrained(directory)
    return directory


def config_of(line: Line, block: int, home: Path) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    args = {"attention_backend": line.backend} if line.is_mla else {}
    config = EngineArgs(
        model=str(model_of(line, home)),
        skip_tokenizer_init=True,
        dtype=line.dtype,
        kv_cache_dtype=line.cache_dtype,
        block_size=block,
        max_model_len=1024,
        num_gpu_blocks_override=NUM_BLOCKS,
        enforce_eager=True,
        **args,
    ).create_engine_config()
    config.cache_config.kv_cache_layout = "LBHNC"
    return config


def attention_layer(config: Any, line: Line, tp_size: int) -> Any:
    from vllm.model_executor.layers.attention import Attention

    return Attention(
        NUM_HEADS // tp_size,
        line.head_size,
        line.head_size**-0.5,
        max(1, NUM_KV_HEADS // tp_size),
        cache_config=config.cache_config,
        prefix=LAYER,
    )


def mla_layer() -> Any:
    import torch
    from vllm.model_executor.layers.attention import MLAAttention

    return MLAAttention(
        num_heads=NUM_HEADS,
        scale=(LATENT + ROPE) ** -0.5,
        qk_nope_head_dim=128,
        qk_rope_head_dim=ROPE,
        v_head_dim=128,
        q_lora_rank=None,
        kv_lora_rank=LATENT,
        kv_b_proj=torch.nn.Linear(LATENT, NUM_HEADS * 256, bias=False),
        prefix=LAYER,
    )


def allocate(config: Any, layer: Any) -> tuple[Any, Any]:
    """The layer's cache, cut and allocated by vLLM."""
    import torch
    from vllm.v1.worker.utils import allocate_kv_cache

    from tests.vllm.corpus import allocated

    planning: Any = vars(allocated)["planning"]
    groups = planning.get_kv_cache_groups(config, {LAYER: layer.get_kv_cache_spec(config)})
    found = planning.get_kv_cache_config_from_groups(config, groups, available_memory=1 << 30)
    layout = config.cache_config.get_resolved_kv_cache_layout()
    return found, allocate_kv_cache(found, torch.device("cpu"), layout)[LAYER]


def random_cells(line: Line, num_tokens: int, seed: int) -> Cells:
    import torch

    generator = torch.Generator().manual_seed(seed)
    shapes = ((LATENT,), (1, ROPE)) if line.is_mla else ((NUM_KV_HEADS, line.head_size),) * 2
    k, v = (torch.randn(num_tokens, *shape, generator=generator) for shape in shapes)
    dtype = getattr(torch, line.dtype)
    return Cells(k.to(dtype), v.to(dtype))


# ------------------------------------------------------------------------------- where each cell sits


def written(rank: Rank, blocks: Sequence[int]) -> np.ndarray:
    """The number of the cell that sits in each place, as the kernel says; 0 where it puts nothing.

    Every cell of the blocks has a number of its own, from 1 on. The kernel writes one bit of all numbers at a
    time, as zeros and ones, which every dtype holds.
    """
    import torch

    line, num_tokens = rank.line, len(blocks) * rank.block
    like = random_cells(line, num_tokens, SEED)
    numbers = 1 + torch.arange(like.k.numel() + like.v.numel())
    k, v = numbers[: like.k.numel()].view(like.k.shape), numbers[like.k.numel() :].view(like.v.shape)
    found = np.zeros(rank.items().shape, np.int64)
    for bit in range(int(numbers[-1]).bit_length()):
        rank.tensor.zero_()
        rank.write(Cells(*((part >> bit & 1).to(like.k.dtype) for part in (k, v))), blocks)
        found |= (rank.items() != 0).astype(np.int64) << bit
    return found


def predicted(rank: Rank, blocks: Sequence[int]) -> np.ndarray:
    """The same, as the description says."""
    manifest, num_tokens = rank.manifest("engine"), len(blocks) * rank.block
    tables = {manifest.groups[0].name: BlockTable.of(blocks)}
    found = np.zeros(rank.items().size, np.int64)
    for view in manifest.ranks[0].views:
        for (state, token, at), _, offset in cells_of(manifest, view, tables, range(num_tokens)):
            assert not offset % rank.tensor.element_size()
            found[offset // rank.tensor.element_size()] = _number(
                rank.line, num_tokens, state, token, dict(at)
            )
    return found.reshape(rank.items().shape)


def _number(line: Line, num_tokens: int, state: str, token: int, at: dict[str, int]) -> int:
    channel = at["channel"]
    if line.is_mla:
        is_rope, width = channel >= LATENT, ROPE if channel >= LATENT else LATENT
        return 1 + is_rope * num_tokens * LATENT + token * width + channel - is_rope * LATENT
    is_v = state.endswith("/v")
    return 1 + ((is_v * num_tokens + token) * NUM_KV_HEADS + at["head"]) * line.head_size + channel


@pytest.mark.parametrize("line", LINES, ids=str)
def test_each_cell_sits_where_the_table_says(home, line):
    needs(line, only_writing=True)
    for block in line.blocks:
        rank = Rank(home, line, block)
        assert (written(rank, [5, 2]) == predicted(rank, [5, 2])).all(), f"blocks of {block} tokens"


# ------------------------------------------------------------------------------------------ the moves


@dataclass(frozen=True)
class Side:
    """How one of the two engines keeps its cache."""

    line: Line
    block: int
    tp: int = 1

    def ranks(self, home: Path) -> list[Rank]:
        return [Rank(home, self.line, self.block, rank, self.tp) for rank in range(self.tp)]

    def blocks_for(self, num_tokens: int, seed: int) -> list[int]:
        """Block ids in no order; block 0 is vLLM's null block."""
        ids = np.random.default_rng(seed).permutation(np.arange(1, NUM_BLOCKS))
        return ids[: -(-num_tokens // self.block)].tolist()

    def __str__(self) -> str:
        return f"{self.line}-b{self.block}" + (f"-tp{self.tp}" if self.tp > 1 else "")


def move(src: Sequence[Rank], dst: Sequence[Rank], request: Request) -> None:
    """What a connector does, without the engines."""
    hub = Hub()
    src_engine, dst_engine = (
        merge([rank.manifest(name) for rank in side]) for name, side in (("src", src), ("dst", dst))
    )
    cards = []
    for rank in src_engine.ranks:
        transport = MemoryTransport(hub)
        transport.register(rank.regions)
        cards.append((transport.card(), rank.regions))
    for rank in dst_engine.ranks:
        selection = select(lower(prove(plan(src_engine, dst_engine, rank.rank))), request)
        transport = MemoryTransport(hub)
        transport.register(rank.regions)
        transport.clear(len(cards), selection.blank)
        for number, runs in selection.reads.items():
            transport.connect(f"{number}", *cards[number])
            transport.read(number, f"{number}", runs)
        assert all(not end.error for end in transport.poll())


def check_move(home: Path, src_side: Side, dst_side: Side, num_tokens: int) -> None:
    """Move a request, and compare with the destination's kernel, which writes the same tokens itself."""
    src, dst, expected, marked = (side.ranks(home) for side in (src_side, dst_side, dst_side, dst_side))
    src_blocks, dst_blocks = src_side.blocks_for(num_tokens, seed=1), dst_side.blocks_for(num_tokens, seed=2)
    cells = random_cells(src_side.line, num_tokens, seed=3)
    for rank in src:  # blocks that were used before
        rank.write(random_cells(src_side.line, NUM_BLOCKS * rank.block, seed=4), range(NUM_BLOCKS))
        rank.write(cells, src_blocks)
    for rank in dst:
        rank.bytes()[:] = STALE
    src_table, dst_table = ({"group-0": BlockTable.of(blocks)} for blocks in (src_blocks, dst_blocks))
    move(src, dst, Request(src_table, dst_table, need={"group-0": (Span(0, num_tokens),)}))
    for rank, own, marks in zip(dst, expected, marked, strict=True):
        own.write(cells, dst_blocks)
        marks.write(Cells(cells.k * 0 + 1, cells.v * 0 + 1), dst_blocks)
        check_bytes(rank, own, marks.items() != 0, dst_blocks)
        check_attention(rank, own, num_tokens, dst_blocks)


def check_bytes(moved: Rank, own: Rank, counts: np.ndarray, blocks: Sequence[int]) -> None:
    """Tokens that count are the kernel's; nothing stale is left in their blocks; other blocks are untouched.

    Stale is what the destination held before; cells of the source's blocks may have come along.
    """
    assert (moved.items()[counts] == own.items()[counts]).all()
    assert (moved.items()[blocks] != np.iinfo(moved.items().dtype).max).all()
    assert (np.delete(moved.bytes(), blocks, axis=0) == STALE).all()


def check_attention(moved: Rank, own: Rank, num_tokens: int, blocks: Sequence[int]) -> None:
    """Attention reads the same from both: in a decoding step, and with several queries at once."""
    for num_queries in (1,) if moved.line.is_mla else (1, 7):
        ours, theirs = (rank.attend(num_tokens, num_queries, blocks) for rank in (moved, own))
        assert ours.any()
        assert ours.isfinite().all()
        assert ours.equal(theirs)


PAIRS = [(line, src, dst) for line in LINES for src, dst in product(line.blocks, repeat=2)]


@pytest.mark.parametrize(("line", "src", "dst"), PAIRS, ids=str)
def test_a_moved_cache_is_what_the_kernel_writes(home, line, src, dst):
    needs(line)
    for num_tokens in (77, 301):
        check_move(home, Side(line, src), Side(line, dst), num_tokens)


OTHER_CUTS = [
    *((Side(FP32, 64, src), Side(FP32, 96, dst)) for src, dst in ((1, 2), (2, 1), (4, 2), (8, 4), (2, 8))),
    *((Side(AMX_BF16, 96, src), Side(AMX_BF16, 32, dst)) for src, dst in ((1, 4), (4, 1), (2, 4), (8, 2))),
    *((Side(AMX_MLA_BF16, 32, src), Side(AMX_MLA_BF16, 128, dst)) for src, dst in ((1, 2), (2, 1))),
    # A CPU with AMX and one without; the two backends of MLA.
    *((Side(VEC_BF16, src), Side(AMX_BF16, dst)) for src, dst in ((64, 64), (128, 32))),
    *((Side(AMX_BF16, src), Side(VEC_BF16, dst)) for src, dst in ((64, 64), (96, 32))),
    *((Side(CPU_MLA_BF16, 16), Side(AMX_MLA_BF16, block)) for block in (32, 96)),
    *((Side(AMX_MLA_BF16, block), Side(CPU_MLA_BF16, 16)) for block in (32, 96)),
]


@pytest.mark.parametrize(("src", "dst"), OTHER_CUTS, ids=str)
def test_heads_over_ranks_and_other_kernels(home, src, dst):
    needs(src.line)
    needs(dst.line)
    check_move(home, src, dst, 301)


def test_a_cell_a_run_is_refused(home):
    """Between the two orders of bf16 hardly two cells stay side by side: large blocks have too many runs."""
    needs(AMX_BF16)
    with pytest.raises(Refused, match="too-many-runs"):
        check_move(home, Side(AMX_BF16, 32), Side(VEC_BF16, 128), 301)


# --------------------------------------------------------------------------------------- wrong tables

WRONG: dict[str, tuple[Line, Order]] = {
    "v-before-k": (FP32, (Fork.of(v=("token", "channel"), k=("channel", "token")),)),
    "k-as-rows": (FP32, (Fork.of(k=("token", "channel"), v=("token", "channel")),)),
    "v-transposed": (FP32, (Fork.of(k=("channel", "token"), v=("channel", "token")),)),
    "amx-as-vec": (AMX_BF16, (Fork.of(k=("channel", "token"), v=("token", "channel")),)),
    "amx-v-before-k": (
        AMX_BF16,
        (
            Fork.of(
                v=("channel", "token", Tile("channel", 16), Tile("token", 2)),
                k=("token", "channel", Tile("token", 16), Tile("channel", 2)),
            ),
        ),
    ),
    "amx-k-tile-of-32": (
        AMX_BF16,
        (
            Fork.of(
                k=("token", "channel", Tile("token", 32), Tile("channel", 2)),
                v=("channel", "token", Tile("channel", 16), Tile("token", 2)),
            ),
        ),
    ),
    "amx-v-tile-of-8": (
        AMX_BF16,
        (
            Fork.of(
                k=("token", "channel", Tile("token", 16), Tile("channel", 2)),
                v=("channel", "token", Tile("channel", 8), Tile("token", 2)),
            ),
        ),
    ),
}


UNSEEN_BY_MOVES = {"amx-k-tile-of-32"}
"""32 tokens of K are one piece of memory, and move as one: inside, both sides are wrong in the same way."""


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_line_is_found(home, monkeypatch, name):
    """The tests above can fail: they do if the table is wrong."""
    from kvferry.integrations.vllm.worker import layouts as attention_layouts

    line, order = WRONG[name]
    needs(line)
    rank = Rank(home, line, 64)
    assert (written(rank, [5, 2]) == predicted(rank, [5, 2])).all()
    monkeypatch.setitem(attention_layouts.CPU_ORDERS, line.isa, order)
    assert (written(rank, [5, 2]) != predicted(rank, [5, 2])).any()
    if name not in UNSEEN_BY_MOVES:
        with pytest.raises(AssertionError):
            check_move(home, Side(line, 32), Side(line, 64), 77)


def test_a_wrong_line_of_mla_is_found(home, monkeypatch):
    """The same, with all tokens of a channel side by side."""
    from kvferry.integrations.vllm.worker import layouts as attention_layouts

    needs(AMX_MLA_BF16)
    rank = Rank(home, AMX_MLA_BF16, 64)

    def by_channel(subject: Any) -> Any:
        right = attention_layouts.latent_rows(subject)
        return right and replace(right, page=replace(right.page, order=("channel", "token")), outer=("head",))

    backend = attention_layouts.class_path(rank.layer.get_attn_backend())
    monkeypatch.setitem(attention_layouts.ATTENTION_LAYOUTS, backend, by_channel)
    assert (written(rank, [5, 2]) != predicted(rank, [5, 2])).any()
    with pytest.raises(AssertionError):
        check_move(home, Side(AMX_MLA_BF16, 32), Side(AMX_MLA_BF16, 64), 77)


# ------------------------------------------------------------------------------- the check at start


@pytest.mark.parametrize("line", LINES, ids=str)
def test_the_check_at_start_believes_the_rule_and_notices_every_mistake(line, home):
    """``layout_check`` with the real layer, cache and kernel of each line."""
    from kvferry.integrations.vllm.worker.describe import WorkerRank, described_layers
    from kvferry.integrations.vllm.worker.layout_check import LayoutDiffers, look
    from tests.vllm.pairs import case
    from tests.vllm.sabotage import sabotaged

    needs(line, only_writing=True)
    rank = Rank(home, line, line.blocks[0])
    rank.layer.bind_kv_cache(rank.tensor)
    caches, dtype = {LAYER: rank.tensor}, rank.config.model_config.dtype
    with cpu_of(line):
        (layer,) = described_layers(rank.config, rank.cache_config, caches, WorkerRank("engine", 0, 0, 1))
        look(layer, dtype)
        mistakes = list(sabotaged(layer))
        assert mistakes
        for what, wrong in mistakes:
            with case(what), pytest.raises(LayoutDiffers):
                look(wrong, dtype)
