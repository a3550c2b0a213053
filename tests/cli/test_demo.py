"""What ``kvferry demo`` checks by, in one process: nothing wrong that it would not name."""

import pytest

import kvferry
from kvferry.cli.demo.engines import Pair, RankCells, some_samples
from kvferry.cli.demo.moves import DemoResult, show
from kvferry.core.runs import Runs
from kvferry.core.sample import Placement, sample_request
from kvferry.pattern import KEPT

QUICK = (Pair("llama-3.1-8b", num_layers=1), 70)


def demonstrated(pair, num_tokens):
    """Two requests of a pair, moved in this process, run by run."""
    src, dst = (pair.manifest(side, num_tokens, num_requests=2) for side in ("src", "dst"))
    result = DemoResult(pair.model, pair.src, pair.dst)
    routes = [kvferry.lower(kvferry.prove(kvferry.plan(src, dst, rank.rank))) for rank in dst.ranks]
    for sample, placement in zip(some_samples(dst, 2, num_tokens), Placement, strict=True):
        request = sample_request(src, dst, sample.num_tokens, num_kept=sample.num_kept, placement=placement)
        sources = {rank.rank: RankCells(src, rank.rank) for rank in src.ranks}
        for source in sources.values():
            source.fill_all(request.src, sample.num_tokens)
        for route in routes:
            cells = RankCells(dst, route.plan.dst_rank)
            cells.fill(request.dst, request.kept, KEPT)
            move(route, request, sources, cells.memory)
            names = {state: route.plan.src_name(state) for state in route.plan.states}
            result.count(sample, "", cells.rank, cells.check(request.dst, request.need, names))
            kept = cells.check(request.dst, request.kept, {name: name for name in names}, KEPT)
            result.count(sample, "kept ", cells.rank, kept)
        result.num_requests += 1
    return result


def move(route, request, sources, dst):
    selection = kvferry.select(route, request)
    for src_rank, runs in selection.reads.items():
        src = sources[src_rank].memory
        for src_region, src_start, dst_region, dst_start, length in runs:
            dst.read(dst_start, length, dst_region)[:] = src.read(src_start, length, src_region)
    for _, _, region, start, length in selection.zeros:
        dst.clear(start, length, region)


@pytest.mark.parametrize(
    ("model", "src", "dst"),
    [
        ("gpt-oss-20b", "tp=2", "tp=1,pp=2,block=32"),
        ("qwen3-next-80b", "tp=2,block=64", "tp=1,conv=DS,layout=NHD"),
        ("deepseek-v4", "tp=2", "tp=1,block=512"),
        ("gemma-3n-e4b", "tp=1,cp=2", "tp=2,layout=cpu-vec"),
        ("kimi-k2.5+kimi-k2.5-eagle3", "tp=4", "tp=2"),
        ("llama-3.1-8b", "layout=opaque", "layout=opaque,pp=2"),
    ],
)
def test_other_families(model, src, dst):
    result = demonstrated(Pair(model, src, dst, 2), 150)
    assert (result.verdict, result.num_wrong, result.num_requests) == ("verified", 0, 2)
    assert result.num_cells > 0


def sabotaged(monkeypatch, spoil):
    """Spoil the first source rank's runs of every selection."""

    select = kvferry.select

    def spoilt(route, request, **options):
        selection = select(route, request, **options)
        first = min(selection.reads)
        return kvferry.Selection.of(
            {**selection.reads, first: spoil(selection.reads[first])}, selection.zeros
        )

    monkeypatch.setattr(kvferry, "select", spoilt)


def drop_a_run(runs):
    return Runs(runs.src[1:], runs.dst[1:], runs.num_bytes[1:])


def read_the_next_item(runs):
    return Runs(runs.src + 2, runs.dst, runs.num_bytes)


def swap_two_runs(runs):
    src = runs.src.copy()
    src[[0, 1]] = src[[1, 0]]
    return Runs(src, runs.dst, runs.num_bytes)


@pytest.mark.parametrize("spoil", [drop_a_run, read_the_next_item, swap_two_runs])
def test_a_spoilt_transfer_is_found_and_named(monkeypatch, capsys, spoil):
    sabotaged(monkeypatch, spoil)
    result = demonstrated(*QUICK)
    assert result.verdict == "wrong"
    assert result.num_wrong > 0
    assert "dst rank 0: layers.0.attn/" in result.first_wrong
    show(result)
    out = capsys.readouterr().out
    assert "WRONG" in out
    assert "first: llama-3.1-8b, request-1: dst rank 0: layers.0.attn/" in out
    assert "verified" not in out


def test_a_spoilt_stride_is_found_and_named(monkeypatch):
    """The lowered program steps through the source's blocks with half their stride: nothing moves."""
    lower = kvferry.lower

    def spoilt(proof):
        made = lower(proof)
        for lane in made.lanes:
            for bundle in lane.bundles:
                spoilt_key = bundle.key._replace(src_stride=bundle.key.src_stride // 2)
                object.__setattr__(bundle, "key", spoilt_key)
        return made

    monkeypatch.setattr(kvferry, "lower", spoilt)
    with pytest.raises(kvferry.KVFerryError, match=r"wrong-source: layers\.0\.attn/k: lane full -> full: "):
        demonstrated(*QUICK)


def test_a_written_prefix_is_found(monkeypatch):
    """Tokens that the destination has already must stay what they are."""
    select = kvferry.select

    def greedy(route, request, **options):
        whole = {name: (kvferry.Span(0, spans[-1].stop),) for name, spans in request.need.items()}
        return select(route, kvferry.Request(request.src, request.dst, whole), **options)

    monkeypatch.setattr(kvferry, "select", greedy)
    assert "dst rank 0: kept layers.0.attn/k cell 0" in demonstrated(*QUICK).first_wrong
