"""The worker of vLLM's own NixlConnector without an engine around it, on memory that somebody else has.

Both sides are vLLM's: the worker that registers caches and reads, the scheduler's listener for handshakes,
the messages. What an engine would do is done here: a configuration, a request's block ids, a look for the
end. Written for vLLM 0.32 and 0.33.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvferry.core.manifest import Region
from kvferry.errors import TransportError

LOOPBACK = "127.0.0.1"
LAYOUT = "LBHNC"
"""vLLM's name of caches that lie layer by layer, block by block."""
LEASE_SECONDS = 600.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""What vLLM is told, where the environment does not say otherwise."""


@dataclass(frozen=True)
class WorkerCaches:
    """The caches of one worker, in vLLM's words; values of two bytes."""

    model_folder: str
    """Where the model's configuration is put. Both sides compare its name, so it is the same for both."""
    num_layers: int
    num_blocks: int
    num_kv_heads: int
    head_size: int
    block_size: int

    @property
    def layer_names(self) -> list[str]:
        return [f"model.layers.{i}.self_attn.attn" for i in range(self.num_layers)]

    @property
    def page_bytes(self) -> int:
        """One block of one layer, K and V."""
        return 4 * self.num_kv_heads * self.head_size * self.block_size


@dataclass(frozen=True)
class WorkerOffer:
    """What a router would hand on from one engine to the other."""

    request_id: str
    block_ids: list[int]
    engine_id: str
    host: str
    port: int


class NixlSource:
    """The side that is read from."""

    def __init__(
        self, caches: WorkerCaches, region: Region, memory: NDArray[np.uint8], host: str = LOOPBACK
    ) -> None:
        self._host, self._port = host, _free_port(host)
        config, groups = _configured("kv_producer", caches, region, self._host, self._port)
        self._worker = _registered(config, groups, caches, region, memory)
        self._engine_id = config.kv_transfer_config.engine_id
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnectorScheduler

        self._scheduler = NixlConnectorScheduler(config, self._engine_id, groups)
        self._scheduler.set_xfer_handshake_metadata({(0, 0): self._worker.xfer_handshake_metadata})

    def offer(self, request_id: str, block_ids: list[int]) -> WorkerOffer:
        """Keep a request's blocks for a reader; those that were read are forgotten."""
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnectorMetadata

        step = NixlConnectorMetadata()
        step.reqs_in_batch = {request_id}
        step.reqs_to_send = {request_id: time.perf_counter() + LEASE_SECONDS}
        self._worker.start_load_kv(step)
        self._worker.get_finished()
        return WorkerOffer(request_id, block_ids, self._engine_id, self._host, self._port)

    def close(self) -> None:
        """Give agent and listener up."""
        self._scheduler.shutdown()
        self._worker.shutdown()


class NixlReader:
    """The side that reads."""

    def __init__(
        self, caches: WorkerCaches, region: Region, memory: NDArray[np.uint8], host: str = LOOPBACK
    ) -> None:
        config, groups = _configured("kv_consumer", caches, region, host, _free_port(host))
        self._worker = _registered(config, groups, caches, region, memory)

    def load(self, offer: WorkerOffer, block_ids: list[int], timeout_s: float) -> float:
        """Read a request; seconds from the start of the load to its end. The first one shakes hands."""
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnectorMetadata

        step, nothing = NixlConnectorMetadata(), NixlConnectorMetadata()
        params = {
            "remote_block_ids": (offer.block_ids,),
            "remote_engine_id": offer.engine_id,
            "remote_request_id": offer.request_id,
            "remote_host": offer.host,
            "remote_port": offer.port,
            "tp_size": 1,
        }
        step.add_new_req_to_recv(offer.request_id, (block_ids,), params, awaiting_kvs=True)
        started = time.perf_counter()
        self._worker.start_load_kv(step)
        while offer.request_id not in self._worker.get_finished()[1]:
            if not self._worker._ready_requests.empty():  # an engine's next step would take it up
                self._worker.start_load_kv(nothing)
            if time.perf_counter() - started > timeout_s:
                raise TransportError("late", f"vLLM's worker did not end a load within {timeout_s:g} s")
        seconds = time.perf_counter() - started
        if failed := self._worker.get_block_ids_with_load_errors():
            raise TransportError("failed", f"vLLM's worker could not load {len(failed)} blocks")
        return seconds

    def close(self) -> None:
        """Give the agent up."""
        self._worker.shutdown()


