"""``kvferry plan`` says that a pair is slow, how slow, and what cures it, having tried it."""

import json
import re
import shlex

import pytest

from kvferry.cli.bill import SLOW
from kvferry.cli.output import BY_CODE, BY_FIELD
from kvferry.core.manifest import MEANING
from kvferry.errors import Code

README_PAIR = ("--model", "qwen3-32b", "--src", "tp=8,block=16", "--dst", "tp=4,block=64,layout=NHD")


def seconds_of(answer, link):
    (found,) = (each for each in answer["links"] if each["link"] == link)
    return found["seconds"]


def test_the_pair_of_the_readme_is_slow_and_its_cure_is_ten_times_as_fast(cli):
    answer = cli("plan", *README_PAIR, "--json").answer
    (warned,) = answer["warnings"]
    assert (warned["code"], warned["link"]) == ("short-runs", "400Gb")
    assert warned["seconds"] == pytest.approx(seconds_of(answer, "400Gb"), rel=1e-3)
    assert warned["seconds"] > 100 * warned["long_run_seconds"]
    assert "layout=HND (vLLM: VLLM_KV_CACHE_LAYOUT=HND)" in warned["remedy"]
    cured = cli(*shlex.split(warned["command"])[1:], "--json").answer
    assert seconds_of(cured, "400Gb") == pytest.approx(warned["cured_seconds"], rel=1e-3)
    assert warned["seconds"] >= 10 * warned["cured_seconds"]


def test_people_read_it_on_60_columns(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    ran = cli("plan", *README_PAIR)
    assert ran.code == 0
    assert "SLOW  793 ms over 400Gb, an estimate: its runs are short\n" in ran.out
    assert "the same bytes in" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 60
    # The command can be copied: a shell joins its lines.
    (shown,) = re.findall(r"^  try +(.*?[^\\]\n)", ran.out, re.MULTILINE | re.DOTALL)
    words = shlex.split(shown.replace("\\\n", ""))
    assert words == ["kvferry", "plan", *README_PAIR[:-1], "tp=4,block=64,layout=HND"]


CURES = {
    "the other layout": ("llama-3.1-8b", "tp=2", "tp=4,layout=NHD,block=64", ["dst layout=HND"]),
    "equal blocks": ("llama-3.1-70b", "tp=2", "tp=4,block=64", ["src block=64"]),
    "head-major on both sides": (
        "llama-3.1-8b",
        "tp=2,layout=NHD",
        "tp=4,layout=NHD-halves",
        ["src layout=HND", "dst layout=HND"],
    ),
    "the order of a convolution": ("mamba2-2.7b", "tp=2", "tp=4,conv=DS", ["src conv=DS"]),
}


@pytest.mark.parametrize("name", CURES)
def test_the_cure_is_what_was_planned(cli, name):
    model, src, dst, settings = CURES[name]
    answer = cli("plan", "--model", model, "--src", src, "--dst", dst, "--link", "400Gb", "--json").answer
    (warned,) = answer["warnings"]
    cured = cli(*shlex.split(warned["command"])[1:], "--json").answer
    assert cured["links"][0]["seconds"] < warned["seconds"] / 2
    words = shlex.split(warned["command"])
    for setting in settings:
        side, _, text = setting.partition(" ")
        assert text in words[words.index(f"--{side}") + 1].split(",")
    assert len(re.findall(r"\w+=\w+ \(vLLM", warned["remedy"])) == len({each.split()[1] for each in settings})


def dear_runs(path):
    """A link on which a run costs what 85 KiB do."""
    times = [
        {"medium": "host", "rival": "direct", "way": "direct", "num_runs": n, "total_bytes": n * size}
        | {"median_s": 4e-4 + 85e-6 * n + n * size / 1e9}
        for n in (1, 10, 100, 1000)
        for size in (512, 1 << 20)
    ]
    path.write_text(json.dumps({"machine": {"processor": "abacus", "num_cores": 2}, "times": times}))
    return path


def test_a_pair_that_nothing_makes_faster_says_so(cli, tmp_path):
    """Equal layouts and large blocks: a head of a block is what both sides have in a row."""
    link = dear_runs(tmp_path / "dear.json")
    slow = ("--model", "gpt2", "--src", "tp=12,block=128", "--dst", "tp=4,block=128", "--link", link)
    (warned,) = cli("plan", *slow, "--json", "--placement", "scattered").answer["warnings"]
    assert warned["command"] == ""
    assert warned["remedy"].startswith("none: ")
    assert warned["cured_seconds"] == 0


@pytest.mark.parametrize("dst", ["tp=2", "tp=8"])
def test_long_runs_are_no_reason_to_warn(cli, dst):
    answer = cli("plan", "--model", "deepseek-v3", "--src", "tp=4", "--dst", dst, *FRESH, "--json").answer
    assert answer["warnings"] == []
    assert all(link["seconds"] < SLOW * link["long_run_seconds"] for link in answer["links"])


def test_of_two_manifests_an_equal_pair_is_billed(cli, tmp_path):
    files = [tmp_path / "src.json", tmp_path / "dst.json"]
    for file, at in zip(files, ("tp=2", "tp=2,layout=NHD,block=32"), strict=True):
        assert cli("describe", "--model", "llama-3.1-8b", "--at", at, "-o", file).code == 0
    (warned,) = cli("plan", *files, "--json").answer["warnings"]
    assert "two engines with the topology of the " in warned["remedy"]
    assert "`kvferry diff`" in warned["remedy"]
    named = cli("plan", "--src", files[0], "--dst", files[1], "--json").answer
    assert named["warnings"] == [warned]


# -------------------------------------------------------------------------------------- assumptions


def words(ran):
    return " ".join(ran.out.split())


@pytest.mark.parametrize(
    ("model", "src", "dst", "said"),
    [
        ("gpt2", "tp=1", "tp=2", "HND is assumed for src and dst,"),
        ("gpt2", "tp=1,layout=NHD", "tp=2", "HND is assumed for dst,"),
        ("gpt2", "tp=1,layout=NHD", "tp=2,layout=NHD", ""),
        ("mamba2-2.7b", "tp=1", "tp=2", ""),
    ],
)
def test_a_layout_that_nobody_named_is_said_to_be_assumed(cli, model, src, dst, said):
    page = words(cli("plan", "--model", model, "--src", src, "--dst", dst))
    assert ("is assumed for" in page) == bool(said)
    assert said in page


def test_files_assume_nothing(cli, tmp_path):
    file = tmp_path / "it.json"
    assert cli("describe", "--model", "gpt2", "--at", "tp=2", "-o", file).code == 0
    assert "assumed for" not in cli("plan", file, file).out


def test_the_link_that_is_assumed_is_said_before_any_time(cli):
    assumed = "400Gb is assumed (not measured with kvferry); set --link to yours. All times are estimates"
    page = words(cli("plan", *README_PAIR))
    assert page.index(assumed) < page.index("SLOW")
    assert assumed not in words(cli("plan", *README_PAIR, "--link", "400Gb"))


FRESH = ("--placement", "consecutive")


def test_blocks_are_scattered_unless_consecutive_ones_are_asked_for(cli):
    """An hour after its start, no engine has consecutive blocks: they make a pair look fast."""
    ends = ("--model", "gpt2", "--src", "tp=1", "--dst", "tp=2")
    assert "4096 tokens, scattered blocks" in cli("plan", *ends).out
    assert "best case" in words(cli("plan", *ends, *FRESH))


# ------------------------------------------------------------------------------------------ engines


def test_what_an_engine_would_refuse_is_marked(cli):
    ran = cli("plan", "--model", "llama-3.1-70b", "--src", "tp=4", "--dst", "tp=7")
    assert ran.code == 0
    assert "NOTE  vLLM would not start with this --dst\n" in ran.out
    assert "64 attention heads are not divisible by tp=7" in ran.out
    assert "with this --src" not in ran.out


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16, 64])
def test_what_engines_serve_is_not_marked(cli, tp):
    ends = ("--model", "llama-3.1-70b", "--src", f"tp={tp}", "--dst", f"tp={tp}", "--dst-rank", 0)
    codes = [warned["code"] for warned in cli("plan", *ends, "--json").answer["warnings"]]
    assert "not-served" not in codes


