"""Our reading of a config.json beside transformers' own classes, and beside what vLLM makes of it."""

from __future__ import annotations

from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

from kvferry.errors import SpecError  # noqa: E402
from kvferry.models import Model, model_from_config  # noqa: E402
from kvferry.models.config import CLASS_DEFAULTS  # noqa: E402
from kvferry.models.families import FAMILIES  # noqa: E402
from tests.models.published import NEMOTRON_H_8B, PUBLISHED  # noqa: E402

KNOWN = [name for name in PUBLISHED if PUBLISHED[name][0]["model_type"] in CONFIG_MAPPING]


def text_config(values: dict[str, Any]) -> Any:
    return CONFIG_MAPPING[values["model_type"]].from_dict(dict(values)).get_text_config()


def layer_shapes(config: Any) -> list[tuple[int, int, int]]:
    """KV heads, width and window of each layer, as a transformers config of plain attention has them."""
    kinds = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    windows = {
        "full_attention": 0,
        "sliding_attention": config.to_dict().get("sliding_window"),
        "chunked_attention": config.to_dict().get("attention_chunk_size"),
        None: config.to_dict().get("sliding_window") or 0,
    }
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return [(config.num_key_value_heads, width, windows[kind]) for kind in kinds]


def ours(model: Model) -> list[tuple[int, int, int]]:
    caches = [layer.caches[0] for layer in model.layers]
    return [(c.page.parts[0].dims[0].size, c.page.parts[0].dims[1].size, c.window) for c in caches]


PLAIN = [name for name in KNOWN if not name.startswith(("falcon", "nemotron"))]


@pytest.mark.parametrize("name", PLAIN)
def test_a_published_config_is_read_as_transformers_reads_it(name: str) -> None:
    values = PUBLISHED[name][0]
    assert ours(model_from_config(values)) == layer_shapes(text_config(values))


@pytest.mark.parametrize("name", [name for name in KNOWN if name.startswith("falcon")])
def test_falcon_has_the_kv_heads_that_vllm_gives_it(name: str) -> None:
    from vllm.transformers_utils.model_arch_config_convertor import FalconModelArchConfigConvertor

    values = PUBLISHED[name][0]
    config = text_config(values)
    expected = FalconModelArchConfigConvertor(config, config).get_total_num_kv_heads()
    assert {heads for heads, _, _ in ours(model_from_config(values))} == {expected}


@pytest.mark.parametrize("kind", sorted(CLASS_DEFAULTS))
def test_our_defaults_are_those_of_the_class(kind: str) -> None:
    theirs = CONFIG_MAPPING[kind]().to_dict()
    if "use_sliding_window" in CLASS_DEFAULTS[kind]:  # the class forgets a window that is off
        theirs["sliding_window"] = CONFIG_MAPPING[kind](use_sliding_window=True).to_dict()["sliding_window"]
    assert {key: theirs.get(key) for key in CLASS_DEFAULTS[kind]} == CLASS_DEFAULTS[kind]


REFUSED = {
    "deepseek_v4": "compress_ratios is missing",
    "glm4_moe": "head_dim is missing",
    "kimi_linear": "linear_attn_config is missing",
    "minimax": "layer_types of model_type 'minimax' must be",
}
"""Classes whose bare defaults no published model has, or that write another form than was published."""


@pytest.mark.parametrize("kind", sorted(set(FAMILIES) & set(CONFIG_MAPPING)))
def test_every_key_that_a_class_writes_is_known(kind: str) -> None:
    """No key is refused only because nobody has looked at it."""
    values = CONFIG_MAPPING[kind]().to_dict()
    if kind in REFUSED:
        with pytest.raises(SpecError, match=REFUSED[kind]):
            model_from_config(values)
    else:
        assert model_from_config(values).layers


def test_the_ssm_state_of_nemotron_h_has_vllms_dtype() -> None:
    from vllm.config import CacheConfig
    from vllm.model_executor.models.config import NemotronHForCausalLMConfig

    cache = CacheConfig()
    NemotronHForCausalLMConfig.update_mamba_ssm_cache_dtype(
        cache_config=cache, hf_config=text_config(NEMOTRON_H_8B)
    )
    model = model_from_config(NEMOTRON_H_8B)
    assert cache.mamba_ssm_cache_dtype == "float32"
    assert model.layers[0].caches[0].page.parts[-1].item.dtype == "fp32"


@pytest.mark.parametrize(("width", "num_heads"), [(64, 2), (128, 1)])
def test_heads_of_layers_that_differ_are_told_by_their_width(width: int, num_heads: int) -> None:
    """transformers refuses to tell a head count of the whole model; the connector did not start."""
    from types import SimpleNamespace

    from transformers import AutoConfig

    from kvferry.integrations.vllm.worker.describe import _total_heads
    from tests.support.vllm.tiny import FAMILIES

    config = AutoConfig.for_model(**FAMILIES["gemma4"])
    model = SimpleNamespace(hf_text_config=config, get_total_num_kv_heads=lambda: config.num_key_value_heads)
    vllm_config = SimpleNamespace(model_config=model, speculative_config=None)
    for tp_size in (1, 2):
        spec = SimpleNamespace(head_size=width, num_kv_heads=max(1, num_heads // tp_size))
        assert _total_heads(vllm_config, spec, tp_size) == num_heads
