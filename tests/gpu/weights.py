"""Imported by vLLM's worker, as its extension: made-up weights whose answers depend on what was read.

vLLM's own made-up weights are so small that each answer is the same token again and again, and each matrix of
a shape is the same: two answers that are equal then say nothing about a cache.
"""

from __future__ import annotations

import sys
from typing import Any

WIDTH = 1.28
"""Standard deviation times the square root of a matrix's inputs: as in ``tests.support.vllm.tiny``."""


class Wide:
    """Adds nothing to a worker: it is there to have this module imported before weights are made up."""


def fill(model: Any) -> None:
    """The same weights in each process: every parameter has a seed, its place among their names."""
    import torch

    for seed, (name, parameter) in enumerate(sorted(model.named_parameters())):
        data = parameter.data
        if data.dim() < 2:
            data.fill_(1.0)
            continue
        generator = torch.Generator(device=data.device)
        generator.manual_seed(seed)
        std = 1.0 if "embed_tokens" in name else WIDTH / data.shape[-1] ** 0.5
        data.normal_(0, std, generator=generator)


def _teach() -> None:
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    DummyModelLoader.load_weights = lambda loader, model, model_config: fill(model)


if "vllm" in sys.modules:  # by a worker, and not by a test without vLLM
    _teach()
