"""vLLM's own OffloadingConnector where there is no GPU: all of it is vLLM's but the copies of bytes.

On a CPU it ends in ``CPUOffloadingSpec.get_worker`` ("only supported on CUDA-alike and XPU GPUs"), whose
worker copies with CUDA streams. This specification has another worker, and inherits everything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

NUM_POLLS = 4
"""A copy begins when it has been polled so often: a block that is granted again before is seen."""
OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": 256 << 20,
        "spec_name": "HostTier",
        "spec_module_path": "tests.vllm.host_tier",
    },
}


@dataclass
class Job:
    """Blocks to copy; ``host`` and ``device`` in pairs, the groups one after the other."""

    device: GPULoadStoreSpec
    host: CPULoadStoreSpec
    is_store: bool
    num_polls: int = 0


class Copies(OffloadingWorker):  # type: ignore[misc]
    """Copies whole blocks between two tensors of the host."""

    def __init__(self, caches: CanonicalKVCaches, num_chunks: int) -> None:
        self._device = [cache.tensor for cache in caches.tensors]
        self._host = [
            torch.zeros((num_chunks, cache.page_size_bytes), dtype=torch.int8) for cache in caches.tensors
        ]
        self._refs = caches.group_data_refs
        self._jobs: dict[int, Job] = {}
        self._finished: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        self._jobs[job_id] = Job(src_spec, dst_spec, is_store=True)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec) -> bool:
        self._jobs[job_id] = Job(dst_spec, src_spec, is_store=False)
        return True

    def get_finished(self) -> list[TransferResult]:
        for job in self._jobs.values():
            job.num_polls += 1
        self.wait({job_id for job_id, job in self._jobs.items() if job.num_polls >= NUM_POLLS})
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        for job_id in sorted(job_ids & self._jobs.keys()):
            num_bytes = self._copy(self._jobs.pop(job_id))
            self._finished.append(TransferResult(job_id, True, num_bytes, 1e-3))

    def _copy(self, job: Job) -> int:
        num_bytes, pairs = 0, iter(zip(job.device.block_ids, job.host.block_ids, strict=True))
        for refs, num_blocks in zip(self._refs, job.device.group_sizes, strict=True):
            for _ in range(num_blocks):
                block, chunk = next(pairs)
                for ref in refs:
                    ends = self._device[ref.tensor_idx][block], self._host[ref.tensor_idx][chunk]
                    src, dst = ends if job.is_store else ends[::-1]
                    dst[: ref.page_size_bytes] = src[: ref.page_size_bytes]
                    num_bytes += ref.page_size_bytes
        return num_bytes


class HostTier(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's specification, with the worker above."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return Copies(kv_caches, self.num_chunks)
