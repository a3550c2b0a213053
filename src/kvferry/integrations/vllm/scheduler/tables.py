"""Interprets a request's block lists, group by group."""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from huggingface_hub import snapshot_download
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, KVCacheConfig, MambaSpec
from vllm.v1.request import Request

from kvferry.checkpoint import adapter_digest
from kvferry.core.request import HOLE, BlockTable, held_from
from kvferry.core.span import Span, Spans
from kvferry.core.state import Addressing, Group
from kvferry.errors import SpecError
from kvferry.integrations.vllm.shared.groups import (
    describe_group,
    is_prefix_cached,
    needed_tokens,
    spec_of_group,
)
from kvferry.log import log_of
from kvferry.wire.ticket import digest_parts

log = log_of(__name__)


@dataclass(frozen=True)
class Filling:
    """The tokens that a load fetches, by group."""

    need: dict[str, Spans]
    partial: dict[str, range]
    """Blocks that receive only their last tokens, or none, by index in the block table."""
    held_from: int
    """The load fills every cell of its blocks from this token on."""


def filling(
    groups: Iterable[Group],
    tables: Mapping[str, BlockTable],
    need: Mapping[str, Spans],
    num_tokens: int,
    num_kept: Mapping[str, int],
    held_from: int | None,
) -> Filling:
    """Load whole blocks if the source holds all tokens from ``held_from`` on; else list the partial ones.

    ``num_kept``: first tokens that are already here, by group. A window of 60 tokens needs 50 of the second
    block's 64 tokens:

    >>> window, table = Group("window", 9, 64, window=60), {"window": BlockTable.of([HOLE, 4, 7])}
    >>> need = {"window": (Span(78, 138),)}
    >>> filling([window], table, need, 138, {"window": 0}, held_from=64).need
    {'window': (Span(start=64, stop=138),)}
    >>> filling([window], table, need, 138, {"window": 0}, held_from=65).partial
    {'window': range(1, 2)}
    """
    wanted, partial, oldest = dict(need), dict[str, range](), 0
    for group in groups:
        if group.addressing is not Addressing.TABLE:
            continue
        size = group.tokens_per_block
        first = _first_own_block(tables[group.name], -(-num_kept[group.name] // size))
        # If a chunk of local attention begins right after the loaded tokens, it needs none of them.
        start = need[group.name][0].start if need[group.name] else num_tokens
        if first * size >= start:
            continue
        if held_from is not None and first * size >= held_from:
            wanted[group.name] = (Span(first * size, num_tokens),)
        else:
            partial[group.name], oldest = range(first, -(-start // size)), max(oldest, start)
    return Filling(wanted, partial, oldest)


def _first_own_block(table: BlockTable, first: int) -> int:
    own = np.flatnonzero(table.block_ids[first:] != HOLE)
    return first + int(own[0]) if own.size else len(table.block_ids)


_COUNTED = re.compile(r"renderer\d+-mm-\d+-")
"""In the name of a multimodal item that vLLM names by a counter instead of its content: it does so without
prefix caching and with ``--mm-processor-cache-gb 0``, unless the client names the item."""
UNIDENTIFIED = (
    "its prompt has embeddings or unidentified images: images need prefix caching,"
    " --mm-processor-cache-gb above 0, or names of the client's own"
)


def is_identified(request: Request) -> bool:
    """Whether a digest identifies the prompt; false for prompts given as embeddings."""
    are_named = not any(_COUNTED.search(feature.identifier) for feature in request.mm_features or ())
    return request.prompt_token_ids is not None and request.prompt_embeds is None and are_named


MAX_ADAPTERS = 4096


class Adapters:
    """Identities of LoRA adapters. An adapter's files are read once, at its first use."""

    def __init__(self, *, is_unchecked: bool = False) -> None:
        """``is_unchecked``: identify an adapter by its name if its content cannot be read."""
        self._is_unchecked = is_unchecked
        self._known: dict[tuple[int, str], str] = {}

    def identity(self, adapter: LoRARequest) -> str:
        """Equal on both sides for one adapter. Later changes to its files do not affect a loaded adapter."""
        key = (adapter.lora_int_id, adapter.lora_path)
        if key not in self._known or adapter.load_inplace:
            if len(self._known) >= MAX_ADAPTERS:
                self._known.pop(next(iter(self._known)))
            self._known[key] = self._read(adapter)
        return self._known[key]

    def _read(self, adapter: LoRARequest) -> str:
        try:
            return f"content {adapter_digest(_adapter_folder(adapter.lora_path))}"
        except SpecError as error:
            if not self._is_unchecked:
                raise
            log.warning("LoRA adapter %s is compared by its name only: %s", adapter.lora_name, error)
            return f"name {adapter.lora_name}"


def _adapter_folder(path: str) -> Path:
    """An adapter's folder on this host. A worker loads the adapter, so nothing is downloaded here."""
    try:
        here = Path(path).expanduser()
        if here.is_absolute() or here.exists():
            return here
        return Path(snapshot_download(path, local_files_only=True))
    except (OSError, RuntimeError, ValueError) as error:
        detail = f"the LoRA adapter {path} is neither a folder nor in this host's Hugging Face cache: {error}"
        raise SpecError(detail) from error


NULL_BLOCK = 0
"""vLLM's null block: a hole in a block table."""

BlockIds = Sequence[Sequence[int]]
"""vLLM's block ids, a list per group."""


class Groups:
    """The KV cache groups of an engine whose blocks are transferred."""

    def __init__(self, vllm_config: VllmConfig, config: KVCacheConfig) -> None:
        self._config = config
        dcp_size = vllm_config.parallel_config.decode_context_parallel_size
        self._groups = {i: describe_group(config, i, dcp_size) for i in config.transfer_group_ids}
        self.has_state = any(g.addressing is Addressing.SLOT for g in self._groups.values())
        """Whether some group keeps one recurrent state per request, valid after its last token only."""
        self.has_window = any(group.window for group in self._groups.values())
        tables = [group for group in self._groups.values() if group.addressing is Addressing.TABLE]
        self.has_one_table = len(tables) == 1 and not self.has_window
        """Whether the tokens that vLLM has found for one group with blocks are those of all such groups."""
        # vLLM recomputes the last token of a fully loaded prompt. A state would take that step twice, and a
        # window may have lost the oldest token that the step needs, on both sides.
        num_unsafe = int(self.has_state or self.has_window)
        self.num_left_out = max(num_unsafe, vllm_config.num_prefill_lookahead_tokens - 1)
        """How many last tokens of a prompt the decoding engine computes itself."""
        self.num_unfinished = max(0, vllm_config.num_prefill_lookahead_tokens - 1)
        """How many last tokens of a chunk the draft model's later modules rewrite with the next chunk."""
        self.early = frozenset(
            group.name
            for group in self._groups.values()
            if group.addressing is Addressing.TABLE and not group.window
        )
        """Groups that keep all of their tokens: they can be read while a prompt is computed."""

    def num_loadable(self, num_prompt: int) -> int:
        return max(0, num_prompt - self.num_left_out)

    def tables(self, block_ids: BlockIds, num_tokens: int) -> dict[str, BlockTable]:
        """Block tables of a request's first tokens: null blocks become holes, a state has one slot."""
        tables = {}
        for index, group in self._groups.items():
            spec, ids = spec_of_group(self._config, index), list(block_ids[index])
            if isinstance(spec, MambaSpec):
                # With prefix caching there is a slot per block of tokens, followed by scratch slots.
                at = 0 if spec.mamba_cache_mode == "none" else (num_tokens - 1) // spec.block_size
                ids = ids[at : at + 1]
            holes = [HOLE if block == NULL_BLOCK else block for block in ids]
            tables[group.name] = BlockTable.of(holes)
        return tables

    def filling(
        self, tables: Mapping[str, BlockTable], num_tokens: int, num_kept: int, held_from: int | None
    ) -> Filling:
        """What to load to continue after ``num_tokens``; vLLM has the first ``num_kept`` in its cache."""
        kept = {group.name: self._num_kept(index, num_kept) for index, group in self._groups.items()}
        need = {
            group.name: needed_tokens(self._config, index, num_tokens, kept[group.name])
            for index, group in self._groups.items()
        }
        return filling(self._groups.values(), tables, need, num_tokens, kept, held_from)

    def _num_kept(self, index: int, num_kept: int) -> int:
        """The tokens of a prefix hit that a group has: none if vLLM never caches its blocks."""
        return num_kept if is_prefix_cached(self._config.kv_cache_groups[index].kv_cache_spec) else 0

    def held_from(self, tables: Mapping[str, BlockTable], num_tokens: int) -> int:
        return held_from(self._groups.values(), tables, num_tokens)

    def check_reuse(self) -> None:
        """Raise SpecError if vLLM's lookup would hit blocks that are kept out of the prefix cache.

        It (0.32) rounds the start of the last chunk down to a block, and takes all earlier blocks as cached.
        """
        for index, num_tokens in self.windows.items():
            spec = spec_of_group(self._config, index)
            if isinstance(spec, ChunkedLocalAttentionSpec) and spec.attention_chunk_size % num_tokens:
                raise SpecError(
                    f"attention chunks of {spec.attention_chunk_size} tokens are not a multiple of the block"
                    f" size of {num_tokens} tokens: vLLM's prefix caching then reuses blocks that it does not"
                    " have. Set --block-size to a divisor of the chunk size, or use"
                    " --no-enable-prefix-caching"
                )

    def by_index(self, partial: Mapping[str, range]) -> dict[int, int]:
        """The index after the last partial block, by vLLM's group index."""
        return {index: partial[g.name].stop for index, g in self._groups.items() if g.name in partial}

    @property
    def windows(self) -> dict[int, int]:
        """Tokens per block of the groups with windows, by vLLM's group index."""
        return {index: group.tokens_per_block for index, group in self._groups.items() if group.window}

    def kept(self, num_kept: int) -> dict[str, Spans]:
        """The tokens that are already here. Their blocks are shared with other requests and never written."""
        return {
            group.name: (Span(0, count),) if (count := self._num_kept(index, num_kept)) else ()
            for index, group in self._groups.items()
            if group.addressing is not Addressing.SLOT
        }


def digest(request: Request, num_tokens: int, adapters: Adapters) -> bytes:
    """A digest of the inputs of a request's first tokens: token ids, multimodal items, adapter and salt."""
    token_ids = array("q", (request.prompt_token_ids or [])[:num_tokens])
    hasher = hashlib.blake2b(token_ids.tobytes(), digest_size=16)
    for feature in request.mm_features:
        if feature.mm_position.offset < num_tokens:
            hasher.update(f"\0{feature.identifier}@{feature.mm_position.offset}".encode())
    hasher.update(_extra(request, adapters))
    return hasher.digest()


def digest_parts_of(request: Request, num_tokens: int, adapters: Adapters) -> bytes:
    """Digests of growing prefixes of a request, prompt and answer, to compare two requests."""
    marks: dict[int, bytes] = {}
    for feature in request.mm_features:  # two may start at one token: a video's audio and frames
        at = feature.mm_position.offset
        marks[at] = marks.get(at, b"") + f"\0{feature.identifier}".encode()
    return digest_parts(request.all_token_ids[:num_tokens], _extra(request, adapters), marks)


def _extra(request: Request, adapters: Adapters) -> bytes:
    """The inputs besides the prompt. As in vLLM, prompts with different salts share nothing."""
    extra = b""
    if request.lora_request is not None:
        extra += f"\0lora {adapters.identity(request.lora_request)}".encode()
    if request.cache_salt:
        extra += f"\0salt {request.cache_salt}".encode()
    return extra
