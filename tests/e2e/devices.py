"""What an engine of the harness computes on: a CPU, or a GPU that several engines share."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_ANYWHERE = {
    "HF_HUB_OFFLINE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "INFO",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclass(frozen=True, slots=True)
class Device:
    """What vLLM is told on such a device, unless a test says otherwise."""

    name: str
    env: Mapping[str, str]
    args: Mapping[str, Any]
    """Engine arguments: exact, and small."""
    worker: str
    """vLLM's worker class, by module and name."""

    def worker_class(self) -> Any:
        """vLLM's worker class; imports vLLM."""
        module, name = self.worker.split(":")
        return getattr(importlib.import_module(module), name)


CPU = Device(
    name="cpu",
    env={
        **_ANYWHERE,
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    },
    args={
        "dtype": "float32",
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 512,
    },
    worker="vllm.v1.worker.cpu_worker:CPUWorker",
)
CUDA = Device(
    name="cuda",
    env={
        **_ANYWHERE,
        # Not every machine has these packages, and neither touches the cache.
        "VLLM_USE_DEEP_GEMM": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        # Kimi-Linear's fused matrix product needs cutlass.
        "VLLM_KIMI_K3_GEMM_AR": "0",
        # For vLLM's own connector: without it UCX reads device memory of one host through the host.
        "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "y",
    },
    args={
        "dtype": "bfloat16",
        "enable_prefix_caching": False,
        "enforce_eager": True,
        # Engines share the GPU: each says what it takes, and vLLM does not measure what is free.
        "gpu_memory_utilization": 0.05,
        "kv_cache_memory_bytes": 256 << 20,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "worker_extension_cls": "tests.e2e.taught.Taught",
    },
    worker="vllm.v1.worker.gpu_worker:Worker",
)


def device_named(name: str) -> Device:
    """``cpu`` or ``cuda``."""
    return {device.name: device for device in (CPU, CUDA)}[name]
