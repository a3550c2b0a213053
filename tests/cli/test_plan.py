"""``kvferry plan``: verdicts, bills that add up, and refusals by name."""

import json
from dataclasses import replace

import pytest

import kvferry
from kvferry.cli.link_profile import LINK_PROFILES, RDMA_400, CostTerm, Traffic
from kvferry.core.sample import Placement, sample_request
from kvferry.models import Topology, describe, model_named
from kvferry.wire import manifest_to_json

LLAMA = ("plan", "--model", "llama-3.1-8b")
PAIRS = {
    "llama-3.1-8b": ("tp=4,block=16", "tp=6,block=64,layout=NHD"),
    "kimi-linear-48b": ("tp=4,block=256", "tp=8"),
    "deepseek-v3.2": ("tp=3", "tp=2,pp=2,block=128"),
    "gpt-oss-20b": ("tp=2,pp=5+19", "tp=8,block=32"),
    "mamba2-2.7b": ("tp=2", "tp=4,conv=DS"),
    "kimi-k2.5+kimi-k2.5-eagle3": ("tp=4", "tp=2,cp=2,interleave=4"),
}


@pytest.mark.parametrize("model", PAIRS)
def test_the_bill_agrees_with_the_runs(cli, model):
    src, dst = PAIRS[model]
    ran = cli("plan", "--model", model, "--src", src, "--dst", dst, "--tokens", 1000, "--kept", 100, "--json")
    assert ran.code == 0
    answer = ran.answer
    source, destination = (describe(model_named(model), Topology.parse(text)) for text in (src, dst))
    request = sample_request(source, destination, 1000, num_kept=100, placement=Placement.SCATTERED)
    assert answer["verdict"] == "proved"
    assert answer["request"] == {"tokens": 1000, "kept": 100, "placement": "scattered"}
    totals = {"total_bytes": 0, "num_runs": 0, "zeroed_bytes": 0}
    for rank in answer["ranks"]:
        plan = kvferry.plan(source, destination, rank["dst_rank"])
        selection = kvferry.select(kvferry.lower(kvferry.prove(plan)), request)
        assert rank["explain"] == kvferry.explain(plan).splitlines()
        sizes = {src_rank: sum(run[4] for run in runs) for src_rank, runs in selection.reads.items()}
        flows = [flow for flow in answer["flows"] if flow["dst_rank"] == rank["dst_rank"]]
        assert {flow["src_rank"]: flow["total_bytes"] for flow in flows if flow["num_runs"]} == sizes
        assert rank["total_bytes"] == sum(sizes.values())
        assert rank["num_runs"] == sum(flow["num_runs"] for flow in flows) == selection.num_runs
        assert rank["zeroed_bytes"] == sum(run[4] for run in selection.zeros)
        totals = {key: total + rank[key] for key, total in totals.items()}
    assert len(answer["ranks"]) == len(destination.ranks)
    assert {key: answer[key] for key in totals} == totals


@pytest.mark.parametrize("model", PAIRS)
def test_the_time_over_a_link_is_that_of_the_slowest_rank(cli, model):
    src, dst = PAIRS[model]
    answer = cli(
        "plan", "--model", model, "--src", src, "--dst", dst, "--tokens", 1000, "--link", "all", "--json"
    ).answer
    assert [link["link"] for link in answer["links"]] == [profile.name for profile in LINK_PROFILES]
    links = {link["link"]: link for link in answer["links"]}
    cost = RDMA_400.cost
    flows = [flow for flow in answer["flows"] if flow["num_runs"]]
    ends: dict[str, float] = {}
    for flow in flows:
        here, there = f"dst {flow['dst_rank']}", f"src {flow['src_rank']}"
        traffic = Traffic(1, flow["num_runs"], flow["total_bytes"])
        ends[here] = ends.get(here, 0) + cost.of(traffic).seconds
        ends[there] = ends.get(there, cost.seconds_per_read) + cost.of(traffic).parts[CostTerm.BYTES]
    assert links["400Gb"]["seconds"] == pytest.approx(max(ends.values()), rel=1e-3)
    assert ends[links["400Gb"]["slowest_rank"]] == max(ends.values())
    assert links["400Gb"]["origin"] == links["nvlink"]["origin"] == "predicted"
    assert links["same-gpu"]["seconds"] < links["same-gpu-direct"]["seconds"]


