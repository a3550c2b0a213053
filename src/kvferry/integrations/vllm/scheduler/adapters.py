"""The LoRA adapters of requests, by their content."""

from __future__ import annotations

from pathlib import Path

from vllm.lora.request import LoRARequest
from vllm.lora.utils import get_adapter_absolute_path

from kvferry.checkpoint import adapter_digest
from kvferry.errors import SpecError
from kvferry.log import log_of

log = log_of(__name__)

MAX_ADAPTERS = 4096
"""Adapters that are remembered."""


class Adapters:
    """What each adapter is; its files are read once, when it is first used."""

    def __init__(self, *, is_unchecked: bool = False) -> None:
        """``is_unchecked``: an adapter whose content is not known is taken by its name, not refused."""
        self._is_unchecked = is_unchecked
        self._known: dict[tuple[int, str], str] = {}

    def identity(self, adapter: LoRARequest) -> str:
        """What must be equal on both sides. An engine keeps what it loaded, so later files do not count."""
        key = (adapter.lora_int_id, adapter.lora_path)
        if key not in self._known or adapter.load_inplace:
            if len(self._known) >= MAX_ADAPTERS:
                self._known.pop(next(iter(self._known)))
            self._known[key] = self._read(adapter)
        return self._known[key]

    def _read(self, adapter: LoRARequest) -> str:
        try:
            return f"content {adapter_digest(Path(get_adapter_absolute_path(adapter.lora_path)))}"
        except SpecError as error:
            if not self._is_unchecked:
                raise
            log.warning("LoRA adapter %s is compared by its name only: %s", adapter.lora_name, error)
            return f"name {adapter.lora_name}"
