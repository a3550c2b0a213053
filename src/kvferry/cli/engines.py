"""From arguments to manifests: a file, or a model and a topology, for each side."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

from kvferry.cli import serve_command
from kvferry.cli.options import at
from kvferry.cli.serve_command import ServeCommand
from kvferry.core.manifest import Manifest
from kvferry.core.state import Addressing
from kvferry.core.words import counted
from kvferry.errors import SpecError
from kvferry.models import Model, Topology, catalogue, describe, model_from_config, model_named
from kvferry.models.config import Config

VARIANTS = ("-instruct", "-base", "-chat", "-it", "-pt", "-thinking")
"""How the names of models end that were trained further, and keep the same cache."""


@dataclass(frozen=True)
class ServedModel:
    name: str
    config: Mapping[str, Any]
    file: Path | None = None
    """Its config.json; None for a model of the catalogue, which has what decides the cache, and no more."""

    @property
    def model(self) -> Model:
        with at(str(self.file or self.name)):
            return model_from_config(self.config, self.name)

    @property
    def dtype(self) -> str:
        """What the model computes in, and keeps in its caches unless it is told otherwise."""
        with at(str(self.file or self.name)):
            return Config(self.config).dtype

    def in_dtype(self, dtype: str) -> ServedModel:
        """The same model computing in another dtype; what its checkpoint quantises stays quantised."""
        text = self.config.get("text_config")
        own = {"torch_dtype": dtype}
        more = {"text_config": {**text, **own}} if isinstance(text, Mapping) else own
        return replace(self, config={**self.config, **more})


def served_model(name: str) -> ServedModel | None:
    """The model that `vllm serve NAME` starts, if it can be found without a network."""
    folder = Path(name) / "config.json"
    if folder.is_file():
        return model_of_file(folder)
    if (known := catalogued_model(name)) is not None:
        return known
    downloaded = _downloaded(name)
    return _of_file(downloaded, name.rpartition("/")[2]) if downloaded else None


def catalogued_model(name: str) -> ServedModel | None:
    """A model of the catalogue, by its name there or on the hub; how it was trained does not matter."""
    wanted = {name.lower(), _without_variant(name.lower())}
    for known, entry in catalogue().items():
        source = str(entry["source"]).partition(" ")[0].lower()
        if wanted & {known, source, _without_variant(source)}:
            return ServedModel(known, entry["config"])
    return None


def model_of_file(config: Path) -> ServedModel:
    """The model of a config.json, called after its folder; that of any other file, after the file."""
    return _of_file(config, config.resolve().parent.name if config.stem == "config" else config.stem)


def _of_file(config: Path, name: str) -> ServedModel:
    with at(str(config)):
        return ServedModel(name, _json_object(config), config)


def unknown_model(name: str) -> str:
    """That a model was not found, where it was looked for, and what to do."""
    alike = get_close_matches(name.rpartition("/")[2].lower(), catalogue(), n=1, cutoff=0.5)
    mend = f", or --model with one whose cache is the same ({alike[0]}?)" if alike else ""
    return (
        f"the model {name!r} is not known: it is no folder with a config.json, not in `kvferry models`, and"
        f" not in Hugging Face's cache on this machine. Give its config.json (--config FILE){mend}"
    )


def _json_object(path: Path) -> dict[str, object]:
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise SpecError(f"not JSON: {error}") from None
    if not isinstance(values, dict):
        raise SpecError("a JSON object is expected, as in a model's config.json")
    return values


def _without_variant(name: str) -> str:
    """The name without what only says how a model was trained.

    >>> _without_variant("meta-llama/llama-3.1-8b-instruct")
    'meta-llama/llama-3.1-8b'
    """
    return next((name.removesuffix(each) for each in VARIANTS if name.endswith(each)), name)


def _downloaded(name: str) -> Path | None:
    """The config.json of a model of the hub that was downloaded on this machine."""
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


DTYPE_INSTEAD = "say dtype=… in a topology (--src tp=4,dtype=fp16)"


@dataclass(frozen=True)
class Side:
    """One side as it was asked for: a file, or a topology of a model."""

    engine: str
    """``src`` or ``dst``."""
    file: Path | None = None
    text: str = ""
    """The topology, or the command that starts the engine, as it was given."""
    model: str = ""
    config: Path | None = None
    is_named: bool = False
    """Whether the model was named for this side, and not for both."""

    def manifest(self, num_tokens: int = 0) -> Manifest:
        """Read or describe it; a pool whose size was left open has room for ``num_tokens``."""
        if self.file is not None:
            return manifest_file(self.file)
        model = self.chosen_model
        with at(f"--{self.engine} {self.text}"):
            return described_with_room(model, self.topology, self.engine, num_tokens)

    @cached_property
    def topology(self) -> str:
        return self.command.topology if self.command else self.text

    @cached_property
    def chosen_model(self) -> Model:
        """The model that is served: named for this side, or by its command if that is known, or for both."""
        if self.command and self.command.dtype:
            if self.served is None:
                raise SpecError(f"--{self.engine}: --dtype of a model with a draft: {DTYPE_INSTEAD}")
            return self.served.in_dtype(self.command.dtype).model
        if self._of_command is not None:
            return self._of_command.model
        if self.command and not (self.model or self.config):
            raise SpecError(f"--{self.engine}: {unknown_model(self.command.model)}")
        return chosen_model(self.model, self.config)

    @cached_property
    def served(self) -> ServedModel | None:
        """The model's configuration, where there is one: files have none, nor has a model with a draft."""
        if self.file is not None or self._of_command is not None:
            return self._of_command
        return model_of_file(self.config) if self.config else catalogued_model(self.model)

    @property
    def assumed_layout(self) -> str:
        """The layout that its attention is taken to have because nobody named one; empty if there is none."""
        if self.file is not None or "layout" in _keys(self.topology):
            return ""
        caches = (cache for layer in self.chosen_model.layers for cache in layer.caches)
        return Topology().layout if any(not cache.is_recurrent for cache in caches) else ""

    @property
    def model_dtype(self) -> str:
        """What the model computes in; empty if nobody knows."""
        named = self.command.dtype if self.command else ""
        return named or (self.served.dtype if self.served else "")

    @property
    def own_dtype(self) -> str:
        """What the model keeps its attention in, unless it is told otherwise."""
        caches = (cache for layer in self.chosen_model.layers for cache in layer.caches if cache.is_attention)
        return next((part.item.dtype for cache in caches for part in cache.page.parts), "")

    @property
    def ignored_flags(self) -> tuple[str, ...]:
        return self.command.ignored if self.command else ()

    @cached_property
    def _of_command(self) -> ServedModel | None:
        """The model that the command names, unless another one was named for this side."""
        return served_model(self.command.model) if self.command and not self.is_named else None

    def with_setting(self, key: str, value: str) -> Side:
        if self.command:
            # vLLM's CPU build knows the model's own dtype by this name alone.
            word = "auto" if key == "dtype" and value == self.own_dtype else value
            return replace(self, text=serve_command.with_setting(self.text, key, word))
        kept = [item for item in self.text.split(",") if item and item.partition("=")[0].strip() != key]
        return replace(self, text=",".join([*kept, f"{key}={value}"]))

    @cached_property
    def command(self) -> ServeCommand | None:
        """The command that starts it, if the side was given so."""
        if not ServeCommand.is_one(self.text):
            return None
        with at(f"--{self.engine} {self.text}"):
            return ServeCommand.read(self.text)


