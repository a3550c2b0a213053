"""vLLM's engine core without a model: everything is real but the arithmetic.

``EngineCore``, its scheduler and cache manager, the layers and their cache specifications, the allocator, the
aggregation of what workers report, the connector in both roles and NIXL are what vLLM 0.32 runs. Only the
executor is ours: its workers live in this process, and their model is the toy of ``toy.py``. So whatever the
engine core asserts is asserted here, and an engine starts in a second.

    src, dst = Engine(Setup()), Engine(Setup(block=64))
    prefill = src.ask(prompt, 1, PREFILL)
    src.finish(prefill)
    answer = dst.ask(prompt, params=prefill.params)
    drive([src, dst], lambda: answer.is_done)
    assert answer.tokens == dst.right(prompt)
"""

from __future__ import annotations

import copy
import json
import pickle
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
from prometheus_client import REGISTRY
from safetensors.torch import save_file
from transformers import AutoConfig
from vllm import SamplingParams
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.attention import Attention as AttentionLayer
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
)
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin
from vllm.v1.worker.utils import allocate_kv_cache, select_common_block_size
from vllm.v1.worker.worker_base import CompilationTimes

from kvferry.transport import Hub, MemoryTransport
from tests.support.vllm.tiny import FAMILIES
from tests.vllm.host_tier import OFFLOADING
from tests.vllm.toy import Attention, Layer, Recurrent, Text, Totals, answer, forward, sample, whole

Params = dict[str, Any]
"""``kv_transfer_params``, as routers pass them on."""
PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
"""What a router asks of the engine that prefills."""
NUM_TOKENS = 6
"""Of each answer."""
SECONDS = 60.0
"""Nothing here takes longer, on a busy machine."""
NULL_BLOCK = 0
"""vLLM's: a hole in a block table."""
MODEL_SECONDS = 0.0005
"""An engine with nothing to compute looks again after this long."""


@dataclass(frozen=True)
class Setup:
    """How an engine is started; what a test does not say is small."""

    family: str = "llama"
    block: int | None = 32
    blocks: int = 640
    """The size of the pool, with the null block."""
    longest: int = 1024
    """Tokens of a request, prompt and answer."""
    tp: int = 1
    pp: int = 1
    policy: str = "fail"
    role: str = "kv_both"
    prefix_caching: bool = True
    is_async: bool = False
    """Whether a step is scheduled before the last one's tokens are known."""
    is_late: bool = False
    """Whether workers begin a step only when its output is awaited: as late as a device can be."""
    chunk: int = 1024
    """How many tokens are computed in one step at most."""
    options: tuple[tuple[str, Any], ...] = (
        ("listen", "tcp://127.0.0.1:*"),
        ("lease_seconds", 3.0),
    )
    connector: bool = True
    beside: str = ""
    """Whether vLLM's OffloadingConnector stands ``before`` or ``behind`` ours in its MultiConnector."""
    name: tuple[str, str] = ("KVFerryConnector", "kvferry.integrations.vllm")
    """Of the connector: its class and module."""

    def config(self) -> VllmConfig:
        connector, module = self.name
        transfer = {
            "kv_connector": connector,
            "kv_connector_module_path": module,
            "kv_role": self.role,
            "kv_load_failure_policy": self.policy,
            "kv_connector_extra_config": dict(self.options),
        }
        if self.beside:
            transfer = self._with_another(transfer)
        args = EngineArgs(
            model=str(_model(self.family)),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=self.longest,
            max_num_seqs=8,
            max_num_batched_tokens=self.chunk,
            block_size=self.block,
            num_gpu_blocks_override=self.blocks,
            tensor_parallel_size=self.tp,
            pipeline_parallel_size=self.pp,
            enable_prefix_caching=self.prefix_caching,
            async_scheduling=self.is_async,
            kv_transfer_config=transfer if self.connector else None,
        )
        config = args.create_engine_config()
        if config.model_config.use_mla:  # vLLM's kernels for CPUs cannot; the toy can
            config.cache_config.enable_prefix_caching = self.prefix_caching
            config.scheduler_config.enable_chunked_prefill = True
            config.scheduler_config.max_num_batched_tokens = self.chunk
        return config

    def _with_another(self, ours: dict[str, Any]) -> dict[str, Any]:
        both = [ours, dict(OFFLOADING)]
        return {
            "kv_connector": "MultiConnector",
            "kv_role": self.role,
            "kv_load_failure_policy": self.policy,
            "kv_connector_extra_config": {"connectors": both if self.beside == "behind" else both[::-1]},
        }


