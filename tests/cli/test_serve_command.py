"""An engine by the command that starts it."""

import json

import pytest

from kvferry.cli.engines import served_model, src_and_dst
from kvferry.cli.serve_command import ServeCommand, with_setting
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
        ("VLLM_SSM_CONV_STATE_LAYOUT=DS vllm serve m --block-size 16 --block-size 32", "block=32,conv=DS"),
        ('vllm serve m --speculative-config \'{"method": "ngram", "num_speculative_tokens": 3}\'', ""),
        ('vllm serve m --speculative-config \'{"model": "[ngram]"}\' -tp 2', "tp=2"),
        ("A=1 python3 -m vllm.entrypoints.openai.api_server --model m -tp 2", "tp=2"),
        ("VLLM_KV_CACHE_LAYOUT=NHD python -m vllm.entrypoints.cli.main serve m -tp 2", "tp=2,layout=NHD"),
        ("/opt/venv/bin/python3.12 -m vllm.entrypoints.cli.main serve m", ""),
        ("/opt/venv/bin/vllm serve m -pp 2", "pp=2"),
        ('vllm serve m --kv-transfer-config \'{"kv_role": "kv_both"}\' -tp 2', "tp=2"),
        ("vllm serve m --tensor-parallel 8 --block-si 64", "tp=8,block=64"),  # vLLM takes abbreviations
        ("VLLM_PP_LAYER_PARTITION=12,20 vllm serve m -pp 2", "pp=12+20"),
        ("vllm serve m --attention-backend FLASH_ATTN", ""),
        ("vllm serve m --attention-backend=flashmla", "block=64"),
        ("vllm serve m --attention-backend CUTLASS_MLA --block-size 256", "block=256"),
        ("vllm serve m --disable-hybrid-kv-cache-manager --no-disable-hybrid-kv-cache-manager", ""),
        ("vllm serve m --model n -tp 2", "tp=2"),  # vLLM prefers the name behind `serve`, too
        ("vllm serve m \\\n  -tp 2 \\\n  --block-size=32", "tp=2,block=32"),
        ("VLLM_MLA_DISABLE=0 vllm serve m", ""),
        ("docker run --gpus all -p 80:80 vllm/vllm-openai:latest --model m -tp 2", "tp=2"),
        ("docker run --env=VLLM_KV_CACHE_LAYOUT=NHD vllm/vllm-openai vllm serve m", "layout=NHD"),
        ("export VLLM_KV_CACHE_LAYOUT=NHD; vllm serve m", "layout=NHD"),
        ("vllm serve m -tp 2 --kv-transfer-config {} --model a.json", "tp=2"),
    ],
)
def test_what_is_read(text, topology):
    read = src_and_dst((), (text, text), "", None)[0].command
    assert read
    assert (read.model, read.topology, read.ignored) == ("m", topology, ())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("vllm serve -tp 2", "pass the model right after `vllm serve`"),
        ("vllm serve m 'x", "not a command line"),
        ("vllm serve m --speculative-config '{}'", "--speculative-config may change the cache"),
        ('vllm serve m --speculative-config \'{"method": "eagle3"}\'', "as MODEL[+]DRAFT"),
        ("vllm serve m --speculative-config.method eagle3", "--speculative-config may change"),
        ("vllm serve m --hf-overrides '{}'", "--hf-overrides may change the cache, and is not supported"),
        ("vllm serve m --dtype fp4", "--dtype fp4: vLLM accepts auto, half"),
        ("vllm serve m -dcp 2", "dump the engine's manifest"),
        (
            "vllm serve m --tensor-paralel 8",
            "unknown vLLM flag --tensor-paralel; did you mean --tensor-para",
        ),
        ("vllm serve m --foo=3", "unknown vLLM flag --foo=3"),
        ("vllm serve m n", "unknown vLLM flag n"),
        ("vllm serve m --enable", "ambiguous option: --enable"),
        ("vllm serve m --attention-backend ROCM_ATTN", "--attention-backend ROCM_ATTN: its cache layout is"),
        ("vllm serve m -ac.backend FLASHMLA", "--attention-config may change the cache"),
        ("vllm serve m --spec-method mtp", "--spec-method may change the cache"),
        ("VLLM_MLA_DISABLE=1 vllm serve m", "VLLM_MLA_DISABLE=1 may change the cache"),
        ("VLLM_ATTENTION_BACKEND=FLASHMLA vllm serve m", "write it as --attention-backend"),
        ("VLLM_PP_LAYER_PARTITION=12,20 vllm serve m -pp 3", "does not match --pipeline-parallel-size 3"),
        ("VLLM_PP_LAYER_PARTITION=12,20 vllm serve m", "does not match --pipeline-parallel-size 1"),
        ("vllm serve m --kv-cache-dtype nvfp4", "--kv-cache-dtype nvfp4: its cache layout is unknown: dump"),
        ("vllm serve m --kv-cache-dtype bf16", "--kv-cache-dtype bf16: its cache layout is unknown"),
        ("vllm serve m --max-model-len x", "--max-model-len x: not a number of tokens"),
        ("vllm serve m --kv-transfer-config x", "--kv-transfer-config is not the JSON that vLLM expects"),
        ("bash -c 'vllm serve m -tp 2'", "not a command that starts vLLM"),
        ("docker run -e VLLM_KV_CACHE_LAYOUT x vllm serve m", "write VLLM_KV_CACHE_LAYOUT=VALUE"),
        (
            "vllm serve m --kv-transfer-config.kv_connector KVFerryConnector"
            " --kv-transfer-config.kv_connector_extra_config.leese_seconds 9",
            "unknown leese_seconds .did you mean lease_seconds",
        ),
    ],
)
def test_what_is_not_understood_is_refused_by_name(text, said):
    with pytest.raises(SpecError, match=said):
        assert src_and_dst((), (text, text), "", None)[0].command


NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
MULTI = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [NIXL]}}


@pytest.mark.parametrize("config", [NIXL, MULTI], ids=lambda config: config["kv_connector"])
def test_another_connector_is_noted_and_planned_as_ours(config):
    read = ServeCommand.read(f"vllm serve m -tp 2 --kv-transfer-config '{json.dumps(config)}'")
    (note,) = read.ignored
    assert note == f"--kv-transfer-config ({config['kv_connector']}; planned as KVFerryConnector)"
    assert (read.topology, read.connector.get("kv_role")) == ("tp=2", config.get("kv_role"))


@pytest.mark.parametrize(
    ("serve", "said"),
    [
        ("deepseek-v3 --attention-backend FLASH_ATTN", "deepseek-v3 has MLA: vLLM does not start"),
        (
            "qwen3-32b --attention-backend flashmla",
            "qwen3-32b has attention over K and V: vLLM",
        ),
        ("deepseek-v3.2 --attention-backend FLASHMLA", "deepseek-v3.2 has sparse MLA: vLLM does not start"),
        ("deepseek-v3.2 --kv-cache-dtype fp8", "an fp8 row of sparse MLA has 576 or 656 bytes"),
        ("qwen3-32b --block-size auto", "block must be a whole number, got 'auto'"),
        ("qwen3-32b --block-size 0", "block must be at least 1, got 0"),
        ("qwen3-32b --block-size 8", "--block-size 8: vLLM needs a multiple of 16"),
        ("deepseek-v3 --block-size 32 --attention-backend FLASHMLA", "vLLM needs a multiple of 64"),
        ("deepseek-v3.2 --block-size 32", "--block-size 32: vLLM needs a multiple of 64"),
    ],
)
def test_what_an_engine_cannot_be_is_rejected(cli, serve, said):
    ran = cli("plan", "--src", f"vllm serve {serve}", "--dst", f"vllm serve {serve.split()[0]}")
    assert (ran.code, said in ran.err, ran.err.count("--src")) == (2, True, 1)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("half", "fp16"),
        ("float16", "fp16"),
        ("bfloat16", "bf16"),
        ("float", "fp32"),
        ("float32", "fp32"),
        ("auto", "bf16"),
    ],
)
def test_the_cache_has_the_dtype_of_the_model(cli, name, dtype):
    """Its attention and its recurrent states."""
    serve = f"vllm serve openai-community/gpt2 --dtype {name}"
    ran = cli("plan", "--src", serve, "--dst", "vllm serve openai-community/gpt2 --dtype=bfloat16", "--json")
    assert ran.code == (dtype != "bf16")
    if ran.code:
        found = ran.answer["findings"]
        assert {each["src"] for each in found if each["field"] in ("dtype", "--dtype")} == {dtype}
        assert ran.answer["command"] == ""  # another cache dtype would not make it the same model