def test_three_links_are_shown_unless_others_are_asked_for(cli):
    answer = cli(*LLAMA, "--src", "tp=1", "--dst", "tp=1", "--json").answer
    assert [link["link"] for link in answer["links"]] == ["400Gb", "nvlink", "tcp-stream"]


def test_a_source_that_serves_many_is_what_takes_longest(cli):
    ran = cli(*LLAMA, "--src", "tp=1", "--dst", "tp=8", "--link", "nvlink", "--json")
    (link,) = ran.answer["links"]
    assert (link["slowest_rank"], link["mostly"]) == ("src 0", "bytes")
    assert link["seconds"] == pytest.approx(ran.answer["total_bytes"] / 3e11, rel=0.5)
    assert link["seconds"] > ran.answer["total_bytes"] / 3e11


def test_short_runs_are_what_a_network_pays_for(cli):
    ran = cli(
        *LLAMA, "--src", "tp=2", "--dst", "tp=2,layout=NHD", "--link", "400Gb", "--link", "host-cma", "--full"
    )
    assert ran.code == 0
    (row,) = [line.split() for line in ran.out.splitlines() if line.startswith("400Gb")]
    assert " ".join(row) == "400Gb * direct 792 ms 6.07 ms dst 0 524,288 runs of 512 B, 99 %"
    assert "* predicted from published figures; not measured with kvferry" in ran.out
    assert "same-gpu" not in ran.out
    ran = cli(*LLAMA, "--src", "tp=2", "--dst", "tp=2", "--link", "host-cma")
    assert "predicted" not in ran.out


def test_a_request_of_nothing_takes_no_time(cli):
    nothing = (*LLAMA, "--src", "tp=2", "--dst", "tp=2", "--tokens", 64, "--kept", 64)
    assert "Time to move it" not in cli(*nothing).out
    assert {link["seconds"] for link in cli(*nothing, "--json").answer["links"]} == {0}


def test_an_unknown_link_is_bad_usage(cli):
    ran = cli(*LLAMA, "--src", "tp=2", "--dst", "tp=2", "--link", "wifi")
    assert (ran.code, ran.out) == (2, "")
    assert "unknown link profile 'wifi'; known are host-cma," in ran.err


def test_people_get_the_same_numbers_on_80_columns(cli):
    ran = cli(*LLAMA, "--src", "tp=4", "--dst", "tp=6,block=64", "--full")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.startswith("PROVED  6 destination ranks\n")
    assert "  dst 1 <- src 0  layers.{0-31}.attn/k  channel [0, 128) × head [1, 2)\n" in ran.out
    assert "\x1b" not in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80
    assert [line for line in ran.out.splitlines() if line != line.rstrip()] == []


def test_a_request_in_too_many_runs_is_refused_with_their_number(cli):
    """A million tokens, each head of each of them a run: refused in a second, before any run is made."""
    asked = (*LLAMA, "--src", "tp=2", "--dst", "tp=3,layout=NHD", "--tokens", 1_000_000)
    ran = cli(*asked, "--json")
    assert ran.code == 1
    said = "the request needs {:,} runs, the limit is 16,777,216"
    for finding, num_runs, ranks in zip(ran.answer["findings"], (96e6, 128e6), ([0, 2], [1]), strict=True):
        assert (finding["code"], finding["dst_ranks"]) == ("too-many-runs", ranks)
        assert finding["note"].startswith(said.format(int(num_runs)))
    ran = cli(*asked)
    assert (ran.code, ran.out.count("too-many-runs"), ran.out.count("fewer tokens")) == (1, 2, 2)