_LLAMA = FAMILIES["llama"]
ONLY_HERE: dict[str, Any] = {
    "mistral": {**_LLAMA, "model_type": "mistral", "sliding_window": 96},  # windows and nothing else
    "llama4": {  # chunks and full attention
        **_LLAMA,
        "model_type": "llama4_text",
        "attention_chunk_size": 96,
        "no_rope_layers": [1, 1, 1, 0],
        "num_local_experts": 2,
        "intermediate_size_mlp": 64,
    },
}
"""Families whose real kernels no other test needs."""


@cache
def _model(family: str) -> Path:
    """A directory with a configuration, and one tensor in place of weights."""
    config = AutoConfig.for_model(
        **{
            **(FAMILIES | ONLY_HERE)[family],
            "vocab_size": 320,
            "hidden_size": 64,
            "intermediate_size": 64,
            "head_dim": 32,
            "max_position_embeddings": 1024,
            "architectures": [_ARCHITECTURES[family]],
        }
    )
    home = Path(tempfile.mkdtemp(prefix=f"kvferry-{family}-"))
    config.save_pretrained(home)
    save_file(
        {"toy": torch.zeros(1)}, home / "model.safetensors"
    )  # its arithmetic has none, its identity does
    return home


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "llama-1kv": "LlamaForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "mistral": "MistralForCausalLM",
    "llama4": "Llama4ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}


# ------------------------------------------------------------------------------------------ the executor