def test_a_cache_that_is_told_its_dtype_has_it(cli, folder):
    serve = folder("a")
    ends = (f"{serve} --dtype half --kv-cache-dtype fp8", f"{serve} --kv-cache-dtype fp8 --dtype float16")
    assert cli("plan", "--src", ends[0], "--dst", ends[1], "--json").answer["verdict"] == "proved"


def test_recurrent_states_follow_the_dtype_of_the_model(cli):
    ends = ("vllm serve state-spaces/mamba2-2.7b", "vllm serve state-spaces/mamba2-2.7b --dtype float32")
    ran = cli("plan", "--model", "mamba2-2.7b", "--src", ends[0], "--dst", ends[1], "--json")
    assert (ran.code, ran.answer["verdict"]) == (1, "refused")


def test_the_cure_of_a_module_is_a_command_too(cli):
    module = "python3 -m vllm.entrypoints.openai.api_server --model Qwen/Qwen3-32B -tp 4 --block-size 64"
    dst = f"VLLM_KV_CACHE_LAYOUT=NHD {module}"
    (warned,) = cli("plan", "--src", SRC, "--dst", dst, "--json").answer["warnings"]
    assert "VLLM_KV_CACHE_LAYOUT=HND vllm serve --model Qwen/Qwen3-32B -tp 4" in warned["command"]


def test_a_folder_is_a_model(cli, tmp_path):
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    serve = f"vllm serve {tmp_path}"
    answer = cli("plan", "--src", serve, "--dst", f"{serve} -tp 2", "--json").answer
    assert (answer["verdict"], answer["src"]["model"]) == ("proved", tmp_path.name)


LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}


def test_a_model_that_nobody_knows_is_asked_for(cli, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    serve = "vllm serve meta-llama/Llama-3.1-8B-Tiny"
    ran = cli("plan", "--src", serve, "--dst", serve)
    assert ran.code == 2
    assert ran.err.endswith("Pass its config.json (--config FILE)\n")  # a name says nothing of the cache
    assert cli("plan", "--model", "llama-3.1-8b", "--src", serve, "--dst", serve).code == 0


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B-Instruct", "google/gemma-3-27b-pt", "gpt2"])
def test_how_a_model_was_trained_does_not_matter(name):
    assert served_model(name) is not None


def test_a_model_with_the_cache_of_another_is_known_by_its_own_name():
    for name in ("deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V3"):
        found = served_model(name)
        assert found is not None
        assert found.name == "deepseek-v3"


def test_a_downloaded_model_is_found(monkeypatch, tmp_path):
    folder = tmp_path / "hub" / "models--acme--Own-1B"
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc" / "config.json").write_text(json.dumps(LLAMA))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    found = served_model("acme/Own-1B")
    assert found is not None
    assert found.model.name == "Own-1B"
    assert served_model("acme/Own-2B") is None
    assert served_model("../hub/models--acme--Own-1B") is None


def test_a_topology_is_of_the_model_that_the_other_side_serves(cli):
    answer = cli("plan", "--src", "vllm serve Qwen/Qwen3-32B -tp 4", "--dst", "tp=2", "--json").answer
    assert answer["dst"]["model"] == "qwen3-32b"


def test_a_setting_that_is_changed_replaces_the_old_one():
    text = "vllm serve m --kv_cache_dtype=fp8 --kv-cache-dtype-skip-layers auto"
    assert with_setting(text, "dtype", "bf16") == (
        "vllm serve m --kv-cache-dtype bfloat16 --kv-cache-dtype-skip-layers auto"
    )


@pytest.fixture
def folder(tmp_path):
    def made(name, **more):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**LLAMA, **more}))
        return f"vllm serve {tmp_path / name}"

    return made


