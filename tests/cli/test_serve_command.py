"""An engine by the command that starts it."""

import json

import pytest

from kvferry.cli.serve_command import ServeCommand
from kvferry.errors import SpecError

SRC = "vllm serve Qwen/Qwen3-32B --tensor-parallel-size 8 --block-size 16 --port 8100 --enforce-eager"
DST = "FOO=1 VLLM_KV_CACHE_LAYOUT=NHD vllm serve --model Qwen/Qwen3-32B -tp=4 --block_size=64"


def test_a_command_says_as_much_as_a_topology(cli):
    by_command = cli("plan", "--src", SRC, "--dst", DST, "--json").answer
    ends = ("--src", "tp=8,block=16", "--dst", "layout=NHD,tp=4,block=64")
    by_topology = cli("plan", "--model", "qwen3-32b", *ends, "--json").answer
    assert by_command["flows"] == by_topology["flows"]
    assert by_command["src"] == by_topology["src"]


def test_the_cure_is_a_command_too(cli):
    (warned,) = cli("plan", "--src", SRC, "--dst", DST, "--json").answer["warnings"]
    assert "FOO=1 VLLM_KV_CACHE_LAYOUT=HND vllm serve --model Qwen/Qwen3-32B" in warned["command"]


@pytest.mark.parametrize(
    ("text", "topology"),
    [
        ("vllm serve m", ""),
        ("vllm serve m -tp 2 -pp 2 --kv-cache-dtype fp8", "tp=2,pp=2,dtype=fp8"),
        ("vllm serve m --kv-cache-dtype auto --dtype auto -dcp 1", ""),
        ("VLLM_SSM_CONV_STATE_LAYOUT=DS vllm serve m --block-size 16 --block-size 32", "conv=DS,block=32"),
        ('vllm serve m --kv-transfer-config \'{"kv_role": "kv_both"}\' -tp 2', "tp=2"),
    ],
)
def test_what_is_read(text, topology):
    assert ServeCommand.is_one(text)
    assert ServeCommand.read(text) == ServeCommand("m", topology)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("vllm serve -tp 2", "name the model right behind `vllm serve`"),
        ("vllm serve m 'x", "not a command line"),
        ("vllm serve m --speculative-config '{}'", "--speculative-config changes the cache"),
        ("vllm serve m -dcp 2", "dump the engine's manifest"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(text, said):
    with pytest.raises(SpecError, match=said):
        ServeCommand.read(text)


def test_a_folder_is_a_model(cli, tmp_path):
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    serve = f"vllm serve {tmp_path}"
    answer = cli("plan", "--src", serve, "--dst", f"{serve} -tp 2", "--json").answer
    assert (answer["verdict"], answer["src"]["model"]) == ("proved", tmp_path.name)


def test_a_model_that_nobody_knows_is_asked_for(cli):
    serve = "vllm serve meta-llama/Llama-3.1-8B-Instruct"
    ran = cli("plan", "--src", serve, "--dst", serve)
    assert ran.code == 2
    assert "--model llama-3.1-8b, if its cache is the same" in ran.err
    assert cli("plan", "--model", "llama-3.1-8b", "--src", serve, "--dst", serve).code == 0


def test_a_wrong_flag_is_said_with_its_side(cli):
    ran = cli("plan", "--src", "vllm serve gpt2 -tp x", "--dst", "vllm serve gpt2")
    assert (ran.code, "--src vllm serve gpt2 -tp x: tp must be a whole number" in ran.err) == (2, True)