@dataclass(frozen=True)
class Group:
    """What a worker asks of its tensor- or pipeline-parallel group. Nobody is there to talk to."""

    world_size: int
    rank_in_group: int

    @property
    def is_first_rank(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == self.world_size - 1

    @property
    def device_group(self) -> Group:
        return self

    def rank(self) -> int:
        return self.rank_in_group

    def size(self) -> int:
        return self.world_size

    def broadcast_object(self, obj: Any, src: int = 0) -> Any:
        return obj


class InProcess(Executor):  # type: ignore[misc]  # vLLM is not there when types are checked
    """All workers in this process, one after the other."""

    supports_pp = True

    def _init_executor(self) -> None:
        size = self.parallel_config.world_size
        self.workers = [
            # vLLM gives a lone worker the engine's own configuration, and several a copy each.
            ToyWorker(self.vllm_config if size == 1 else copy.deepcopy(self.vllm_config), rank)
            for rank in range(size)
        ]

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple = (),
        kwargs: dict | None = None,
        non_block: bool = False,
    ) -> list[Any]:
        return [self._call(worker, str(method), *args, **(kwargs or {})) for worker in self.workers]

    def _call(self, worker: ToyWorker, method: str, *args: Any, **kwargs: Any) -> Any:
        with worker.inside():
            return getattr(worker, method)(*args, **kwargs)

    def initialize_from_config(self, kv_cache_configs: list[KVCacheConfig]) -> None:
        for worker, config in zip(self.workers, kv_cache_configs, strict=True):
            self._call(worker, "initialize_from_config", config)

    is_late = False
    """Whether workers begin a step only when its output is awaited."""

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        step: Future[Any]
        if self.is_late:
            step = Awaited(partial(self._run, pickle.loads(pickle.dumps(scheduler_output))))
        else:
            step = _given(self._run(scheduler_output))
        if scheduler_output.total_num_scheduled_tokens:
            self._sampled, step = step, _given(None)
        return step if non_block else step.result()

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return self._sampled if non_block else self._sampled.result()

    def _run(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        steps = [self._call(worker, "execute_model", self._sent(scheduler_output)) for worker in self.workers]
        tokens = {
            request_id: sample([step.totals[request_id] for step in steps]) for request_id in steps[0].totals
        }
        self.collective_rpc("accept", args=(tokens,))
        outputs = [_output(scheduler_output, tokens, step.connector) for step in steps]
        if self.kv_output_aggregator is not None:
            return self.kv_output_aggregator.aggregate(outputs)
        return outputs[0]

    def _sent(self, scheduler_output: SchedulerOutput) -> SchedulerOutput:
        """What reaches a worker of several is a copy that went through pickle."""
        if len(self.workers) == 1:
            return scheduler_output
        return pickle.loads(pickle.dumps(scheduler_output))

    def check_health(self) -> None:
        pass


class Awaited(Future[ModelRunnerOutput]):
    """A step that begins when somebody waits for its output."""

    def __init__(self, run: Callable[[], ModelRunnerOutput]) -> None:
        super().__init__()
        self._run = run

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        if not self.done():
            self.set_result(self._run())
        return super().result(timeout)


def _given(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _output(
    step: SchedulerOutput, tokens: Mapping[str, int], connector: KVConnectorOutput | None
) -> ModelRunnerOutput:
    request_ids = list(step.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=request_ids,
        req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
        sampled_token_ids=[
            [tokens[request_id]] if request_id in tokens else [] for request_id in request_ids
        ],
        kv_connector_output=connector,
    )


@dataclass(frozen=True)
class Step:
    """What a worker did in a step."""

    totals: dict[str, Totals]
    """Of the requests whose next token is due."""
    connector: KVConnectorOutput | None


@dataclass
class Row:
    """What a worker knows of a request."""

    text: Text
    block_ids: tuple[list[int], ...]
    num_computed: int


class ToyWorker(Worker):  # type: ignore[misc]
    """One rank: vLLM's own layers and caches, our arithmetic."""

    def __init__(self, vllm_config: VllmConfig, rank: int) -> None:
        super().__init__(vllm_config, rank, rank, "", is_driver_worker=rank == 0)
        tp = vllm_config.parallel_config.tensor_parallel_size
        pp = vllm_config.parallel_config.pipeline_parallel_size
        self._tp, self._pp = Group(tp, rank % tp), Group(pp, rank // tp)
        self.connector: Any = None
        self._rows: dict[str, Row] = {}
        self.caches: dict[str, torch.Tensor] = {}
        self.layers: list[Layer] = []
        with self.inside(), set_default_torch_dtype(self.model_config.dtype):
            initialize_model(vllm_config)
            current_platform.update_block_size_for_backend(vllm_config)

    @contextmanager
    def inside(self) -> Iterator[None]:
        """What vLLM keeps in globals of a worker's process."""
        parallel_state._TP, parallel_state._PP = self._tp, self._pp
        parallel_state._DP = parallel_state._EP = parallel_state._PCP = Group(1, 0)
        kv_transfer_state._KV_CONNECTOR_AGENT = self.connector
        try:
            with set_current_vllm_config(self.vllm_config):
                yield
        finally:
            self.connector = kv_transfer_state._KV_CONNECTOR_AGENT
            kv_transfer_state._KV_CONNECTOR_AGENT = None
            parallel_state._TP = parallel_state._PP = None
            parallel_state._DP = parallel_state._EP = parallel_state._PCP = None

    # -- starting

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        found = {
            name: layer.get_kv_cache_spec(self.vllm_config)
            for name, layer in self.compilation_config.static_forward_context.items()
            if hasattr(layer, "get_kv_cache_spec")
        }
        return {name: spec for name, spec in found.items() if spec is not None}

    def determine_available_memory(self) -> int:
        return 1 << 30

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        self._config = kv_cache_config
        self.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
        self.cache_config.hash_block_size = kv_cache_config.hash_block_size
        self.cache_config.cache_hit_alignment_tokens = kv_cache_config.cache_hit_alignment_tokens
        kv_transfer_state.ensure_kv_transfer_initialized(self.vllm_config, kv_cache_config)
        self.caches = allocate_kv_cache(
            kv_cache_config,
            torch.device("cpu"),
            self.cache_config.get_resolved_kv_cache_layout(),
            [self._kernel_block(group.kv_cache_spec, group.layer_names) for group in self._groups],
        )
        self._bind_caches()
        if kv_transfer_state.has_kv_transfer_group():
            kv_transfer_state.get_kv_transfer_group().register_kv_caches(self.caches)
        self.layers = [
            self._layer(name, group.kv_cache_spec) for group in self._groups for name in group.layer_names
        ]

    def _bind_caches(self) -> None:
        """To the layers, as a runner does, which also tells CPU attention its instruction set."""
        for name, tensor in self.caches.items():
            layer = self.compilation_config.static_forward_context[name]
            layer.bind_kv_cache(tensor)
            if isinstance(layer, AttentionLayer):
                width, dtype = layer.head_size, layer.kv_cache_dtype
                layer.isa = _get_attn_isa(layer.dtype, tensor.shape[-2], width, dtype)

    @property
    def _groups(self) -> Sequence[Any]:
        return self._config.kv_cache_groups

    def _kernel_block(self, spec: KVCacheSpec, names: Sequence[str]) -> int:
        if (
            isinstance(spec, MambaSpec) or not names
        ):  # a stage of a pipeline may have none of a group's layers
            return spec.block_size
        backend = self.compilation_config.static_forward_context[names[0]].get_attn_backend()
        return select_common_block_size(spec.block_size, [backend], [spec])

    def _layer(self, name: str, spec: KVCacheSpec) -> Layer:
        if isinstance(spec, MambaSpec):
            return Recurrent(name, self.caches[name].shape[-1] // 4)
        if isinstance(spec, MLAAttentionSpec):  # one latent for all heads, on every rank
            return Attention(name, (0,), spec.head_size // 2)
        module = self.compilation_config.static_forward_context[name]
        assert isinstance(module, AttentionLayer)
        total = self.model_config.get_total_num_kv_heads()
        first = self._tp.rank_in_group * total // self._tp.world_size
        heads = tuple(range(first, first + spec.num_kv_heads))
        window, chunk = (
            getattr(spec, what, None) or 0 for what in ("sliding_window", "attention_chunk_size")
        )
        return Attention(name, heads, spec.head_size, window, chunk)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        return CompilationTimes(0.0, 0.0)

    def shutdown(self) -> None:
        kv_transfer_state.ensure_kv_transfer_shutdown()
        for layer in self.compilation_config.static_forward_context.values():
            layer.kv_cache = torch.tensor([])  # layers outlive their engine

    # -- a step

    def execute_model(self, scheduler_output: SchedulerOutput) -> Step:
        with set_forward_context(None, self.vllm_config):
            if self.connector is not None:
                self.connector.handle_preemptions(scheduler_output.kv_connector_metadata)
            self._update(scheduler_output)
            with KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(scheduler_output) as connector:
                totals = self._forward(scheduler_output)
            return Step(totals, connector)

    def _update(self, step: SchedulerOutput) -> None:
        for request_id in step.finished_req_ids:
            self._rows.pop(request_id, None)
        for new in step.scheduled_new_reqs:
            tokens = list(new.prompt_token_ids)
            self._rows[new.req_id] = Row(Text(tokens), _lists(new.block_ids), new.num_computed_tokens)
        cached = step.scheduled_cached_reqs
        for request_id, new_ids, num_computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            row = self._rows[request_id]
            row.num_computed = num_computed
            if request_id in cached.all_token_ids:
                row.text = Text(list(cached.all_token_ids[request_id]))
            if request_id in cached.resumed_req_ids:
                row.block_ids = _lists(new_ids)
            elif new_ids is not None:
                for ids, more in zip(row.block_ids, new_ids, strict=True):
                    ids.extend(more)

    def _forward(self, step: SchedulerOutput) -> dict[str, Totals]:
        self._zero(step.new_block_ids_to_zero or [])
        assert not step.kv_cache_block_copies, "the toy copies no blocks"
        totals: dict[str, Totals] = {}
        for request_id, num_new in step.num_scheduled_tokens.items():
            row = self._rows[request_id]
            stop = row.num_computed + num_new
            read = forward(self.layers, row.text, _Cells(self, row.block_ids), row.num_computed, stop)
            if stop == len(row.text.tokens):
                totals[request_id] = read
        return totals

    def _zero(self, block_ids: Sequence[int]) -> None:
        """As vLLM's CPU runner does, and nothing but blocks of full attention."""
        for group in self._groups:
            if isinstance(group.kv_cache_spec, FullAttentionSpec):
                for name in group.layer_names:
                    self.caches[name][list(block_ids)] = 0

    def accept(self, tokens: Mapping[str, int]) -> None:
        """The tokens that were sampled."""
        for request_id, token in tokens.items():
            self._rows[request_id].text.tokens.append(token)


def _lists(block_ids: Sequence[Sequence[int]]) -> tuple[list[int], ...]:
    return tuple(list(ids) for ids in block_ids)


@dataclass(frozen=True)
class _Cells:
    """The cells of one request in a worker's caches, in the order that CPU attention keeps fp32 in."""

    worker: ToyWorker
    block_ids: tuple[list[int], ...]

    def read(self, layer: Layer, start: int, stop: int) -> npt.NDArray[np.uint32]:
        if isinstance(layer, Recurrent):
            return self._state(layer, stop - 1)[None, None]
        if self._is_latent(layer):
            latents, blocks, slots = self._latents(layer, start, stop)
            return latents[blocks, slots][None]
        keys, values, blocks, slots = self._places(layer, start, stop)
        return np.concatenate([keys[blocks, :, :, slots], values[blocks, :, slots]], -1).transpose(1, 0, 2)

    def write(self, layer: Layer, start: int, bits: npt.NDArray[np.uint32]) -> None:
        if isinstance(layer, Recurrent):
            self._state(layer, start)[:] = bits[0, 0]
            return
        if self._is_latent(layer):
            latents, blocks, slots = self._latents(layer, start, start + bits.shape[1])
            latents[blocks, slots] = bits[0]
            return
        keys, values, blocks, slots = self._places(layer, start, start + bits.shape[1])
        by_token = bits.transpose(1, 0, 2)
        keys[blocks, :, :, slots] = by_token[..., : layer.width]
        values[blocks, :, slots] = by_token[..., layer.width :]

    def stops(self, layer: Recurrent, start: int, stop: int) -> list[int]:
        """The end of a step; where states are cached, also the ends of blocks that have a slot."""
        ids, block = self._table(layer)
        ends = range((start // block + 1) * block, stop, block)
        return [end for end in ends if ids[end // block - 1] != NULL_BLOCK] + [stop]

    def _places(self, layer: Attention, start: int, stop: int) -> tuple[npt.NDArray, ...]:
        """K by [block, head, channel, token], V by [block, head, token, channel]; blocks and slots."""
        cache = self.worker.caches[layer.name]
        num_blocks, num_heads, kernel_block, _ = cache.shape
        flat = cache.view(num_blocks, num_heads, -1).numpy().view(np.uint32)
        half = kernel_block * layer.width
        keys = flat[..., :half].reshape(num_blocks, num_heads, layer.width, kernel_block)
        values = flat[..., half:].reshape(num_blocks, num_heads, kernel_block, layer.width)
        return keys, values, *self._slots(layer, start, stop, kernel_block)

    def _is_latent(self, layer: Layer) -> bool:
        groups = (group for group in self.worker._groups if layer.name in group.layer_names)
        return isinstance(next(groups).kv_cache_spec, MLAAttentionSpec)

    def _latents(self, layer: Attention, start: int, stop: int) -> tuple[npt.NDArray, ...]:
        """The latents by [block, token, channel]; blocks and slots."""
        cache = self.worker.caches[layer.name].squeeze(1).numpy().view(np.uint32)
        return cache, *self._slots(layer, start, stop, cache.shape[1])

    def _slots(self, layer: Attention, start: int, stop: int, kernel_block: int) -> tuple[npt.NDArray, ...]:
        """The kernel block and the slot in it of each token."""
        ids, block = self._table(layer)
        positions = np.arange(start, stop)
        blocks = np.array(ids)[positions // block] * (block // kernel_block)
        return blocks + positions % block // kernel_block, positions % kernel_block

    def _state(self, layer: Recurrent, position: int) -> npt.NDArray[np.uint32]:
        """The state after a token: one slot, or, where states are cached too, one per block."""
        ids, block = self._table(layer)
        return self.worker.caches[layer.name][ids[position // block]].view(-1).numpy().view(np.uint32)

    def _table(self, layer: Layer) -> tuple[list[int], int]:
        for group, ids in zip(self.worker._groups, self.block_ids, strict=True):
            if layer.name in group.layer_names:
                return ids, group.kv_cache_spec.block_size
        raise KeyError(layer.name)


# -------------------------------------------------------------------------------------------- the engine


@dataclass
class Answer:
    """What an engine said to a request, so far."""

    request_id: str
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""
    params: Params | None = None
    num_external: int = 0
    """Prompt tokens that came from another engine, as vLLM counts them."""
    num_local: int = 0
    """Prompt tokens that were in the engine's own cache."""

    @property
    def is_done(self) -> bool:
        return bool(self.finish_reason)


@contextmanager
def _transport(hub: Hub | None) -> Iterator[None]:
    if hub is None:
        yield
        return
    with patch("kvferry.integrations.vllm.worker.side.ProcessTransport", lambda **_: MemoryTransport(hub)):
        yield


class Engine:
    """An engine core, and the requests it was asked."""

    def __init__(self, setup: Setup, hub: Hub | None = None) -> None:
        """With a ``hub`` bytes move by the embedded transport, in weather that a test makes; else by NIXL."""
        self.setup = setup
        with _transport(hub):
            self.core = EngineCore(setup.config(), InProcess, log_stats=True)
        self.core.model_executor.is_late = setup.is_late
        self.reported: list[SchedulerStats] = []
        """What vLLM's metrics are made of: of each step in which a connector did something."""
        self._answers: dict[str, Answer] = {}
        self._numbers = count()
        self.num_free_at_start = self.num_free

    @property
    def workers(self) -> list[ToyWorker]:
        return self.core.model_executor.workers

    @property
    def num_free(self) -> int:
        """Blocks of the pool that nobody holds."""
        return self.core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()

    @property
    def is_whole(self) -> bool:
        """Whether all blocks are free, and the scheduler has forgotten every request."""
        return self.num_free == self.num_free_at_start and not self.core.scheduler.requests

    def right(self, prompt: Sequence[int], num_tokens: int = NUM_TOKENS) -> list[int]:
        """The tokens of an answer for which every cell was right."""
        return answer(whole(layer for w in self.workers for layer in w.layers), prompt, num_tokens)

    def ask(
        self,
        prompt: Sequence[int],
        num_tokens: int = NUM_TOKENS,
        params: Params | None = None,
        request_id: str = "",
        lora: LoRARequest | None = None,
        cache_salt: str | None = None,
        **sampling_args: Any,
    ) -> Answer:
        """Hand in a request. ``params`` go through JSON, as through a router."""
        extra = {"kv_transfer_params": json.loads(json.dumps(params))} if params is not None else None
        sampling = SamplingParams(
            temperature=0, max_tokens=num_tokens, ignore_eos=True, extra_args=extra, **sampling_args
        )
        return self.submit(prompt, sampling, request_id, lora, cache_salt)

    def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        request_id: str = "",
        lora: LoRARequest | None = None,
        cache_salt: str | None = None,
    ) -> Answer:
        """The same, as vLLM's front end has it."""
        request_id = request_id or f"request-{next(self._numbers)}"
        sampling.update_from_generation_config({}, 257)
        wanted = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=list(prompt),
            mm_features=None,
            sampling_params=sampling,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=lora,
            cache_salt=cache_salt,
            data_parallel_rank=None,
        )
        found = self._answers[request_id] = Answer(request_id)
        self.core.add_request(*self.core.preprocess_add_request(wanted))
        return found

    def abort(self, request_id: str) -> None:
        self.core.abort_requests([request_id])

    def step(self) -> bool:
        """One turn of the engine core's loop; whether the model ran."""
        outputs, has_run = self.core.step_fn()
        self.core.post_step(has_run)
        for of_client in (outputs or {}).values():
            self._report(of_client.scheduler_stats)
            for output in of_client.outputs:
                self._take(output)
        return has_run

    def _report(self, stats: SchedulerStats | None) -> None:
        hits = stats.connector_prefix_cache_stats if stats else None
        if stats and (stats.kv_connector_stats or (hits and hits.hits)):
            self.reported.append(stats)

    def _take(self, output: Any) -> None:
        found = self._answers[output.request_id]
        found.tokens += output.new_token_ids
        found.params = output.kv_transfer_params or found.params
        if output.prefill_stats is not None:
            found.num_external = output.prefill_stats.num_external_cached_tokens
            found.num_local = output.prefill_stats.num_local_cached_tokens
        if output.finish_reason is not None:
            found.finish_reason = str(output.finish_reason)

    def totals(self) -> Counter[str]:
        """Of vLLM's own metrics, as its front end makes them; those with sources by source."""
        logger = PrometheusStatLogger(self.core.vllm_config, [0])
        for stats in self.reported:
            logger.record(stats, None)
        totals: Counter[str] = Counter()
        for found in (one for metric in REGISTRY.collect() for one in metric.samples):
            name = found.name.removeprefix("vllm:")
            if name.endswith("_total"):
                totals[f"{name} {found.labels.get('source', '')}".strip()] += int(found.value)
        return totals

    def run(self, condition: Callable[[], object], seconds: float = SECONDS) -> None:
        """Step until something is so."""
        drive([self], condition, seconds)

    def finish(self, answer: Answer) -> None:
        """Step until a request is answered."""
        self.run(lambda: answer.is_done)

    def close(self) -> None:
        """As ``EngineCore.shutdown``, but without its sweep through this whole process's garbage."""
        self.core.model_executor.shutdown()
        self.core.scheduler.shutdown()


def drive(engines: Sequence[Engine], condition: Callable[[], object], seconds: float = SECONDS) -> None:
    """Step all engines in turn until something is so."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds} s: {[engine._answers for engine in engines]}")
        have_run = [engine.step() for engine in engines]
        if not any(have_run):
            time.sleep(MODEL_SECONDS)