def values(finding):
    return tuple(finding[key] for key in ("code", "field", "src", "dst"))


def test_another_configuration_is_refused_although_the_caches_fit(cli, folder):
    """Running engines compare it, and refuse each other: PROVED would be the wrong answer."""
    sides = (folder("a", rope_theta=10000.0), folder("b", rope_theta=500000.0))
    ran = cli("plan", "--src", sides[0], "--dst", sides[1], "--json")
    assert (ran.code, ran.answer["verdict"]) == (1, "refused")
    (found,) = ran.answer["findings"]
    assert values(found) == ("identity-differs", "rope_theta", "10000", "500000")
    assert found["dst_ranks"] == [0]
    assert ran.answer["command"] == ""
    assert ran.answer["total_bytes"] > 0  # the bytes would fit: their bill is there all the same
    ran = cli("diff", *sides, "--json")
    assert (ran.code, ran.answer["verdict"]) == (1, "refused")  # one word for both
    (told,) = (each for each in ran.answer["differences"] if each["effect"] == "refused")
    assert (told["what"], told["a"], told["b"]) == ("model: rope_theta", "10000", "500000")
    assert cli("diff", *sides).out.startswith("REFUSED  not the same model: running engines reject")


def test_a_default_that_one_folder_spells_out_is_no_difference(cli, folder, monkeypatch):
    monkeypatch.setattr("kvferry.cli.asked.is_installed", lambda: False)
    sides = (folder("a"), folder("b", rope_theta=10000.0, hidden_act="silu"))
    ran = cli("plan", "--src", sides[0], "--dst", sides[1])
    assert ran.code == 0
    told = " ".join(ran.out.split())
    assert (
        "the same in the keys that both config.json files have; only one has hidden_act, rope_theta:" in told
    )


@pytest.mark.parametrize(
    ("denied", "given", "field"),
    [
        ({"attention_bias": False}, {"attention_bias": True}, "attention_bias"),
        ({"rope_scaling": None}, {"rope_scaling": {"factor": 8.0}}, "rope_scaling.factor"),
        ({"head_dim": None, "hidden_size": 32}, {"hidden_size": 32}, ""),  # which transformers fills in
    ],
)
def test_what_one_folder_denies_is_a_difference(cli, folder, monkeypatch, denied, given, field):
    monkeypatch.setattr("kvferry.cli.asked.is_installed", lambda: False)
    ran = cli("plan", "--src", folder("a", **denied), "--dst", folder("b", **given), "--json")
    assert [each["field"] for each in ran.answer.get("findings", ())] == [field] * bool(field)


def test_what_the_installed_vllm_fills_in_is_compared(cli, folder, monkeypatch):
    def filled(path):
        return {"rope_theta": 10000.0, **json.loads((path / "config.json").read_text())}

    monkeypatch.setattr("kvferry.cli.asked.is_installed", lambda: True)
    monkeypatch.setattr("kvferry.cli.asked.filled_config", filled)
    plain, same, other = folder("a"), folder("b", rope_theta=10000.0), folder("c", rope_theta=5e5)
    assert "engines compare weights" in cli("plan", "--src", plain, "--dst", same).out
    (found,) = cli("plan", "--src", plain, "--dst", other, "--json").answer["findings"]
    assert values(found) == ("identity-differs", "rope_theta", "10000", "500000")


LONG = {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (" --max-model-len 64k", "longrope"),
        (" --max-model-len 4k", ""),
        (
            ' --kv-transfer-config \'{"kv_connector": "KVFerryConnector", "kv_connector_extra_config":'
            ' {"identity": "x"}}\'',
            "identity",
        ),
    ],
)
def test_what_engines_compare_beside_the_configuration_counts(cli, folder, flags, field):
    serve = folder("a", **LONG)
    found = cli("plan", "--src", serve, "--dst", f"{serve}{flags}", "--json").answer.get("findings", [])
    assert [each["field"] for each in found] == [field] * bool(field)


