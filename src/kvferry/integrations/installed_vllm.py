"""The flags and config.json defaults of the installed vLLM. Importing vLLM takes seconds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def is_installed() -> bool:
    return find_spec("vllm") is not None


def installed_flags() -> dict[str, list[str]]:
    """The spellings of each ``vllm serve`` flag, by its number of values (1, 0, ?, +)."""
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    found: dict[str, list[str]] = defaultdict(list)
    for action in make_arg_parser(FlexibleArgumentParser())._actions:
        if action.option_strings:
            found["1" if action.nargs is None else str(action.nargs)].append(" ".join(action.option_strings))
    return dict(found)


def filled_config(folder: Path) -> Mapping[str, Any]:
    """A model's configuration with the defaults of its class, as engines compare it."""
    from vllm.transformers_utils.config import get_config

    values: Mapping[str, Any] = get_config(str(folder), trust_remote_code=False).to_dict()
    return values
