"""An engine by the command that starts it: ``vllm serve MODEL --tensor-parallel-size 4 …`` as a topology."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvferry.errors import SpecError

KEYS = {
    "tensor-parallel-size": "tp",
    "tp": "tp",
    "pipeline-parallel-size": "pp",
    "pp": "pp",
    "block-size": "block",
    "num-gpu-blocks-override": "blocks",
    "kv-cache-dtype": "dtype",
}
"""Flags of vLLM, and the keys of a topology that say the same."""

VARIABLES = {"VLLM_KV_CACHE_LAYOUT": "layout", "VLLM_SSM_CONV_STATE_LAYOUT": "conv"}
"""Environment variables of vLLM, and the keys of a topology that say the same."""

DECIDING = {
    "config": "write its settings as flags",
    "hf-overrides": "drop the flag, and name a folder with the changed config.json as the model",
    "speculative-config": "name model and draft with --src-model or --dst-model, as MODEL+DRAFT",
    "decode-context-parallel-size": "dump the engine's manifest, and give the file",
    "dcp": "dump the engine's manifest, and give the file",
    "prefill-context-parallel-size": "dump the engine's manifest, and give the file",
    "pcp": "dump the engine's manifest, and give the file",
    "kv-cache-dtype-skip-layers": "dump the engine's manifest, and give the file",
    "mamba-cache-dtype": "dump the engine's manifest, and give the file",
    "mamba-ssm-cache-dtype": "dump the engine's manifest, and give the file",
    "mamba-block-size": "dump the engine's manifest, and give the file",
}
"""Flags that can change what the cache looks like, and that nobody here follows; and what to do instead."""

OF_MODEL = {
    "disable-sliding-window": "disable-sliding-window",
    "quantization": "quantization",
    "q": "quantization",
}
"""Flags that change a model's numbers, and not where they are. Engines that differ in them are refused."""

READ = {"model", "dtype", *KEYS, *DECIDING, *OF_MODEL, "kv-transfer-config"}
"""Flags that are looked at, and the one that names the connector; the others are ignored, and named."""

HARMLESS_VALUES = {"auto", "1"}

DTYPES = {"half": "fp16", "float16": "fp16", "bfloat16": "bf16", "float": "fp32", "float32": "fp32"}
"""What vLLM calls the dtypes of a model, and what we call them."""

CACHE_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "auto"}
"""Our names of dtypes, and what vLLM's --kv-cache-dtype calls them: it has no float32 but a model's own."""

WITHOUT_A_CACHE = {"ngram", "[ngram]", "ngram_gpu"}
"""Ways to draft tokens without a model, so that nothing is added to the cache."""

STARTERS = re.compile(
    r"(?<!\S)(?:\S*/)?(?:vllm\s+serve"
    r"|python[\d.]*\s+-m\s+vllm\.entrypoints\.(?:openai\.api_server|cli\.main\s+serve))(?!\S)"
)
"""The words that start an engine, in all their spellings."""


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """What a command that starts vLLM says of the cache.

    >>> ServeCommand.read("VLLM_KV_CACHE_LAYOUT=NHD vllm serve gpt2 -tp 4 --port=80")
    ServeCommand(model='gpt2', topology='layout=NHD,tp=4', model_flags=(), dtype='', ignored=('--port',))
    """

    model: str
    topology: str
    model_flags: tuple[tuple[str, str], ...] = ()
    """Flags that make another model of it, with their values."""
    dtype: str = ""
    """The model's dtype, where the command names one; the cache has it, too, unless it is told otherwise."""
    ignored: tuple[str, ...] = ()
    """Flags that say nothing of the cache, as far as is known here."""

    @staticmethod
    def is_one(text: str) -> bool:
        """Whether a text is such a command.

        >>> ServeCommand.is_one("python3 -m vllm.entrypoints.openai.api_server --model m")
        True
        """
        return STARTERS.search(text) is not None

    @classmethod
    def read(cls, text: str) -> ServeCommand:
        """Read a command line; what it says of the cache and nobody here understands is refused by name."""
        try:
            words = shlex.split(_as_serve(text))
        except ValueError as error:
            raise SpecError(f"not a command line: {error}") from None
        at = words.index("serve")
        settings = dict(_of_variables(words[: at - 1]))
        flags = list(_flags(words[at + 1 :]))
        model = "" if at + 1 >= len(words) or words[at + 1].startswith("-") else words[at + 1]
        dtype = ""
        for flag, value in flags:
            if flag == "model":
                model = value
            elif flag == "dtype":
                dtype = _model_dtype(value)
            elif (instead := DECIDING.get(flag.partition(".")[0])) and not _is_harmless(flag, value):
                raise SpecError(f"--{flag} may change the cache, and is not understood here: {instead}")
            elif flag in KEYS and value == "auto":
                settings.pop(KEYS[flag], None)
            elif flag in KEYS:
                settings[KEYS[flag]] = value
        if not model:
            raise SpecError("name the model right behind `vllm serve`, or with --model")
        of_model = {OF_MODEL[flag]: value or "set" for flag, value in flags if flag in OF_MODEL}
        topology = ",".join(f"{key}={value}" for key, value in settings.items())
        return cls(model, topology, tuple(of_model.items()), dtype, _ignored(words[at + 1 :]))


