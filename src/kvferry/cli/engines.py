"""From arguments to manifests: each side is a file, or a model and a topology."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from kvferry.checkpoint import rope_factors
from kvferry.cli import serve_command
from kvferry.cli.options import at
from kvferry.cli.serve_command import ServeCommand
from kvferry.core.manifest import Manifest
from kvferry.core.state import Addressing
from kvferry.errors import SpecError, counted
from kvferry.models import Model, Topology, catalogue, catalogued, describe, model_from_config, model_named
from kvferry.models.config import Config
from kvferry.models.describe import served_block


@dataclass(frozen=True)
class ServedModel:
    name: str
    config: Mapping[str, Any]
    file: Path | None = None
    """Its config.json; None for a model of the catalogue, which has only the keys that affect the cache."""
    asked_dtype: str = ""
    """The compute dtype; empty: from the config. Quantised caches stay quantised."""

    @property
    def model(self) -> Model:
        with at(str(self.file or self.name)):
            return model_from_config(self.config, self.name, self.asked_dtype)

    @property
    def dtype(self) -> str:
        """The compute dtype, which is also the default dtype of the caches."""
        with at(str(self.file or self.name)):
            return Config(self.config, self.asked_dtype).dtype


def served_model(name: str) -> ServedModel | None:
    """The model that ``vllm serve NAME`` starts, if its config is available offline."""
    folder = Path(name) / "config.json"
    if folder.is_file():
        return model_of_file(folder)
    if (known := catalogued_model(name)) is not None:
        return known
    downloaded = _downloaded(name)
    return _of_file(downloaded, name.rpartition("/")[2]) if downloaded else None


def catalogued_model(name: str) -> ServedModel | None:
    known = catalogued(name)
    return ServedModel(known, catalogue()[known]["config"]) if known else None


def model_of_file(config: Path) -> ServedModel:
    """The model of a config.json, named after its folder, or of another file, named after the file."""
    return _of_file(config, config.resolve().parent.name if config.stem == "config" else config.stem)


def _of_file(config: Path, name: str) -> ServedModel:
    with at(str(config)):
        values = _json_object(config)
    beside = config.with_name("hf_quant_config.json")
    if config.name == "config.json" and values.get("quantization_config") is None and beside.is_file():
        with at(str(beside)):
            values["quantization_config"] = _json_object(beside)
    return ServedModel(name, values, config)


def unknown_model(name: str) -> str:
    return (
        f"the model {name!r} is unknown: it is not a folder with a config.json, not in `kvferry models`,"
        " and not in the Hugging Face cache of this host. Pass its config.json (--config FILE)"
    )


def _json_object(path: Path) -> dict[str, object]:
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise SpecError(f"not JSON: {error}") from None
    if not isinstance(values, dict):
        raise SpecError("a JSON object is expected, as in a model's config.json")
    return values


def _downloaded(name: str) -> Path | None:
    """The config.json of a model in this machine's Hugging Face cache."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
        return None
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    home = Path(os.environ.get("HF_HOME") or cache / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub").expanduser()
    folder = hub / f"models--{name.replace('/', '--')}"
    try:
        commit = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    config = folder / "snapshots" / commit / "config.json"
    return config if config.is_file() else None


OTHER_ROLE = {"src": "kv_consumer", "dst": "kv_producer"}
DTYPE_INSTEAD = "set dtype=… in a topology (tp=4,dtype=fp16)"


@dataclass(frozen=True)
class Server:
    """A running server, which is asked for its manifest once."""

    url: str

    def __str__(self) -> str:
        return self.url

    @cached_property
    def manifest(self) -> Manifest:
        from kvferry.cli.served import served_manifest

        return served_manifest(self.url)


@dataclass(frozen=True)
class Side:
    """One side as requested: a manifest, or a topology of a model."""

    engine: str
    """``src`` or ``dst``; ``A`` or ``B`` of ``kvferry diff``, where either may be the source."""
    file: Path | Server | None = None
    text: str = ""
    """The topology, or the command that starts the engine, verbatim."""
    model: str = ""
    config: Path | None = None
    is_named: bool = False
    """Whether the model was named for this side only."""

    @property
    def label(self) -> str:
        return f"--{self.engine}" if self.engine in OTHER_ROLE else self.engine

    def manifest(self, num_tokens: int = 0) -> Manifest:
        """Read or describe it; a pool of unspecified size gets room for ``num_tokens``."""
        if self.file is not None:
            return manifest_of(self.file)
        model, topology = self.chosen_model, self.topology
        with at(f"{self.label} {self.text}"):
            return described_with_room(model, topology, self.engine, num_tokens)

    @cached_property
    def topology(self) -> str:
        if self.command is None:
            return self.text
        asked = self.command.topology
        with at(f"{self.label} {self.text}"):
            topology = Topology.parse(asked)
            _check_backend(self.chosen_model, self.command.attention_backend, topology)
            if not topology.block:
                return asked
            return _with_key(asked, "block", str(served_block(self.chosen_model, topology)))

    @cached_property
    def chosen_model(self) -> Model:
        """The served model: named for this side, else in its command if it is known, else for both sides."""
        if self.command and self.command.dtype:
            if self.served is None:
                raise SpecError(f"{self.label}: --dtype of a model with a draft: {DTYPE_INSTEAD}")
            return replace(self.served, asked_dtype=self.command.dtype).model
        if self._of_command is not None:
            return self._of_command.model
        if self.command and not (self.model or self.config):
            raise SpecError(f"{self.label}: {unknown_model(self.command.model)}")
        return chosen_model(self.model, self.config)

    @cached_property
    def served(self) -> ServedModel | None:
        """The model's configuration; None for a manifest file, or a model with a draft."""
        if self.file is not None or self._of_command is not None:
            return self._of_command
        return model_of_file(self.config) if self.config else catalogued_model(self.model)

    @property
    def assumed_layout(self) -> str:
        """The layout assumed for its attention because none was given; empty if nothing is assumed."""
        if self.file is not None or "layout" in _keys(self.topology):
            return ""
        caches = (cache for layer in self.chosen_model.layers for cache in layer.caches)
        return Topology().layout if any(not cache.is_recurrent for cache in caches) else ""

    @property
    def model_dtype(self) -> str:
        named = self.command.dtype if self.command else ""
        return named or (self.served.dtype if self.served else "")

    @property
    def values_beside_config(self) -> dict[str, str]:
        """The command's settings that change the model's numbers, by the names that engines compare."""
        if self.command is None:
            return {}
        flags = {f"--{flag}": value for flag, value in self.command.model_flags}
        identity = (self.command.connector.get("kv_connector_extra_config") or {}).get("identity", "")
        longest = self.command.max_model_len
        factors = rope_factors(self.served.config, longest) if self.served else ""
        named = {"dtype": self.model_dtype, "longrope": factors, "identity": identity}
        return flags | {name: value for name, value in named.items() if value}

    @property
    def own_dtype(self) -> str:
        """The model's default dtype of attention caches."""
        caches = (cache for layer in self.chosen_model.layers for cache in layer.caches if cache.is_attention)
        return next((part.item.dtype for cache in caches for part in cache.page.parts), "")

    @cached_property
    def _of_command(self) -> ServedModel | None:
        """The model in the command, unless another one was named for this side."""
        return served_model(self.command.model) if self.command and not self.is_named else None

    def with_setting(self, key: str, value: str) -> Side:
        if self.command:
            # vLLM's CPU build accepts the model's own dtype only by this name.
            word = "auto" if key == "dtype" and value == self.own_dtype else value
            return replace(self, text=serve_command.with_setting(self.text, key, word))
        return replace(self, text=_with_key(self.text, key, value))

    @cached_property
    def command(self) -> ServeCommand | None:
        if not ServeCommand.is_one(self.text):
            return None
        with at(f"{self.label} {self.text}"):
            command = ServeCommand.read(self.text)
            role = command.connector.get("kv_role")
            if role and role == OTHER_ROLE.get(self.engine):
                raise SpecError(f"kv_role is {role}: an engine with this role cannot be the {self.engine}")
            return command


def _check_backend(model: Model, backend: str, topology: Topology) -> None:
    """Raise SpecError if the backend does not support the model or block size, or the layout is unknown."""
    caches = [cache for layer in model.layers for cache in layer.caches]
    has_latents = any(part.name == "latent" for cache in caches for part in cache.page.parts)
    is_sparse = has_latents and any(cache.name == "indexer" for cache in caches)
    if backend and is_sparse:
        raise SpecError(f"--attention-backend {backend}: {model.name} has sparse MLA: vLLM does not start")
    if backend and has_latents != ("MLA" in backend):
        kind = "MLA" if has_latents else "attention over K and V"
        raise SpecError(f"--attention-backend {backend}: {model.name} has {kind}: vLLM does not start")
    is_hybrid = any(cache.is_recurrent for cache in caches)
    step = serve_command.BACKENDS.get(backend, 0) or (16 if is_hybrid else model.default_block)
    if topology.block % step:
        raise SpecError(f"--block-size {topology.block}: vLLM needs a multiple of {step}")


def src_and_dst(
    files: Sequence[Path],
    topologies: tuple[str | None, str | None],
    model: str,
    config: Path | None,
    own_models: tuple[str, str] = ("", ""),
    engines: tuple[str, str] = ("src", "dst"),
) -> tuple[Side, Side]:
    """Both sides; files fill the sides without a topology, the source first.

    ``model`` and ``config`` apply to both sides, ``own_models`` to one each.
    """
    open_sides = topologies.count(None)
    if len(files) != open_sides:
        raise SpecError(
            f"{counted(len(files), 'file')} for {counted(open_sides, 'side')} without a topology:"
            " each side needs a manifest file or a topology (--src tp=4, --dst tp=8)"
        )
    if model and config:
        raise SpecError(
            "--model and --config are mutually exclusive; `kvferry plan` has --src-model and --dst-model"
        )
    if open_sides == 2 and (model or config or any(own_models)):
        raise SpecError("--model and --config describe a side given by --src or --dst; files need neither")
    is_file = [text is None or _is_manifest(text) for text in topologies]
    if (model or config) and all(own_models):
        raise SpecError(
            "--model and --config have no effect: --src-model and --dst-model name the models of both sides"
        )
    for has_model, own, engine in zip(is_file, own_models, engines, strict=True):
        if own and has_model:
            raise SpecError(f"--{engine}-model {own}: --{engine} is a manifest, which names its model")
    left = iter(files)
    src, dst = (
        Side(engine, next(left) if text is None else _place_of(text))
        if text is None or has_model
        else Side(engine, None, text, own or model, None if own else config, bool(own))
        for engine, text, has_model, own in zip(engines, topologies, is_file, own_models, strict=True)
    )
    return _with_model_of(src, dst), _with_model_of(dst, src)


def _is_manifest(text: str) -> bool:
    """Whether it names a manifest; raises SpecError for an unknown vLLM command."""
    if ServeCommand.is_one(text):
        return False
    if _is_url(text):
        return True
    if "vllm" in text.lower() and not text.endswith(".json"):
        raise SpecError(
            f"{text}: not a command that starts vLLM: expected VARIABLE=… vllm serve MODEL --flags"
        )
    return text.endswith(".json")


def _place_of(text: str) -> Path | Server:
    return Server(text) if _is_url(text) else Path(text)


def _is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def _with_model_of(side: Side, other: Side) -> Side:
    """A topology without a model uses the model of the other side's command."""
    if side.file or side.command or side.model or side.config or other.command is None:
        return side
    if (known := other.served) is None:
        return side
    return replace(side, config=known.file) if known.file else replace(side, model=known.name)


def manifest_of(path: Path | Server) -> Manifest:
    from kvferry.wire.manifest import manifest_from_json

    with at(str(path)):
        if isinstance(path, Server):
            return path.manifest
        return manifest_from_json(path.read_bytes())


def listed_ranks(manifest: Manifest) -> str:
    """The ranks of an engine as text: ``rank 0 only``, ``ranks 0, 1``, ``ranks 0 to 63``."""
    ranks = [rank.rank for rank in manifest.ranks]
    if len(ranks) == 1:
        return f"rank {ranks[0]} only"
    if len(ranks) > 8 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


def chosen_model(name: str, config: Path | None) -> Model:
    if bool(name) == (config is not None):
        raise SpecError("a topology needs a model: give --model NAME (see `kvferry models`) or --config FILE")
    if config is not None:
        return model_of_file(config).model
    with at("--model"):
        return model_named(name)


def described_with_room(model: Model, text: str, engine: str, num_tokens: int) -> Manifest:
    """Describe an engine; unless ``blocks`` is given, its pool has room for a request of ``num_tokens``."""
    topology = Topology.parse(text)
    manifest = describe(model, topology, engine)
    needed = blocks_needed(manifest, num_tokens)
    if needed <= topology.blocks or "blocks" in _keys(text):
        return manifest
    return describe(model, replace(topology, blocks=needed), engine)


def described_to_fit(
    model: Model, text: str, engine: str, num_tokens: int, num_requests: int = 2
) -> Manifest:
    """Describe an engine with room for ``num_requests`` of ``num_tokens``; two, to scatter one of them."""
    topology = Topology.parse(text)
    if "blocks" in _keys(text):
        return describe(model, topology, engine)
    needed = blocks_needed(describe(model, replace(topology, blocks=1), engine), num_tokens)
    return describe(model, replace(topology, blocks=num_requests * needed), engine)


def blocks_needed(manifest: Manifest, num_tokens: int) -> int:
    """Maximum blocks of a request, if all groups draw from one pool."""
    return sum(
        -(-num_tokens // group.tokens_per_block) + 1 if group.addressing is Addressing.TABLE else 1
        for group in manifest.groups
    )


def _with_key(text: str, key: str, value: str) -> str:
    kept = [item for item in text.split(",") if item and item.partition("=")[0].strip() != key]
    return ",".join([*kept, f"{key}={value}"])


def _keys(text: str) -> set[str]:
    return {item.partition("=")[0].strip() for item in text.split(",")}
