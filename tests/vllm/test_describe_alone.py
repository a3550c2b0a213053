"""R004-5, R003-1 through vLLM's own allocator: a description follows from the cache alone."""

import importlib.util
from dataclasses import replace

import pytest

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vllm is not installed", allow_module_level=True)

from kvferry import Manifest, plan
from kvferry.core.manifest import merge
from kvferry.integrations.vllm.worker.describe import WorkerRank, describe
from tests.vllm.corpus import families
from tests.vllm.corpus.allocated import Cut, Worker, workers

FAMILIES = ["kimi_linear", "gemma4", "states", "deepseek_v4", "mla_with_gqa_draft"]
BLOCK = {"deepseek_v4": 256}


def engine(family: str, tp: int) -> list[Worker]:
    """All ranks of an engine, in memory of their own."""
    heads = tuple(families.HEADS.get(family, {}).items())
    cuts = [Cut(tp, BLOCK.get(family, 64), rank=rank, heads=heads) for rank in range(tp)]
    return workers(getattr(families, family), cuts, "engine")


def unplaced(manifest: Manifest) -> Manifest:
    """The description without the addresses of this allocation."""
    ranks = (
        replace(rank, regions=tuple(replace(region, address=0) for region in rank.regions))
        for rank in manifest.ranks
    )
    return replace(manifest, ranks=tuple(ranks))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_configuration_gives_the_same_description(family: str) -> None:
    """R004-5, RA-9: whenever and wherever it is allocated, and so the same plan."""
    one, other = (merge([worker.manifest for worker in engine(family, 2)]) for _ in range(2))
    assert unplaced(one) == unplaced(other)
    dst = engine(family, 1)[0].manifest
    assert plan(one, dst, 0).pieces == plan(other, dst, 0).pieces


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_but_the_cache_decides(family: str) -> None:
    """R004-5, RA-9: what a scheduler or a seed is told changes nothing; nor does the order of layers."""
    worker = engine(family, 2)[1]
    config = worker.cut.config()
    config.compilation_config.static_forward_context.update(worker.layers)
    config.scheduler_config.max_num_batched_tokens = 4096
    config.scheduler_config.max_num_seqs = 3
    config.observability_config.collect_detailed_traces = None
    config.model_config.seed = 7
    (rank,) = worker.manifest.ranks
    again = describe(
        config, worker.config, dict(reversed(worker.caches.items())), WorkerRank("engine", rank.rank, 1, 2)
    )
    assert again == worker.manifest


@pytest.mark.parametrize("family", FAMILIES)
def test_an_allocation_of_vllms_is_one_region(family: str) -> None:
    """R003-1, RA-9: what the transport is given to register is each allocation of vLLM's, once and whole."""
    for worker in engine(family, 2):
        storages = {cache.untyped_storage() for cache in worker.caches.values()}
        allocated = {(storage.data_ptr(), storage.nbytes()) for storage in storages}
        regions = [(region.address, region.num_bytes) for region in worker.manifest.ranks[0].regions]
        assert len(worker.caches) > len(allocated)
        assert sorted(regions) == sorted(allocated)