def with_setting(text: str, key: str, value: str) -> str:
    """The command with one setting changed, or one more.

    >>> with_setting("vllm serve M -tp 2", "block", "64")
    'vllm serve M -tp 2 --block-size 64'
    >>> with_setting("vllm serve M --block_size=16 -tp 2", "block", "64")
    'vllm serve M --block-size 64 -tp 2'
    >>> with_setting("VLLM_KV_CACHE_LAYOUT=NHD vllm serve M", "layout", "HND")
    'VLLM_KV_CACHE_LAYOUT=HND vllm serve M'
    """
    text = _as_serve(text)
    for name, meaning in VARIABLES.items():
        if meaning == key:
            bare = re.sub(rf"\b{name}=\S*\s+", "", text)
            return re.sub(r"\bvllm(?=\s+serve\b)", f"{name}={value} vllm", bare, count=1)
    flags = "|".join(flag.replace("-", "[-_]") for flag, meaning in KEYS.items() if meaning == key)
    old = re.compile(rf"(?<!\S)--?(?:{flags})(?:=|\s+)\S+")
    new = vllm_setting(key, value)
    return old.sub(new, text) if old.search(text) else f"{text} {new}"


def vllm_setting(key: str, value: str) -> str:
    """What vLLM calls a setting of a topology; empty if it has no such setting.

    >>> vllm_setting("block", "64"), vllm_setting("layout", "HND"), vllm_setting("alloc", "shared")
    ('--block-size 64', 'VLLM_KV_CACHE_LAYOUT=HND', '')
    >>> vllm_setting("dtype", "bf16")
    '--kv-cache-dtype bfloat16'
    """
    for name, meaning in VARIABLES.items():
        if meaning == key:
            return f"{name}={value}"
    for flag, meaning in KEYS.items():
        if meaning == key:
            return f"--{flag} {CACHE_DTYPES.get(value, value) if key == 'dtype' else value}"
    return ""


def _as_serve(text: str) -> str:
    """The command as ``vllm serve …``.

    >>> _as_serve("A=1 python3 -m vllm.entrypoints.openai.api_server --model m")
    'A=1 vllm serve --model m'
    """
    return STARTERS.sub("vllm serve", text, count=1)


def _model_dtype(name: str) -> str:
    if name not in DTYPES and name != "auto":
        raise SpecError(f"--dtype {name}: vLLM has auto, {', '.join(DTYPES)}")
    return DTYPES.get(name, "")


def _is_harmless(flag: str, value: str) -> bool:
    """Whether the cache is the same with this value of a flag as without the flag."""
    if flag != "speculative-config":
        return value in HARMLESS_VALUES
    try:
        draft = json.loads(value)
    except ValueError:
        return False
    return isinstance(draft, dict) and (draft.get("method") or draft.get("model")) in WITHOUT_A_CACHE


def _of_variables(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    for word in words:
        name, _, value = word.partition("=")
        if name in VARIABLES and value:
            yield VARIABLES[name], value


def _ignored(words: Sequence[str]) -> tuple[str, ...]:
    """The flags that nobody here reads, as they were written.

    >>> _ignored(["-tp", "2", "--port=80", "-O3", "--seed", "-1", "--kv_cache_dtype", "fp8"])
    ('--port', '-O3', '--seed')
    """
    written = (word.partition("=")[0] for word in words if re.match("--?[A-Za-z]", word))
    unread = (flag for flag in written if _plain(flag).partition(".")[0] not in READ)
    return tuple(dict.fromkeys(unread))


def _plain(flag: str) -> str:
    return flag.lstrip("-").replace("_", "-")


def _flags(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each flag with the value behind it, if it has one."""
    for at, word in enumerate(words):
        if word.startswith("-"):
            flag, _, value = word.partition("=")
            follows = words[at + 1] if at + 1 < len(words) and not words[at + 1].startswith("-") else ""
            yield _plain(flag), value or follows
