"""``kvferry diff``: what differs, and what that does to a transfer."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import kvferry
from kvferry.models import Topology, describe, model_named
from kvferry.wire import manifest_to_json

MODEL = ("--model", "llama-3.1-8b")


def differences(answer, effect=None):
    return {
        each["what"]: (each["a"], each["b"])
        for each in answer["differences"]
        if effect is None or each["effect"] == effect
    }


def test_the_same_engine_twice(cli, tmp_path):
    file = tmp_path / "a.json"
    cli("describe", *MODEL, "--at", "tp=2,block=128", "-o", file)
    ran = cli("diff", file, file, "--json")
    assert (ran.code, ran.answer["verdict"], ran.answer["differences"]) == (0, "same", [])
    assert cli("diff", file, file).out.startswith("SAME  nothing differs\n")


def test_ranks_and_pools_are_none_of_a_transfers_business(cli):
    ran = cli("diff", *MODEL, "tp=2,blocks=5000", "tp=4", "--json")
    assert (ran.code, ran.answer["verdict"]) == (0, "harmless")
    assert differences(ran.answer) == {
        "held by": (
            "2 ranks, 2 parts: head [0, 4), head [4, 8)",
            "4 ranks, 4 parts: head [0, 2), head [2, 4), …",
        ),
        "ranks": ("2", "4"),
        "blocks in the pool": ("5000", "4096"),
    }


def test_both_sides_are_measured_by_their_own_items(cli):
    sides = "tp=1", "tp=2,layout=NHD,dtype=fp8_e4m3"
    there, back = (differences(cli("diff", *MODEL, *each, "--json").answer) for each in (sides, sides[::-1]))
    assert there["order in memory"] == back["order in memory"][::-1]


def test_another_layout_is_slower_by_its_plan(cli):
    ran = cli("diff", *MODEL, "tp=2", "tp=2,layout=NHD,block=32", "--json")
    assert (ran.code, ran.answer["verdict"]) == (1, "slower")
    assert differences(ran.answer, "slower") == {
        "tokens per block": ("16", "32"),
        "order in memory": ("block, head, token+, channel", "block, token, head+, channel"),
    }
    for each in ran.answer["directions"]:
        assert (each["is_refused"], each["link"], each["tokens"]) == (False, "400Gb", 4096)
        assert each["seconds"] > 3 * each["long_run_seconds"]


@pytest.mark.parametrize(
    ("sides", "held_by"),
    [
        (
            ("tp=1,cp=2,block=16", "tp=2,block=32"),
            (
                "2 ranks, 2 parts: token [0, 1) of 2, token [1, 2) of 2",
                "2 ranks, 2 parts: head [0, 4), head [4, 8)",
            ),
        ),
        (
            ("tp=2,layout=NHD", "tp=4,layout=NHD"),
            ("2 ranks, 2 parts: head [0, 4), head [4, 8)", "4 ranks, 4 parts: head [0, 2), head [2, 4), …"),
        ),
    ],
)
def test_another_split_is_slower_by_its_plan(cli, sides, held_by):
    ran = cli("diff", *MODEL, *sides, "--json")
    assert (ran.code, ran.answer["verdict"]) == (1, "slower")
    assert differences(ran.answer, "slower") == {"held by": held_by}


def test_equal_engines_that_are_slow_are_the_same(cli):
    ran = cli("diff", *MODEL, "tp=4", "tp=4")
    assert (ran.code, ran.out.partition("\n")[0]) == (
        0,
        "SAME  nothing differs, but transfers are slow; see `kvferry plan`",
    )


def test_another_layout_that_costs_nothing_is_harmless(cli):
    """One head of each rank: whether it stands outside or inside the tokens is the same bytes."""
    ran = cli("diff", *MODEL, "tp=8", "tp=8,layout=NHD", "--json")
    assert (ran.code, ran.answer["verdict"], ran.answer["differences"]) == (0, "same", [])


def test_another_dtype_is_refused_and_said_once(cli):
    ran = cli("diff", *MODEL, "tp=2", "tp=2,dtype=fp8", "--json")
    assert (ran.code, ran.answer["verdict"]) == (1, "refused")
    assert differences(ran.answer, "refused") == {"dtype": ("bf16", "fp8_e4m3")}
    (found,) = (each for each in ran.answer["differences"] if each["what"] == "dtype")
    assert len(found["states"]) == 64
    assert [each["is_refused"] for each in ran.answer["directions"]] == [True, True]
    for_people = cli("diff", *MODEL, "tp=2", "tp=2,dtype=fp8").out
    assert "in  layers.{0-31}.attn/k, layers.{0-31}.attn/v" in for_people


def test_layers_that_one_side_lacks(cli):
    ends = ("vllm serve meta-llama/Llama-3.1-8B", "vllm serve meta-llama/Llama-3.1-70B")
    ran = cli("diff", *ends, "--json")
    assert ran.code == 1
    assert differences(ran.answer, "refused")["states"] == ("not there", "there")
    assert [each["is_refused"] for each in ran.answer["directions"]] == [True, False]


def test_another_model_is_refused_by_the_part_that_differs(cli, tmp_path):
    files = []
    for name, weights in (("a", "1f"), ("b", "2e")):
        identity = kvferry.Identity.of({"architecture": "gpt2", "weights.content": weights})
        manifest = replace(describe(model_named("gpt2"), Topology(), name), identity=identity)
        files.append(tmp_path / f"{name}.json")
        files[-1].write_bytes(manifest_to_json(manifest))
    ran = cli("diff", *files, "--json")
    assert differences(ran.answer) == {"model: weights.content": ("1f", "2e")}
    assert ran.code == 1


def test_manifests_of_single_ranks_are_compared_and_not_tried(cli, tmp_path):
    """As engines dump them: what no rank of the file holds is not refused, it is not there."""
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, at in zip(files, ("tp=4", "tp=2,layout=NHD"), strict=True):
        assert cli("describe", *MODEL, "--at", at, "--rank", 1, "-o", file).code == 0
    ran = cli("diff", *files, "--json")
    assert (ran.code, ran.answer["verdict"]) == (1, "not tried")
    assert differences(ran.answer, "not tried").keys() == {"order in memory", "held by"}
    assert {(each["is_refused"], each["lacks_ranks"]) for each in ran.answer["directions"]} == {(False, True)}
    assert "not tried: not-held: layers.0.attn/k: head [2, 4)" in cli("diff", *files).out


PACKED = Path(__file__).parents[2] / "examples" / "manifests" / "packed.json"


@pytest.mark.parametrize(
    ("change", "effect", "said"),
    [
        (lambda ranks: ranks.pop(), "not tried", ["not-held", "no source rank holds it"]),
        (lambda ranks: ranks[1]["views"].pop(), "not tried", ["not-held", "layers.0/v: head [2, 4)"]),
        (
            lambda ranks: ranks[0]["views"][0].update(offset=5000),
            "refused",
            ["out-of-bounds", "the view ends at byte 6520 of 1536"],
        ),
    ],
    ids=["no rank", "no view", "out of bounds"],
)
def test_a_direction_that_cannot_be_planned_says_why(cli, tmp_path, change, effect, said):
    document = json.loads(PACKED.read_text())
    change(document["ranks"])
    (tmp_path / "b.json").write_text(json.dumps(document))
    ran = cli("diff", PACKED, tmp_path / "b.json", "--json")
    assert (ran.code, ran.answer["verdict"]) == (1, effect)
    assert ran.answer["directions"][1]["findings"][0]["code"] == said[0]
    told = " ".join(cli("diff", PACKED, tmp_path / "b.json").out.split())
    assert f"b -> a {effect}: {said[0]}: " in told
    assert said[1] in told


def test_sinks_aliases_and_pools_differ(cli, tmp_path):
    files = []
    for name, sinks in (("a", 0), ("b", 4)):
        document = json.loads(PACKED.read_text())
        document["groups"][0].update(window=8, sinks=sinks, pool=f"pool-{name}")
        document["states"][0]["aliases"] = [f"{name}/k"]
        files.append(tmp_path / f"{name}.json")
        files[-1].write_text(json.dumps(document))
    ran = cli("diff", *files, "--json")
    assert ran.code == 0
    assert differences(ran.answer) == {
        "window": ("8 tokens", "8 tokens and the first 4"),
        "aliases": ("a/k", "b/k"),
        "groups": ("full in pool pool-a", "full in pool pool-b"),
    }
    assert [each["tokens"] for each in ran.answer["directions"]] == [8, 16]
    assert cli("plan", *files, "--json").answer["request"]["tokens"] == 8  # more of it is not there
    assert [cli("plan", *files, "--tokens", 16, "--kept", kept).code for kept in (3, 4)] == [2, 0]


def test_a_request_that_does_not_fit_is_no_error_of_the_diff(cli, tmp_path):
    document = json.loads(PACKED.read_text())
    document["groups"][0]["addressing"] = "ring"
    (tmp_path / "b.json").write_text(json.dumps(document))
    ran = cli("diff", PACKED, tmp_path / "b.json", "--json")
    assert (ran.code, ran.answer["verdict"]) == (1, "not tried")
    assert ran.answer["directions"][0]["problem"] == (
        "a request of 16 tokens: dst-ring-short: group full: [0, 16) exceeds its 4 cells"
    )
    assert "a -> b cannot be planned: a request of" in " ".join(
        cli("diff", PACKED, tmp_path / "b.json").out.split()
    )


@pytest.mark.parametrize("ends", [("a.json",), ("none.json", "tp=2"), ("tp=2", "tp=2")])
def test_bad_input_is_said_in_one_line(cli, ends, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ran = cli("diff", *ends)
    assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)


def test_it_is_legible_on_60_columns(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    ran = cli("diff", *MODEL, "tp=2", "tp=4,layout=NHD")
    assert ran.code == 1
    assert max(map(len, ran.out.splitlines())) <= 60
