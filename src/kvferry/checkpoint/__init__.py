"""EDGE: a model's files (configuration, weights, adapters) as values of its identity."""

from kvferry.checkpoint.adapter import adapter_digest
from kvferry.checkpoint.config import config_values
from kvferry.checkpoint.weights import weights_values

__all__ = ["adapter_digest", "config_values", "weights_values"]
