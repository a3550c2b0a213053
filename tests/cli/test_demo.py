"""``kvferry demo --transport memory``: everything right, and nothing wrong that it would not name."""

import pytest

import kvferry
from kvferry.core.runs import Runs

QUICK = (
    "demo",
    "--transport",
    "memory",
    "--model",
    "llama-3.1-8b",
    "--layers",
    1,
    "--tokens",
    70,
    "--requests",
    2,
)


def test_the_demo_as_it_comes(cli):
    ran = cli("demo", "--transport", "memory", "--tokens", 60, "--requests", 1)
    assert (ran.code, ran.err) == (0, "")
    last = ran.out.splitlines()[-1]
    assert last.startswith("verified: ")
    assert last.endswith(" cells of 3 requests, 0 wrong")
    assert "\x1b" not in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80


def test_one_request_is_one_request(cli):
    ran = cli("demo", "--transport", "memory", "--model", "gpt2", "--layers", 1, "--requests", 1)
    assert ran.out.splitlines()[-1].endswith(" cells of 1 request, 0 wrong")


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
def test_other_families(cli, model, src, dst):
    few = ("--layers", 2, "--tokens", 150, "--requests", 2)
    ran = cli("demo", "--transport", "memory", "--model", model, "--src", src, "--dst", dst, *few, "--json")
    assert ran.code == 0, ran
    answer = ran.answer
    assert (answer["verdict"], answer["num_wrong"], answer["num_requests"]) == ("verified", 0, 2)
    assert answer["num_cells"] > 0


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
def test_a_spoilt_transfer_is_found_and_named(cli, monkeypatch, spoil):
    sabotaged(monkeypatch, spoil)
    ran = cli(*QUICK, "--json")
    assert ran.code == 1
    assert ran.answer["verdict"] == "wrong"
    assert ran.answer["num_wrong"] > 0
    assert "dst rank 0: layers.0.attn/" in ran.answer["pairs"][0]["first_wrong"]
    for_people = cli(*QUICK)
    assert for_people.code == 1
    assert "WRONG" in for_people.out
    assert "first: llama-3.1-8b, request-1: dst rank 0: layers.0.attn/" in for_people.out
    assert "verified" not in for_people.out


def test_a_spoilt_stride_is_found_and_named(cli, monkeypatch):
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
    ran = cli(*QUICK)
    assert ran.code == 2
    assert "not-proved: group full: wrong-source: layers.0.attn/k: lane full -> full: " in ran.err


def test_a_written_prefix_is_found(cli, monkeypatch):
    """Tokens that the destination has already must stay what they are."""
    select = kvferry.select

    def greedy(route, request, **options):
        whole = {name: (kvferry.Span(0, spans[-1].stop),) for name, spans in request.need.items()}
        return select(route, kvferry.Request(request.src, request.dst, whole), **options)

    monkeypatch.setattr(kvferry, "select", greedy)
    ran = cli(*QUICK)
    assert ran.code == 1
    assert "dst rank 0: kept layers.0.attn/k cell 0" in ran.out


def test_a_refused_pair_is_refused(cli):
    ran = cli(*QUICK, "--dst", "tp=2,dtype=fp8")
    assert ran.code == 1
    assert "REFUSED" in ran.out
    assert "fp8_e4m3" in ran.out
