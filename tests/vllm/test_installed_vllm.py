"""What ``kvferry plan`` knows of vLLM without it is what the installed vLLM says."""

import json
from importlib.resources import files

import pytest

from kvferry.cli import serve_command
from kvferry.cli.serve_command import ServeCommand, given_flags
from kvferry.errors import SpecError
from kvferry.integrations.known_vllm import filled_config, installed_flags

pytest.importorskip("vllm", reason="vLLM is not installed")

LISTED = json.loads(files("kvferry.cli").joinpath("serve_flags.json").read_text())


def spellings(table):
    return {(arity, word) for arity, flags in table.items() for flag in flags for word in flag.split()}


def test_every_flag_of_vllm_is_listed():
    """If not: python tools/serve_flags.py"""
    assert spellings(installed_flags()) - spellings(LISTED) == set()


def test_flags_that_are_not_listed_are_looked_up_in_vllm(monkeypatch):
    known = {"1": [flag for flag in LISTED["1"] if flag != "--port"]}
    monkeypatch.setattr(serve_command, "_parser", lambda: serve_command._FlagParser(known))
    assert given_flags(["m", "--port", "80"])["port"] == "80"
    with pytest.raises(SpecError, match="unknown vLLM flag --prot"):
        ServeCommand.read("vllm serve m --prot 80")


def test_defaults_of_transformers_are_filled_in(tmp_path):
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    filled = filled_config(tmp_path)
    assert (filled["head_dim"], filled["hidden_act"]) == (16, "silu")
