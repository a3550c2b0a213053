"""Identity of an engine's model: the configuration as vLLM uses it, and the loaded weights."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from vllm.config import ModelConfig, VllmConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.transformers_utils.config import get_config

from kvferry.checkpoint import config_values, rope_factors, weights_values
from kvferry.core.identity import DRAFT, MAX_VALUE_LENGTH, STATED, Identity
from kvferry.errors import SpecError
from kvferry.integrations.vllm.shared.options import UNCHECKED, Options
from kvferry.log import log_of

log = log_of(__name__)

FROM_FILES = {
    "auto": "auto",
    "hf": "hf",
    "safetensors": "safetensors",
    "fastsafetensors": "safetensors",
    "instanttensor": "safetensors",
    "runai_streamer": "safetensors",
    "mistral": "mistral",
    "npcache": "npcache",
    "pt": "pt",
}
"""Load formats that read a checkpoint's own files -> the format with which vLLM finds the same files."""

Values = dict[str, str]


def engine_identity(vllm_config: VllmConfig, options: Options) -> Identity:
    """The identity of a loaded model, or the one set in the options."""
    if options.stated_identity:
        return Identity.of({STATED: options.stated_identity})
    started = time.perf_counter()
    known, unknown = _model(vllm_config.model_config, vllm_config.load_config)
    of_draft = _draft(vllm_config)
    known, unknown = known | of_draft[0], unknown | of_draft[1]
    identity = Identity.of(known, unknown, is_required=not options.is_identity_unchecked)
    milliseconds = 1e3 * (time.perf_counter() - started)
    log.info("identity of the model: %d values in %.0f ms", len(known), milliseconds)
    for name, why in identity.unknown:
        log.warning("identity of the model: %s is unknown (%s): %s", name, why, _consequence(options))
    return identity


def _consequence(options: Options) -> str:
    if options.is_identity_unchecked:
        return "identity is unchecked: caches of a different model are not detected"
    return f"transfers are rejected; to accept this, set identity to {UNCHECKED!r} on both engines"


def _draft(vllm_config: VllmConfig) -> tuple[Values, Values]:
    """The draft model's values; a draft inside the model's own checkpoint has no separate weights."""
    model, spec = vllm_config.model_config, vllm_config.speculative_config
    draft = spec.draft_model_config if spec is not None else None
    if spec is None or draft is None or draft is model:
        return {}, {}
    known, unknown = _model(draft, spec.draft_load_config or vllm_config.load_config, model)
    return _below(DRAFT, known), _below(DRAFT, unknown)


def _below(top: str, values: Values) -> Values:
    return {f"{top}.{name}": text for name, text in values.items()}


def _model(model: ModelConfig, load: LoadConfig, target: ModelConfig | None = None) -> tuple[Values, Values]:
    """Known values of a model, and reasons for unknown ones. A draft may share files with its ``target``."""
    known, unknown = dict(_engine_values(model)), Values()
    has_own_weights = target is None or (model.model, model.revision) != (target.model, target.revision)
    try:
        folder = _folder(model, load)
        known |= _below("config", config_values(_fresh_config(model, folder).to_dict()))
    except Exception as error:  # a model's own code may parse it
        return known, {"config": _reason(error), "weights": _reason(error)}
    try:
        if has_own_weights:
            known |= weights_values(_weight_files(model, load, folder))
    except Exception as error:
        unknown["weights"] = _reason(error)
    return known, unknown


def _reason(error: Exception) -> str:
    """A reason for peers: without the text of foreign errors, which contains paths of this host."""
    log.debug("a part of the model's identity cannot be read", exc_info=error)
    if isinstance(error, SpecError):
        return str(error)[:MAX_VALUE_LENGTH]
    return f"its files were not found ({type(error).__name__})"


def _engine_values(model: ModelConfig) -> Iterator[tuple[str, str]]:
    """Engine settings that change the model's numbers, outside its own configuration."""
    text = model.hf_text_config
    yield "architecture", str(getattr(text, "model_type", "") or type(text).__name__)
    yield "dtype", str(model.dtype).removeprefix("torch.")
    own = ("quantization_config", "compression_config")
    if model.quantization and not any(getattr(model.hf_config, name, None) for name in own):
        # A checkpoint's own quantisation is in its configuration; vLLM may only select another kernel.
        yield "quantization", str(model.quantization)
        if model.quantization_config:
            yield "quantization.options", str(model.quantization_config)[:MAX_VALUE_LENGTH]
    if model.disable_sliding_window:
        yield "sliding_window", "disabled"
    if factors := rope_factors(text.to_dict(), model.max_model_len):
        yield "longrope", factors
    if model.multimodal_config is not None and model.multimodal_config.video_pruning_rate:
        yield "video_pruning_rate", str(model.multimodal_config.video_pruning_rate)


# -- files ---------------------------------------------------------------------------------------------


def _fresh_config(model: ModelConfig, folder: Path) -> Any:
    """The configuration, read again: some models modify theirs when they are built, per rank."""
    overrides = model.hf_overrides
    given = {} if callable(overrides) else overrides
    nested = {key: value for key, value in given.items() if isinstance(value, dict)}
    config = get_config(
        model.hf_config_path or str(folder),
        model.trust_remote_code,
        model.revision,
        model.code_revision,
        model.config_format,
        hf_overrides_kw={key: value for key, value in given.items() if key not in nested},
        hf_overrides_fn=overrides if callable(overrides) else None,
    )
    if nested:
        model._apply_dict_overrides(config, nested)
    return config


def _weight_files(model: ModelConfig, load: LoadConfig, folder: Path) -> list[Path]:
    """The weight files that vLLM loaded; raises SpecError for other sources."""
    as_files = FROM_FILES.get(str(load.load_format))
    if as_files is None:
        raise SpecError(f"weights of load format {load.load_format} are not read from a checkpoint's files")
    if model.model_weights:
        raise SpecError("the weights were streamed from object storage")
    plain = copy.copy(load)
    plain.load_format, plain.model_loader_extra_config = as_files, {}
    loader = DefaultModelLoader(plain)
    _, files, *_ = loader._prepare_weights(str(folder), None, None, True, None)
    return sorted(map(Path, files))


def _folder(model: ModelConfig, load: LoadConfig) -> Path:
    """The model's folder on this host. vLLM has just loaded it, so nothing is downloaded."""
    here = Path(model.model)
    if here.is_dir():
        return here
    return Path(
        snapshot_download(
            model.model, revision=model.revision, cache_dir=load.download_dir, local_files_only=True
        )
    )
