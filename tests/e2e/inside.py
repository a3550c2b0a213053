"""What a test asks of an engine core and of its workers, from inside their processes.

On a CPU the frontend teaches them to answer, before vLLM forks them. With a GPU that would be too early: the
frontend would import vLLM's worker, and whoever calls the GPU, if only to count devices, must not be forked
any more; and where vLLM spawns processes, because somebody has, they would know nothing of it. There a worker
teaches itself: it names ``tests.e2e.taught.Taught`` as its extension. One rank runs in the process of the
engine core, so that this reaches both.
"""

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tests.e2e.devices import Device

LOOK_SECONDS = 2e-4
"""How long vLLM's processes sleep between two looks at what they wait for."""


TEACH = "KVFERRY_TEST_TEACH"
"""In the environment of an engine whose workers teach themselves: the device."""


def teach(device: Device) -> None:
    """Teach the engine core and the workers, this process or its children, to answer a test's questions."""
    if device.name == "cpu":
        _sleep_between_looks()
    _time_registering()
    _watch_loads()
    _add(_engine_core_class(), num_free_blocks, groups, forget, mix_free_blocks, has_transfers)
    _add(_engine_core_class(), num_running, num_waiting, cuts_prompts, step_lengths, longest_step)
    _add(
        device.worker_class(),
        spoil,
        status,
        register_seconds,
        kernels,
        manifest,
        layouts,
        snapshot,
        watch,
        last_load,
        sums,
        device_bytes_free,
    )


def _engine_core_class() -> Any:
    from vllm.v1.engine.core import EngineCore

    return EngineCore


def _add(cls: Any, *functions: Any) -> None:
    for function in functions:
        setattr(cls, f"_test_{function.__name__}", function)


# -- of the engine core ------------------------------------------------------------------------------------


def num_free_blocks(core: Any) -> int:
    """Of the pool that all groups share."""
    return int(core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())


def num_running(core: Any) -> int:
    return int(core.scheduler.get_request_counts()[0])


def num_waiting(core: Any) -> int:
    return int(core.scheduler.get_request_counts()[1])


def groups(core: Any) -> list[list[Any]]:
    """Each group: kind, block size, bytes of a page, number of layers."""
    return [
        [
            type(group.kv_cache_spec).__name__,
            group.kv_cache_spec.block_size,
            group.kv_cache_spec.page_size_bytes,
            len(group.layer_names),
        ]
        for group in core.scheduler.kv_cache_config.kv_cache_groups
    ]


def forget(core: Any) -> bool:
    """Find no prefix of what was there before; False if blocks are in use: then nothing is forgotten."""
    return bool(core.scheduler.reset_prefix_cache())


def has_transfers(core: Any) -> bool:
    """Whether a connector beside ours still saves or sends."""
    connectors = getattr(core.scheduler.connector, "_connectors", [])
    others = [each for each in connectors if type(each).__name__ != "KVFerryConnector"]
    return any(other.has_pending_push_work() for other in others)


def mix_free_blocks(core: Any) -> None:
    """The next request gets other blocks than the last: vLLM grants first what was freed last."""
    queue = core.scheduler.kv_cache_manager.block_pool.free_block_queue
    blocks = queue.popleft_n(queue.num_free_blocks)
    random.Random(len(blocks)).shuffle(blocks)
    queue.append_n(blocks)


def cuts_prompts(core: Any) -> bool:
    """Whether vLLM computes a prompt in several steps at all: for MLA, most CPUs have no kernel for that."""
    return bool(core.scheduler.scheduler_config.enable_chunked_prefill)


def step_lengths(core: Any, num_tokens: int) -> None:
    """Compute at most so many tokens in one step; 0: as many as vLLM likes. Counts ``longest_step`` anew.

    By the budget of a step: vLLM ignores ``long_prefill_token_threshold`` for a request that is alone.
    """
    scheduler = core.scheduler
    if not hasattr(scheduler, "_test_longest_step"):
        scheduler._test_budget = scheduler.max_num_scheduled_tokens
        _note_steps(scheduler)
    scheduler.max_num_scheduled_tokens = min(num_tokens or scheduler._test_budget, scheduler._test_budget)
    scheduler._test_longest_step = 0