def test_many_ranks_still_fit(cli):
    ran = cli(
        "plan",
        "--model",
        "deepseek-v3",
        "--src",
        "tp=4",
        "--dst",
        "tp=16",
        "--placement",
        "scattered",
        "--full",
    )
    assert ran.code == 0
    assert max(map(len, ran.out.splitlines())) <= 80


def test_one_rank_only(cli):
    answer = cli(*LLAMA, "--src", "tp=2", "--dst", "tp=4", "--dst-rank", 3, "--json").answer
    assert [rank["dst_rank"] for rank in answer["ranks"]] == [3]
    assert {flow["dst_rank"] for flow in answer["flows"]} == {3}


def test_scattered_blocks_make_more_runs(cli):
    def runs(placement):
        ends = ("--src", "tp=2", "--dst", "tp=2", "--placement", placement)
        return cli(*LLAMA, *ends, "--json").answer["num_runs"]

    assert runs(Placement.SCATTERED) > runs(Placement.CONSECUTIVE)


def test_files_and_topologies_mix(cli, tmp_path):
    src, dst = tmp_path / "src.json", tmp_path / "dst.json"
    assert cli("describe", "--model", "qwen3-32b", "--at", "tp=2", "-o", src).code == 0
    assert cli("describe", "--model", "qwen3-32b", "--at", "tp=4,block=64", "-o", dst).code == 0
    model = ("--model", "qwen3-32b", "--json")
    answers = [
        cli("plan", src, dst, "--json").answer,
        cli("plan", src, "--dst", "tp=4,block=64", *model).answer,
        cli("plan", dst, "--src", "tp=2", *model).answer,
        cli("plan", "--src", "tp=2", "--dst", "tp=4,block=64", *model).answer,
    ]
    assert {answer["verdict"] for answer in answers} == {"proved"}
    assert len({json.dumps(answer["flows"]) for answer in answers}) == 1


def test_a_config_of_ones_own(cli, tmp_path):
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ends = ("--src", "tp=2", "--dst", "tp=4")
    answer = cli("plan", "--config", tmp_path / "config.json", *ends, "--json").answer
    assert answer["total_bytes"] == 2 * 2 * 4 * 8 * 2 * 4096
    assert answer["src"]["model"] == tmp_path.name


def test_long_requests_get_a_pool_that_holds_them(cli):
    assert cli(*LLAMA, "--src", "tp=1", "--dst", "tp=1", "--tokens", 200_000, "--json").code == 0


def test_small_pools_of_files_get_a_small_request(cli, tmp_path):
    path = tmp_path / "engine.json"
    cli("describe", "--model", "gemma-2b", "--at", "block=16,blocks=5", "-o", path)
    assert cli("plan", path, path, "--json").answer["request"]["tokens"] == 64


# ------------------------------------------------------------------------------------ refusals


def test_a_refusal_names_code_state_field_and_both_values(cli):
    ends = ("--src", "tp=2", "--dst", "tp=4,dtype=fp8")
    ran = cli(*LLAMA, *ends, "--json")
    assert ran.code == 1
    assert ran.answer["verdict"] == "refused"
    assert ran.answer["findings"][0] == {
        "code": "state-differs",
        "state": "layers.0.attn/k",
        "field": "dtype",
        "src": "bf16",
        "dst": "fp8_e4m3",
        "note": "",
        "remedy": "Give both engines the same cache dtype (vLLM: --kv-cache-dtype).",
        "dst_ranks": [0, 1, 2, 3],
    }
    for_people = cli(*LLAMA, *ends)
    assert (for_people.code, for_people.err) == (1, "")
    words = ("REFUSED", "state-differs", "layers.{0-31}.attn/k", "dtype", "bf16", "fp8_e4m3")
    assert [word for word in words if word not in for_people.out] == []
    assert max(map(len, for_people.out.splitlines())) <= 80


def test_missing_layers_are_refused(cli):
    models = ("--src-model", "llama-3.1-8b", "--dst-model", "llama-3.1-70b")
    ran = cli("plan", *models, "--src", "tp=2", "--dst", "tp=4", "--json")
    assert ran.code == 1
    assert {finding["code"] for finding in ran.answer["findings"]} == {"missing-state"}
    assert len(ran.answer["findings"]) == 2 * 48


