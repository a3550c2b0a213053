"""From the command that starts an engine, ``vllm serve MODEL --tensor-parallel-size 4 …``, to a topology."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Any, NoReturn

from kvferry.errors import SpecError
from kvferry.integrations.known_vllm import installed_flags, is_installed, unknown_options

KEYS = {
    "tensor-parallel-size": "tp",
    "tp": "tp",
    "pipeline-parallel-size": "pp",
    "pp": "pp",
    "block-size": "block",
    "num-gpu-blocks-override": "blocks",
    "kv-cache-dtype": "dtype",
}
"""vLLM's flags -> keys of a topology."""

VARIABLES = {
    "VLLM_KV_CACHE_LAYOUT": "layout",
    "VLLM_SSM_CONV_STATE_LAYOUT": "conv",
    "VLLM_PP_LAYER_PARTITION": "pp",
}
"""vLLM's environment variables -> keys of a topology."""

DUMP = "dump the engine's manifest and pass the file"
DECIDING = {
    "config": "write its settings as flags",
    **dict.fromkeys(
        ("hf-overrides", "hf-config-path"),
        "drop the flag, and name a folder with the changed config.json as the model",
    ),
    **dict.fromkeys(
        ("speculative-config", "spec-method", "spec-model", "spec-tokens"),
        "drop the flag, and name model and draft with --src-model or --dst-model, as MODEL+DRAFT",
    ),
    **dict.fromkeys(("decode-context-parallel-size", "prefill-context-parallel-size"), DUMP),
    **dict.fromkeys(("kv-cache-dtype-skip-layers", "attention-config", "model-impl"), DUMP),
    **dict.fromkeys(("mamba-cache-dtype", "mamba-ssm-cache-dtype", "mamba-block-size"), DUMP),
    **dict.fromkeys(("mamba-cache-mode", "use-replayssm", "disable-hybrid-kv-cache-manager"), DUMP),
}
"""Unsupported flags that can change the cache layout -> what to do instead."""