def test_checkpoints_in_two_dtypes_are_two_models_whatever_their_cache(cli, folder):
    sides = [folder(dtype, torch_dtype=dtype) for dtype in ("float16", "bfloat16")]
    src, dst = (f"{side} --kv-cache-dtype fp8" for side in sides)
    (found,) = cli("plan", "--src", src, "--dst", dst, "--json").answer["findings"]
    assert values(found) == ("identity-differs", "dtype", "fp16", "bf16")


@pytest.mark.parametrize(("side", "role"), [("src", "kv_consumer"), ("dst", "kv_producer")])
def test_a_role_that_does_not_fit_its_side_is_rejected(cli, folder, side, role):
    serve = folder("a")
    ends = {"src": serve, "dst": serve} | {side: f"{serve} --kv-transfer-config.kv_role {role}"}
    ran = cli("plan", "--src", ends["src"], "--dst", ends["dst"])
    said = f"kv_role is {role}: an engine with this role cannot be the {side}"
    assert (ran.code, said in ran.err) == (2, True)
    assert (
        cli("diff", ends["src"], ends["dst"]).code == 0
    )  # compared in both directions, whatever their roles


def test_the_block_size_of_a_hybrid_is_rounded_up_as_vllm_does(cli):
    serve = "vllm serve Qwen/Qwen3-Next-80B-A3B-Instruct"
    answer = cli("plan", "--src", f"{serve} --block-size 64", "--dst", serve, "--json").answer
    assert [answer[side]["groups"]["full"] for side in ("src", "dst")] == [576, 544]


def test_a_flag_that_makes_another_model_is_refused(cli, folder):
    serve = folder("a")
    (found,) = cli("plan", "--src", serve, "--dst", f"{serve} -q fp8", "--json").answer["findings"]
    assert values(found) == ("identity-differs", "--quantization", "nothing", "fp8")


def test_people_read_that_the_models_differ_and_that_the_bytes_would_fit(cli, folder):
    serve = folder("a")
    ran = cli("plan", "--src", serve, "--dst", f"{serve} -q fp8")
    assert ran.code == 1
    assert ran.out.startswith("REFUSED  1 destination rank\n")
    assert "PROVED" not in ran.out
    assert "--quantization" in ran.out
    assert "The bytes would fit." in ran.out
    assert "One request of 4096 tokens" in ran.out


def test_no_way_is_shown_that_running_engines_would_refuse(cli, folder):
    """Another cache dtype alone has a cure; beside another configuration it cures nothing."""
    same, other = folder("a", rope_theta=1e4), folder("b", rope_theta=5e5)
    ran = cli("plan", "--src", same, "--dst", f"{same} --kv-cache-dtype fp8", "--json")
    assert ran.answer["command"] != ""
    ran = cli("plan", "--src", same, "--dst", f"{other} --kv-cache-dtype fp8", "--json")
    fields = {found["field"] for found in ran.answer["findings"]}
    assert (ran.code, ran.answer["command"], {"dtype", "rope_theta"} <= fields) == (1, "", True)


@pytest.mark.parametrize("flags", ["", " --dtype float16"])
def test_a_cure_says_a_dtype_in_vllms_words(cli, folder, flags):
    """vLLM 0.32 has no `bf16`: `--kv-cache-dtype` takes auto, float16, bfloat16, fp8, …"""
    serve = f"{folder('a')}{flags}"
    ran = cli("plan", "--src", serve, "--dst", f"{serve} --kv-cache-dtype fp8", "--json")
    command = ran.answer["command"]
    assert "--kv-cache-dtype auto" in command
    assert "bf16" not in command
    assert "fp16" not in command