class NixlPushEnd:
    """Either side of vLLM's NixlPushConnector: the reader registers, and the source writes in the end."""

    def __init__(
        self, role: str, caches: WorkerCaches, region: Region, memory: NDArray[np.uint8], host: str = LOOPBACK
    ) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (
            NixlPushConnectorScheduler,
            NixlPushConnectorWorker,
        )

        self._host, self._port = host, _free_port(host)
        config, groups = _configured(role, caches, region, host, self._port, "NixlPushConnector")
        self._worker = _registered(config, groups, caches, region, memory, NixlPushConnectorWorker)
        self._engine_id = config.kv_transfer_config.engine_id
        self._scheduler = NixlPushConnectorScheduler(config, self._engine_id, groups)
        self._scheduler.set_xfer_handshake_metadata({(0, 0): self._worker.xfer_handshake_metadata})

    def at(self, request_id: str) -> WorkerOffer:
        """Where a reader registers for a request."""
        return WorkerOffer(request_id, [], self._engine_id, self._host, self._port)

    def push(self, request_id: str, block_ids: list[int], timeout_s: float) -> None:
        """The source's: write a finished request to the reader that has registered, or will."""
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnectorMetadata

        step = NixlConnectorMetadata()
        step.push_finished_blocks = {request_id: (block_ids,)}
        step.reqs_in_batch = {request_id}
        step.reqs_to_send = {request_id: time.perf_counter() + LEASE_SECONDS}
        self._worker.start_load_kv(step)
        self._wait(request_id, 0, timeout_s)

    def register(self, source: WorkerOffer, block_ids: list[int]) -> None:
        """The reader's: ask the source to write a request here."""
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnectorMetadata

        there = {
            "remote_engine_id": source.engine_id,
            "remote_host": source.host,
            "remote_port": source.port,
        }
        step = NixlConnectorMetadata()
        step.push_registrations = {
            source.request_id: {
                "request_id": source.request_id,
                "decode_engine_id": self._engine_id,
                "decode_host": self._host,
                "decode_port": self._port,
                "decode_tp_size": 1,
                "local_block_ids": (block_ids,),
                "remote_tp_size": 1,
                "remote_pp_size": 1,
                **there,
            }
        }
        params = {"remote_block_ids": (), "remote_request_id": source.request_id, "tp_size": 1, **there}
        step.add_new_req_to_recv(source.request_id, (block_ids,), params, awaiting_kvs=True)
        self._worker.start_load_kv(step)

    def wait(self, request_id: str, timeout_s: float) -> None:
        """The reader's: until the request has been written."""
        self._wait(request_id, 1, timeout_s)

    def _wait(self, request_id: str, side: int, timeout_s: float) -> None:
        until = time.perf_counter() + timeout_s
        while request_id not in self._worker.get_finished()[side]:
            if time.perf_counter() > until:
                raise TransportError("late", f"vLLM's worker did not end a push within {timeout_s:g} s")
            time.sleep(0.0005)


def _configured(
    role: str, caches: WorkerCaches, region: Region, host: str, port: int, connector: str = "NixlConnector"
) -> tuple[Any, Any]:
    """vLLM's configuration of an engine and of its caches."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": host, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    kind = region.device.partition(":")[0]
    if kind != "cpu" and kind != current_platform.device_type:
        raise TransportError("no-device", f"this build of vLLM is for {current_platform.device_type} only")
    transfer = {
        "kv_connector": connector,
        "kv_role": role,
        "engine_id": f"{role}-{port}",
        "kv_buffer_device": kind,
    }
    config = EngineArgs(
        model=str(_model(caches)),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=1024,
        block_size=caches.block_size,
        num_gpu_blocks_override=caches.num_blocks,
        kv_transfer_config=transfer,
    ).create_engine_config()
    config.cache_config.kv_cache_layout = LAYOUT
    return config, _groups(caches)


def _model(caches: WorkerCaches) -> Path:
    """A folder with the configuration of a small model and no weights; caches are described apart from it."""
    folder = Path(caches.model_folder)
    keys = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": caches.num_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "hidden_size": 64,
        "intermediate_size": 64,
        "vocab_size": 320,
        "max_position_embeddings": 1024,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(keys), encoding="utf-8")
    return folder


def _groups(caches: WorkerCaches) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor

    spec = FullAttentionSpec(
        block_size=caches.block_size,
        num_kv_heads=caches.num_kv_heads,
        head_size=caches.head_size,
        dtype=torch.bfloat16,
    )
    layer_bytes = caches.num_blocks * caches.page_bytes
    tensor = KVCacheTensor(
        size=caches.num_layers * layer_bytes,
        layers=caches.layer_names,
        layer_stride=layer_bytes,
        block_stride=caches.page_bytes,
    )
    return KVCacheConfig(
        num_blocks=caches.num_blocks,
        kv_cache_tensors=[tensor],
        kv_cache_groups=[KVCacheGroupSpec(caches.layer_names, spec)],
    )


def _registered(
    config: Any,
    groups: Any,
    caches: WorkerCaches,
    region: Region,
    memory: NDArray[np.uint8],
    kind: Any = None,
) -> Any:
    """A worker that knows the caches; ``kind``: its class."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnectorWorker

    kind = kind or NixlConnectorWorker
    cores = os.sched_getaffinity(0)
    with set_current_vllm_config(config):
        _be_alone(caches.model_folder)
        worker = kind(config, config.kv_transfer_config.engine_id, groups)
        # On a CPU it keeps one core for itself and the calling thread; its rivals share this thread.
        os.sched_setaffinity(0, cores)
        worker.register_kv_caches(_tensors(caches, region, memory))
    return worker


def _be_alone(folder: str) -> None:
    """Be the only rank there is, as far as vLLM's groups of processes go."""
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized():
        return
    parallel_state.init_distributed_environment(1, 0, f"file://{folder}/ranks-{os.getpid()}", 0, "gloo")
    parallel_state.ensure_model_parallel_initialized(1, 1)


def _tensors(caches: WorkerCaches, region: Region, memory: NDArray[np.uint8]) -> dict[str, Any]:
    """The memory as vLLM's caches: a tensor for each layer, blocks × heads × tokens × (K and V)."""
    import torch

    layer_bytes = caches.num_blocks * caches.page_bytes
    shape = caches.num_blocks, caches.num_kv_heads, caches.block_size, 2 * caches.head_size
    tensors = {}
    for i, name in enumerate(caches.layer_names):
        if region.device == "cpu":
            flat = torch.from_numpy(memory[i * layer_bytes : (i + 1) * layer_bytes])
        else:
            device_bytes = _DeviceBytes(region.address + i * layer_bytes, layer_bytes)
            flat = torch.as_tensor(device_bytes, device=region.device)
        tensors[name] = flat.view(torch.bfloat16).view(shape)
    return tensors


class _DeviceBytes:
    """Device memory of somebody else's, for torch to look at."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def _free_port(host: str) -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