BACKENDS = {
    **dict.fromkeys(("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "TRITON_MLA", "FLASH_ATTN_MLA"), 0),
    **dict.fromkeys(("FLASHINFER_MLA", "TOKENSPEED_MLA"), 32),
    "FLASHMLA": 64,
    "CUTLASS_MLA": 128,
}
"""Attention backends with a topology's cache layout -> vLLM's block size for them; 0: the model's."""

DECIDING_VARIABLES = {
    "VLLM_ATTENTION_BACKEND": "write it as --attention-backend",
    "VLLM_MLA_DISABLE": DUMP,
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT": DUMP,
}
"""Unsupported environment variables of vLLM that can change the cache -> what to do instead."""

OF_MODEL = ("disable-sliding-window", "quantization", "quantization-config", "video-pruning-rate")
"""Flags that change a model's numbers, but not the cache layout. Engines that differ in them are rejected."""

READ = {"model", "dtype", "max-model-len", "attention-backend", "kv-transfer-config"}
"""Other supported flags. The rest of vLLM's flags do not change the cache; they are reported as ignored."""

HARMLESS_VALUES = {"auto", "1", "vllm", "false"}
OF_CACHE = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")
"""Supported values of --kv-cache-dtype. vLLM's other values also store scales."""

DTYPES = {"half": "fp16", "float16": "fp16", "bfloat16": "bf16", "float": "fp32", "float32": "fp32"}
"""vLLM's names of model dtypes -> ours."""

CACHE_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "auto"}
"""Our names of dtypes -> values of --kv-cache-dtype, which has float32 only as the model's own."""

WITHOUT_A_CACHE = {"ngram", "[ngram]", "ngram_gpu"}
"""Speculative methods without a draft model, which add nothing to the cache."""

STARTERS = re.compile(
    r"(?<!\S)(?:\S*/)?(?:vllm\s+serve"
    r"|python[\d.]*\s+-m\s+vllm\.entrypoints\.(?:openai\.api_server|cli\.main\s+serve)"
    r"|vllm/vllm-openai\S*(?!.*\bvllm\s+serve\b))(?!\S)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class ServeCommand:
    """The settings in a vLLM command that affect the cache.

    >>> ServeCommand.read("VLLM_KV_CACHE_LAYOUT=NHD vllm serve gpt2 --tensor-par 4 --port=80")
    ServeCommand(model='gpt2', topology='tp=4,layout=NHD', model_flags=(), dtype='', ignored=('--port',), ...)
    >>> ServeCommand.read("vllm serve gpt2 --tensor-paralel 4")
    Traceback (most recent call last):
    kvferry.errors.SpecError: unknown vLLM flag --tensor-paralel; did you mean --tensor-parallel-size?
    """

    model: str
    topology: str
    model_flags: tuple[tuple[str, str], ...] = ()
    """Flags that change the model's numbers, with their values."""
    dtype: str = ""
    """The model's dtype, if the command sets it; also the default dtype of the cache."""
    ignored: tuple[str, ...] = ()
    """Flags of vLLM that do not change the cache."""
    max_model_len: int = 0
    """The longest request, in tokens; 0: the model's."""
    connector: Mapping[str, Any] = field(default_factory=dict)
    """``--kv-transfer-config``."""
    attention_backend: str = ""

    @staticmethod
    def is_one(text: str) -> bool:
        """Whether a text is a command that starts vLLM.

        >>> ServeCommand.is_one("python3 -m vllm.entrypoints.openai.api_server --model m")
        True
        """
        return STARTERS.search(text) is not None

    @classmethod
    def read(cls, text: str) -> ServeCommand:
        """Parse a command line as vLLM does; raises SpecError for unknown and unsupported flags."""
        try:
            words = shlex.split(_as_serve(text))
        except ValueError as error:
            raise SpecError(f"not a command line: {error}") from None
        at = words.index("serve")
        flags = given_flags(words[at + 1 :])
        model = flags.pop("model-tag", "") or flags.get("model")
        if not model:
            raise SpecError("pass the model right after `vllm serve`, or with --model")
        for flag, instead in DECIDING.items():
            if flag in flags and not _is_harmless(flag, flags[flag]):
                raise SpecError(f"--{flag} may change the cache, and is not supported: {instead}")
        if (dtype := flags.get("kv-cache-dtype", "auto")) not in OF_CACHE:
            raise SpecError(f"--kv-cache-dtype {dtype}: its cache layout is unknown: {DUMP}")
        backend = flags.get("attention-backend", "auto").upper()
        settings = {KEYS[flag]: value for flag, value in flags.items() if flag in KEYS}
        if settings.get("dtype") == "auto":
            del settings["dtype"]
        if block := _backend_block(backend):
            settings.setdefault("block", str(block))
        settings |= _of_variables(words[: at - 1], settings.get("pp", "1"))
        unread = flags.keys() - {*READ, *KEYS, *DECIDING, *OF_MODEL}
        connector, other = _connector(flags.get("kv-transfer-config", "{}"))
        note = (f"--kv-transfer-config ({other}; planned as KVFerryConnector)",) if other else ()
        return cls(
            model,
            ",".join(f"{key}={value}" for key, value in settings.items()),
            tuple((flag, flags[flag]) for flag in OF_MODEL if flags.get(flag, "false") != "false"),
            _model_dtype(flags.get("dtype", "auto")),
            note
            + tuple(
                f"--no-{flag}" if flags[flag] == "false" else f"--{flag}" for flag in flags if flag in unread
            ),
            _num_tokens(flags.get("max-model-len", "auto")),
            connector,
            "" if backend == "AUTO" else backend,
        )


def with_setting(text: str, key: str, value: str) -> str:
    """The command with one setting changed or added.

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
    """A topology's setting as vLLM's flag or variable; empty if vLLM has none.

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
    """The command as ``vllm serve …``, on one line.

    >>> _as_serve("A=1 python3 -m vllm.entrypoints.openai.api_server --model m")
    'A=1 vllm serve --model m'
    """
    return STARTERS.sub("vllm serve", text.replace("\\\n", " "), count=1)


def _model_dtype(name: str) -> str:
    if name not in DTYPES and name != "auto":
        raise SpecError(f"--dtype {name}: vLLM accepts auto, {', '.join(DTYPES)}")
    return DTYPES.get(name, "")


def _is_harmless(flag: str, value: str) -> bool:
    """Whether this value of a flag leaves the cache unchanged."""
    if flag != "speculative-config":
        return value in HARMLESS_VALUES
    try:
        draft = json.loads(value)
    except ValueError:
        return False
    return isinstance(draft, dict) and (draft.get("method") or draft.get("model")) in WITHOUT_A_CACHE


def _backend_block(name: str) -> int:
    if name != "AUTO" and name not in BACKENDS:
        raise SpecError(f"--attention-backend {name}: its cache layout is unknown: {DUMP}")
    return BACKENDS.get(name, 0)


def _num_tokens(text: str) -> int:
    """A number as vLLM parses it; 0 for the model's own.

    >>> _num_tokens("32k"), _num_tokens("1.5K"), _num_tokens("auto")
    (32000, 1536, 0)
    """
    if text in ("auto", "-1"):
        return 0
    if not (found := re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG]?)", text)):
        raise SpecError(f"--max-model-len {text}: not a number of tokens")
    number, unit = found.groups()
    return int(float(number) * (1000 if unit.islower() else 1024) ** " kmg".index(unit.lower() or " "))


def _connector(text: str) -> tuple[Mapping[str, Any], str]:
    """The settings of kvferry's connector, alone or inside MultiConnector; else the other's role and name."""
    try:
        found: dict[str, Any] = json.loads(text)
        inner = found.get("kv_connector_extra_config") or {}
        for each in (found, *inner.get("connectors", ())):
            if "kvferry" in f"{each.get('kv_connector')} {each.get('kv_connector_module_path')}".lower():
                if unknown := unknown_options(each.get("kv_connector_extra_config") or {}):
                    raise SpecError(f"--kv-transfer-config: {unknown}")
                return {**found, **each}, ""
        return {"kv_role": found.get("kv_role")}, str(found.get("kv_connector") or "")
    except (ValueError, TypeError, AttributeError) as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(f"--kv-transfer-config is not the JSON that vLLM expects: {error}") from None


def _of_variables(words: Sequence[str], num_stages: str) -> dict[str, str]:
    for name in VARIABLES.keys() & set(words):
        raise SpecError(f"the value of {name} comes from the environment: write {name}=VALUE")
    matches = (re.fullmatch(r"(?:--env=|-e)?(\w+)=(.+?);?", word, re.DOTALL) for word in words)
    given = {found[1]: found[2] for found in matches if found}
    for name, instead in DECIDING_VARIABLES.items():
        if given.get(name, "0").lower() not in ("0", "false"):
            raise SpecError(f"{name}={given[name]} may change the cache, and is not supported: {instead}")
    stages = given.get("VLLM_PP_LAYER_PARTITION", "")
    if stages and str(stages.count(",") + 1) != num_stages:
        raise SpecError(
            f"VLLM_PP_LAYER_PARTITION={stages} does not match --pipeline-parallel-size {num_stages}:"
            " vLLM does not start"
        )
    return {VARIABLES[name]: value.replace(",", "+") for name, value in given.items() if name in VARIABLES}


class _FlagParser(argparse.ArgumentParser):
    """A parser of vLLM's flags: values stay text, and absent flags have no attribute."""

    def __init__(self, table: Mapping[str, Sequence[str]]) -> None:
        super().__init__(add_help=False, argument_default=argparse.SUPPRESS)
        self.add_argument("model_tag", nargs="?", action=_Given)
        self.add_argument("-O", dest="optimization_level", action=_Given)
        for arity, flags in table.items():
            nargs = {"0": 0, "1": None}.get(arity, arity)
            for flag in flags:
                self.add_argument(*flag.split(), nargs=nargs, action=_Given)

    def error(self, message: str) -> NoReturn:
        raise SpecError(message)


class _Given(argparse.Action):
    def __call__(
        self, parser: object, given: argparse.Namespace, values: Any, flag: str | None = None
    ) -> None:
        if self.nargs == 0:
            first = self.option_strings[0]
            values = "false" if flag and flag.startswith("--") and flag != first else "true"
        setattr(given, self.dest, " ".join(values) if isinstance(values, list) else values)


@cache
def _parser() -> _FlagParser:
    text = files("kvferry.cli").joinpath("serve_flags.json").read_text(encoding="utf-8")
    return _FlagParser(json.loads(text))


@cache
def _installed_parser() -> _FlagParser | None:
    """A parser of the installed vLLM's flags; None if vLLM is not installed."""
    return _FlagParser(installed_flags()) if is_installed() else None


def given_flags(words: Sequence[str]) -> dict[str, str]:
    """The flags of ``vllm serve`` in these words, by full name, with their values.

    As in vLLM, flags may be abbreviated, have underscores, or be written as ``--flag.key value``.

    >>> given_flags(["m", "--tensor-par", "4", "--kv_cache_dtype=fp8", "--attention-config.backend", "X"])
    {'model-tag': 'm', 'tensor-parallel-size': '4', 'kv-cache-dtype': 'fp8',
     'attention-config': '{"backend": "X"}'}
    """
    plain = list(_plain(words))
    given, rest = _parser().parse_known_args(plain)
    if rest and (installed := _installed_parser()):
        given, rest = installed.parse_known_args(plain)
    for word in rest:
        close = get_close_matches(word.partition("=")[0], _parser()._option_string_actions, n=1, cutoff=0.75)
        raise SpecError(f"unknown vLLM flag {word}" + (f"; did you mean {close[0]}?" if close else ""))
    return {name.replace("_", "-"): value for name, value in vars(given).items()}


def _plain(words: Sequence[str]) -> Iterator[str]:
    """The words with dashes in flags, and the dotted flags merged to one JSON object per flag."""
    objects: dict[str, dict[str, Any]] = {}
    left = iter(words)
    for word in left:
        found = re.fullmatch(r"(--?[A-Za-z][\w-]*)(?:\.([\w.+-]+))?(=.*)?", word, re.DOTALL)
        if not found:
            yield word
            continue
        flag, keys, value = found.group(1).replace("_", "-"), found.group(2), found.group(3)
        if not keys:
            yield f"{flag}{value or ''}"
            continue
        *above, key = keys.split(".")
        inner = objects.setdefault(flag, {})
        for name in above:
            inner = inner.setdefault(name, {})
        inner[key] = _json_or_text(value[1:] if value else next(left, ""))
    for flag, given in objects.items():
        yield from (flag, json.dumps(given))


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text
