"""Public models by name, with their true dimensions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from difflib import get_close_matches
from functools import lru_cache
from importlib.resources import files
from typing import Any

from kvferry.errors import SpecError
from kvferry.models.families import model_from_config
from kvferry.models.model import Model


@lru_cache(maxsize=1)
def catalogue() -> Mapping[str, Mapping[str, Any]]:
    """Every entry of ``catalogue.json``: title, note, source, config."""
    text = files("kvferry.models").joinpath("catalogue.json").read_text(encoding="utf-8")
    models: Mapping[str, Mapping[str, Any]] = json.loads(text)["models"]
    return models


def model_named(name: str) -> Model:
    """A model of the catalogue; ``A+B`` is model A with model B as its speculative draft.

    >>> [len(layer.caches) for layer in model_named("kimi-k2.5+kimi-k2.5-eagle3").draft]
    [1]
    >>> model_named("lama-3.1-70b")
    Traceback (most recent call last):
    kvferry.errors.SpecError: no model 'lama-3.1-70b' in the catalogue; did you mean llama-3.1-70b or ...
    """
    first, *drafts = name.split("+")
    model = _single(first)
    for draft in drafts:
        model = model.with_draft(_single(draft))
    return model


def _single(name: str) -> Model:
    if name not in catalogue():
        close = get_close_matches(name, catalogue(), n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(catalogue())}"
        raise SpecError(f"no model {name!r} in the catalogue; {hint}")
    return model_from_config(catalogue()[name]["config"], name)
