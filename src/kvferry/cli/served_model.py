"""The model that an engine serves: a folder, one of the catalogue, or one that was downloaded here."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from kvferry.cli.bad_input import at
from kvferry.errors import SpecError
from kvferry.models import Model, catalogue, model_from_config
from kvferry.models.config import Config

VARIANTS = ("-instruct", "-base", "-chat", "-it", "-pt", "-thinking")
"""How the names of models end that were trained further, and keep the same cache."""


@dataclass(frozen=True)
class ServedModel:
    """A model's name and its configuration."""

    name: str
    config: Mapping[str, Any]
    file: Path | None = None
    """Its config.json; None for a model of the catalogue, which has what decides the cache, and no more."""

    @property
    def model(self) -> Model:
        """Its caches."""
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
