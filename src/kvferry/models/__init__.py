"""Offline descriptions: a model's config and a topology in, an engine's manifest out."""

from kvferry.models.describe import describe
from kvferry.models.families import catalogue, catalogued, model_from_config, model_named
from kvferry.models.model import Layer, Model
from kvferry.models.topology import Topology

__all__ = [
    "Layer",
    "Model",
    "Topology",
    "catalogue",
    "catalogued",
    "describe",
    "model_from_config",
    "model_named",
]