def longest_step(core: Any) -> int:
    """The most tokens of one request that a step computed, since ``step_lengths`` was last called."""
    return int(core.scheduler._test_longest_step)


def _note_steps(scheduler: Any) -> None:
    schedule = scheduler.schedule

    def schedule_noted(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        longest = max(output.num_scheduled_tokens.values(), default=0)
        scheduler._test_longest_step = max(scheduler._test_longest_step, longest)
        return output

    scheduler.schedule = schedule_noted


# -- of a worker -------------------------------------------------------------------------------------------


def spoil(worker: Any, layers: str) -> int:
    """Overwrite with zeros the caches of layers whose names have this in them; return how many."""
    import torch

    found = [tensors for name, tensors in _caches(worker) if layers in name]
    for tensors in found:
        for tensor in tensors:
            tensor.zero_()
    if found and found[0][0].is_cuda:
        # Another process reads next, and it does not wait for this device's queue.
        torch.cuda.synchronize()
    return len(found)


def status(worker: Any) -> dict[str, Any]:
    """The connector's own."""
    return dict(_side().status())


def register_seconds(worker: Any) -> float:
    """How long the connector took to be made and to register the cache."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return float(get_kv_transfer_group()._test_register_seconds)


def kernels(worker: Any) -> list[str]:
    """The attention backends, and the instruction set that CPU attention runs on."""
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    found = {
        f"{layer.get_attn_backend().get_name()} {getattr(layer, 'isa', '')}".strip()
        for layer in layers
        if hasattr(layer, "get_attn_backend")  # experts are listed, too
    }
    return sorted(found)


def device_bytes_free(worker: Any) -> int:
    """Of the GPU; -1 on a CPU."""
    import torch

    return int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else -1


def manifest(worker: Any) -> bytes:
    """What the connector says of this rank, as JSON."""
    from kvferry.wire import manifest_to_json

    return manifest_to_json(_manifest())


def layouts(worker: Any) -> dict[str, Any]:
    """How the check of layouts fares with this worker's layers: as they are, and with mistakes."""
    from kvferry.integrations.vllm.worker.describe import WorkerRank, described_layers
    from kvferry.integrations.vllm.worker.layout_check import LayoutDiffers, Untried, look
    from tests.vllm.sabotage import sabotaged

    side, dtype = _side(), worker.vllm_config.model_config.dtype
    found: dict[str, Any] = {"tried": 0, "untried": {}, "wrong": {}, "mistakes": 0, "unnoticed": []}
    started = time.perf_counter()
    for layer in described_layers(
        worker.vllm_config, side._config, side._test_caches, WorkerRank("", 0, 0, 1)
    ):
        try:
            look(layer, dtype)
            found["tried"] += 1
        except Untried as why:
            found["untried"][layer.name] = str(why)
            continue
        except LayoutDiffers as why:
            found["wrong"][layer.name] = str(why)
            continue
        for what, wrong in sabotaged(layer):
            found["mistakes"] += 1
            try:
                look(wrong, dtype)
                found["unnoticed"].append(f"{layer.name}: {what}")
            except LayoutDiffers:
                pass
    return found | {"seconds": time.perf_counter() - started}


# -- what was moved: digests of both sides' memory, each at the moment that counts --------------------------

_is_watching = False
_kept: dict[str, Any] = {}
"""``src``: the bytes when a test asked; ``dst``: those when the last load was over; ``load``: that load."""


def snapshot(worker: Any) -> None:
    """Keep the bytes of the cache, as a source's: before anybody may read, and change, them."""
    _kept["src"] = _memory(worker)


def watch(worker: Any, is_watching: bool) -> None:
    """Keep the bytes of the cache, as a destination's, whenever a load is over, before vLLM hears of it.

    Later would be too late: the first step changes the states of recurrent layers.
    """
    global _is_watching  # noqa: PLW0603  (a process is one worker)
    _is_watching = is_watching
    _kept["worker"] = worker


def last_load(worker: Any) -> bytes:
    """The request of the last load that was watched, as JSON: both sides' tables, and what was needed."""
    from kvferry.core.request import Request
    from tests.support.requests import request_to_json

    load = _kept["load"]
    return request_to_json(Request(load.tickets[0].block_tables(), load.tables, load.need, load.kept))


def sums(worker: Any, side: str, request: bytes, question: bytes, states: list[str]) -> list[bytes]:
    """The digest of each part of a request, in the bytes that this side has kept.

    A question names states as the source does; ``states`` are the destination's names of them.
    """
    from kvferry.core.digest import DigestSide, sums_to_bytes
    from kvferry.wire import request_from_json
    from kvferry.wire.rank_asks import question_from_msgpack

    seed, asked = question_from_msgpack(question)
    parts = [replace(part, state=state) for part, state in zip(asked, states, strict=True)]
    tables, ours = getattr(request_from_json(request)[0], side), _manifest()
    found = DigestSide(ours, ours.ranks[0], tables, _kept[side], side).sums(parts, seed=seed)
    return [sums_to_bytes([one]) for one in found]


def _watch_loads() -> None:
    """Of kvferry's connector."""
    from kvferry.integrations.vllm.worker import side as module

    worker_side: Any = module.WorkerSide
    worker_side._test_loads = {}
    load_before, results_before = worker_side._load, worker_side.results

    def load(side: Any, order: Any) -> None:
        side._test_loads[order.request_id] = order
        load_before(side, order)

    def results(side: Any) -> Any:
        found = results_before(side)
        for request_id in found.finished_recving:
            order = side._test_loads.pop(request_id, None)
            if _is_watching and order is not None and request_id not in found.failed_recving:
                _kept["load"], _kept["dst"] = order, _memory(_kept["worker"])
        return found

    register_before = worker_side.register

    def register(side: Any, caches: Any) -> None:
        side._test_caches = caches
        register_before(side, caches)

    worker_side._load, worker_side.results, worker_side.register = load, results, register


def _memory(worker: Any) -> dict[str, Any]:
    """The bytes of each region of the manifest, copied to the host."""
    import torch

    storages = {}
    for _, tensors in _caches(worker):
        for tensor in tensors:
            storages[tensor.untyped_storage().data_ptr()] = tensor
    found = {}
    for region in _manifest().ranks[0].regions:
        for start, tensor in storages.items():
            storage = tensor.untyped_storage()
            if start <= region.address < start + storage.nbytes():
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                at = region.address - start
                found[region.name] = whole[at : at + region.num_bytes].cpu().numpy().copy()
    return found


def _caches(worker: Any) -> Iterator[tuple[str, list[Any]]]:
    """The tensors of each layer that has a cache, by the layer's name."""
    for name, layer in worker.vllm_config.compilation_config.static_forward_context.items():
        cache = getattr(layer, "kv_cache", None)
        if cache is not None:
            yield name, list(cache) if isinstance(cache, list | tuple) else [cache]


def _manifest() -> Any:
    from kvferry.wire.outline import manifest_of_joins

    join = _side().join
    return manifest_of_joins({join.rank: join})


def _side() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._worker


# -- what is changed in vLLM -------------------------------------------------------------------------------


def _sleep_between_looks() -> None:
    """Where vLLM's processes wait for each other, they look at shared memory again and again, and only yield
    in between: for a second after each step, and an engine with a ticket out makes steps until its lease
    ends. With more engines than processors that starves whoever else wants to run. Measured on two: a router
    that is ready to run gets no processor for as long as a lease, whatever its length, and its ticket is
    over before a reader has heard of it.
    """
    from vllm.distributed.device_communicators import shm_broadcast

    if not hasattr(shm_broadcast, "sched_yield"):
        raise RuntimeError("this vLLM waits in another way: does it still need to be changed here?")
    shm_broadcast.sched_yield = lambda: time.sleep(LOOK_SECONDS)


def _time_registering() -> None:
    """Of whatever connector."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    create = KVConnectorFactory.create_connector

    def create_timed(*args: Any, **kwargs: Any) -> Any:
        made = time.perf_counter()
        connector = create(*args, **kwargs)
        making = time.perf_counter() - made
        register = connector.register_kv_caches

        def register_timed(caches: Any) -> None:
            started = time.perf_counter()
            register(caches)
            connector._test_register_seconds = making + time.perf_counter() - started

        connector.register_kv_caches = register_timed
        return connector

    KVConnectorFactory.create_connector = create_timed