def test_flags_that_are_not_read_are_named(cli, folder):
    serve = folder("a")
    sides = (f"{serve} -tp 1 --port 8000", f"{serve} --seed=3 --port 80")
    ran = cli("plan", "--src", sides[0], "--dst", sides[1])
    assert "  ignored  --port, --seed\n" in ran.out
    answer = cli("plan", "--src", sides[0], "--dst", sides[1], "--json").answer
    assert answer["ignored"] == {"src": ["--port"], "dst": ["--seed", "--port"]}
    negated = cli("plan", "--src", serve, "--dst", f"{serve} --no-enable-prefix-caching", "--json")
    assert negated.answer["ignored"]["dst"] == ["--no-enable-prefix-caching"]
    assert "ignored" not in cli("plan", "--src", f"{serve} -tp 1", "--dst", serve).out
    refused = cli("plan", "--src", sides[0], "--dst", f"{sides[1]} --kv-cache-dtype fp8")
    assert "  ignored  --port, --seed\n" in refused.out


def test_of_many_differences_the_first_are_listed_and_the_rest_counted(cli, folder):
    sides = [folder(name, **{f"rope_{i}": f"{name}{i}" for i in range(7)}) for name in "ab"]
    answer = cli("plan", "--src", sides[0], "--dst", sides[1], "--json").answer
    assert (len(answer["findings"]), answer["num_more_findings"]) == (4, 3)


def test_pictures_say_that_engines_would_refuse_each_other(cli, folder, tmp_path):
    serve = folder("a")
    html, svg = tmp_path / "it.html", tmp_path / "it.svg"
    ran = cli("plan", "--src", serve, "--dst", f"{serve} -q fp8", "--html", html, "--svg", svg)
    assert ran.code == 1
    assert 'class="hero refused"' in html.read_text()
    assert "The bytes would fit" in html.read_text()
    assert ">REFUSED</text>" in svg.read_text()
    for drawn in (html, svg):
        assert 'class="band"' in drawn.read_text()


def test_equal_configurations_are_proved(cli, folder):
    sides = (folder("a", rope_theta=1e4, _name_or_path="x"), folder("b", rope_theta=10000))
    assert cli("plan", "--src", sides[0], "--dst", sides[1], "--json").answer["verdict"] == "proved"
    ends = ("--src", "tp=1", "--dst", "vllm serve gpt2")
    assert cli("plan", "--model", "gpt2", *ends, "--json").answer["verdict"] == "proved"


def test_a_multimodal_configuration_is_the_model_that_the_catalogue_has(cli, tmp_path):
    """The catalogue has its text model only."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    ends = ("--src", f"vllm serve {tmp_path}", "--dst", "vllm serve google/gemma-3-4b-it")
    assert cli("plan", *ends, "--json").answer["verdict"] == "proved"


def test_another_window_is_refused_in_files_too(cli, tmp_path):
    mistral = {**LLAMA, "model_type": "mistral", "num_key_value_heads": 4}
    for name, window in (("a", 64), ("b", 128)):
        config = tmp_path / f"{name}-config.json"
        config.write_text(json.dumps({**mistral, "sliding_window": window}))
        cli("describe", "--config", str(config), "--at", "tp=1", "-o", str(tmp_path / f"{name}.json"))
    files = [str(tmp_path / f"{name}.json") for name in "ab"]
    answer = cli("plan", *files, "--json").answer
    assert answer["request"]["tokens"] == 64  # more of it is not there
    (found,) = answer["findings"]
    assert values(found) == ("identity-differs", "window", "64 tokens", "128 tokens")
    (told,) = (
        each for each in cli("diff", *files, "--json").answer["differences"] if each["a"] == "64 tokens"
    )
    assert (told["what"], told["effect"]) == ("window", "refused")
    ran = cli("plan", *files, "--tokens", "65")
    assert (ran.code, "the source keeps only 64 tokens of some layers" in ran.err) == (2, True)


def test_a_wrong_flag_is_said_with_its_side(cli):
    ran = cli("plan", "--src", "vllm serve gpt2 -tp x", "--dst", "vllm serve gpt2")
    assert (ran.code, "--src vllm serve gpt2 -tp x: tp must be a whole number" in ran.err) == (2, True)