# ---------------------------------------------------------------------------------------- refusals


def test_a_refusal_is_said_once_with_its_remedy_and_the_way_out(cli):
    ran = cli("plan", "--model", "llama-3.1-70b", "--src", "tp=2", "--dst", "tp=4,dtype=fp8")
    assert (ran.code, ran.out.count("state-differs"), "item_bytes" in ran.out) == (1, 1, False)
    assert "remedy       Give both engines the same cache dtype" in ran.out
    (command,) = re.findall(r"^  try +(.*)\n", ran.out, re.MULTILINE)
    assert command == "kvferry plan --model llama-3.1-70b --src tp=2 --dst tp=4,dtype=bf16"
    assert cli(*shlex.split(command)[1:]).code == 0


def test_opaque_blocks_of_two_sizes_find_their_way(cli):
    ends = ("--src", "layout=opaque,block=16", "--dst", "layout=opaque,block=64")
    ran = cli("plan", "--model", "gpt2", *ends, "--json")
    assert ran.code == 1
    assert cli(*shlex.split(ran.answer["command"])[1:], "--json").answer["verdict"] == "proved"


OPAQUE = ("--model", "gpt2", "--src", "tp=2,layout=opaque,block=32", "--dst")


@pytest.mark.parametrize(
    ("dst", "first"),
    [
        ("tp=4,layout=opaque,block=32", "Give both sides the same TP, block size"),
        ("tp=2,layout=opaque,block=64", "Use the same block size on both engines"),
    ],
)
def test_whoever_serves_the_same_model_in_opaque_blocks_is_not_told_to(cli, dst, first):
    """The first remedy is the right one, and no finding asks for the same model: it is the same."""
    found = cli("plan", *OPAQUE, dst, "--json").answer["findings"]
    assert found[0]["remedy"].startswith(first)
    assert [each["field"] for each in found if "same model" in each["remedy"]] == []


def test_every_code_has_a_remedy():
    assert BY_CODE.keys() == set(Code)
    assert BY_FIELD.keys() <= {*MEANING, "axis shard"}
