"""EDGE: a model's files (configuration, weights, adapters) as values of its identity."""

from kvferry.checkpoint.config import config_values, rope_factors
from kvferry.checkpoint.weights import adapter_digest, weights_values

__all__ = ["adapter_digest", "config_values", "rope_factors", "weights_values"]