def test_a_budget_is_kept(cli):
    ends = ("--src", "layout=HND", "--dst", "layout=NHD", "--max-runs-per-block", 100)
    ran = cli(*LLAMA, *ends)
    assert ran.code == 1
    assert "too-many-runs" in ran.out
    assert "the budget is 100" in ran.out


def test_only_the_ranks_that_are_refused_are_named(cli, tmp_path):
    """A source that lacks a rank can serve some destination ranks and not the others."""
    src = describe(model_named("gemma-2b"), Topology.parse("pp=2,blocks=9"), "src")
    half = tmp_path / "half.json"
    half.write_bytes(manifest_to_json(replace(src, ranks=src.ranks[:1])))
    ends = (half, "--model", "gemma-2b", "--dst", "pp=3")
    ran = cli("plan", *ends, "--json")
    assert ran.code == 1
    assert {finding["code"] for finding in ran.answer["findings"]} == {"not-held"}
    assert {tuple(finding["dst_ranks"]) for finding in ran.answer["findings"]} == {(1,), (2,)}
    assert cli("plan", *ends, "--dst-rank", 0).code == 0
    assert "dst ranks" in cli("plan", *ends).out


def identified(tmp_path, name, known, unknown=None, **more):
    """A manifest file of an engine that says which model it runs."""
    identity = kvferry.Identity.of(known, unknown, **more)
    path = tmp_path / f"{name}.json"
    path.write_bytes(manifest_to_json(replace(describe(model_named("gpt2"), Topology()), identity=identity)))
    return path


def test_plan_says_whether_two_models_are_the_same(cli, tmp_path):
    """RB-9: the same, other, or nobody can tell; and with `required` that is a refusal."""
    known = {"architecture": "gpt2", "weights.content": "1f"}
    one = identified(tmp_path, "one", known)
    other = identified(tmp_path, "other", {**known, "weights.content": "2e"})
    dummy = identified(tmp_path, "dummy", {"architecture": "gpt2"}, {"weights": "dummy"})
    strict = identified(tmp_path, "strict", known, is_required=True)

    same = cli("plan", one, one)
    assert (same.code, "the same model (2 parts of the identity equal)" in same.out) == (0, True)
    differs = cli("plan", one, other)
    assert (differs.code, "the models differ in weights.content" in differs.out) == (1, True)
    (found,) = cli("plan", one, other, "--json").answer["findings"]
    assert (found["code"], found["src"], found["dst"]) == ("identity-differs", "1f", "2e")
    nobody = cli("plan", dummy, one, "--json")
    assert (nobody.code, nobody.answer["identity"]["num_equal"]) == (0, 1)
    assert [each["field"] for each in nobody.answer["identity"]["unknown"]] == ["weights"]
    for pair in ((dummy, strict), (strict, dummy)):
        (found,) = cli("plan", *pair, "--json").answer["findings"]
        assert (found["code"], found["field"]) == ("identity-unknown", "weights")


def test_a_running_engine_is_planned_with_one_that_is_only_described(cli, tmp_path):
    """A description cannot say which weights it has: that is for the meeting."""
    known = {"architecture": "gpt2", "weights.content": "1f"}
    running = identified(tmp_path, "running", known, is_required=True)
    assert cli("plan", running, "--model", "gpt2", "--dst", "tp=2").code == 0
    described = tmp_path / "described.json"
    described.write_bytes(manifest_to_json(describe(model_named("gpt2"), Topology())))
    assert cli("diff", running, described).code == 0


def test_models_of_the_catalogue_know_their_architecture(cli):
    """RB-9: equal shapes, other architectures."""
    two = ("--src-model", "llama-3.1-8b", "--dst-model", "mixtral-8x7b", "--src", "tp=2", "--dst", "tp=2")
    (found,) = cli("plan", *two, "--json").answer["findings"]
    assert (found["code"], found["src"], found["dst"]) == ("identity-differs", "llama", "mixtral")