@dataclass(frozen=True)
class GivenModels:
    """The models that were named: for both sides, or for one."""

    model: str = ""
    config: Path | None = None
    models: tuple[str, str] = ("", "")
    """The source's own and the destination's own."""


def src_and_dst(
    files: Sequence[Path],
    topologies: tuple[str | None, str | None],
    given: GivenModels,
) -> tuple[Side, Side]:
    """Both sides; files stand for the sides that have no topology, the source first."""
    open_sides = topologies.count(None)
    if len(files) != open_sides:
        raise SpecError(
            f"{counted(len(files), 'file')} for {counted(open_sides, 'side')} without a topology:"
            " each side needs a manifest file or a topology (--src tp=4, --dst tp=8)"
        )
    if given.model and given.config:
        raise SpecError("--model or --config, not both; --src-model and --dst-model name one side's")
    if open_sides == 2 and (given.model or given.config or any(given.models)):
        raise SpecError("--model and --config describe a side given by --src or --dst; files need neither")
    left = iter(files)
    src, dst = (
        Side(engine, next(left))
        if text is None
        else Side(engine, Path(text))
        if text.endswith(".json")
        else Side(engine, None, text, own or given.model, None if own else given.config, bool(own))
        for engine, text, own in zip(("src", "dst"), topologies, given.models, strict=True)
    )
    return _with_model_of(src, dst), _with_model_of(dst, src)


def _with_model_of(side: Side, other: Side) -> Side:
    """A topology for which no model was named is one of the model that the other side's command serves."""
    if side.file or side.command or side.model or side.config or other.command is None:
        return side
    if (known := other.served) is None:
        return side
    return replace(side, config=known.file) if known.file else replace(side, model=known.name)


def manifest_file(path: Path) -> Manifest:
    from kvferry.wire.manifest import manifest_from_json

    with at(str(path)):
        return manifest_from_json(path.read_bytes())


def listed_ranks(manifest: Manifest) -> str:
    """The ranks of an engine as people read them: ``rank 0 only``, ``ranks 0, 1``, ``ranks 0 to 63``."""
    ranks = [rank.rank for rank in manifest.ranks]
    if len(ranks) == 1:
        return f"rank {ranks[0]} only"
    if len(ranks) > 8 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


def chosen_model(name: str, config: Path | None) -> Model:
    """A model of the catalogue, or of a config.json."""
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
    """Describe an engine with room for so many requests of ``num_tokens``: two, to scatter one of them."""
    topology = Topology.parse(text)
    if "blocks" in _keys(text):
        return describe(model, topology, engine)
    needed = blocks_needed(describe(model, replace(topology, blocks=1), engine), num_tokens)
    return describe(model, replace(topology, blocks=num_requests * needed), engine)


def blocks_needed(manifest: Manifest, num_tokens: int) -> int:
    """Blocks that a request takes at most, if all groups draw from one pool."""
    return sum(
        -(-num_tokens // group.tokens_per_block) + 1 if group.addressing is Addressing.TABLE else 1
        for group in manifest.groups
    )


def _keys(text: str) -> set[str]:
    return {item.partition("=")[0].strip() for item in text.split(",")}
