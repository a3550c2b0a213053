"""Add the flags of the installed vLLM to those that ``kvferry plan`` knows without it (cli/serve_flags.json).

Run it in the environment of each supported version: python tools/serve_flags.py
"""

import json
import textwrap
from pathlib import Path

from kvferry.integrations.known_vllm import installed_flags

FILE = Path(__file__).parents[1] / "src" / "kvferry" / "cli" / "serve_flags.json"


def merged(known: dict[str, list[str]], more: dict[str, list[str]]) -> dict[str, list[str]]:
    """Both, each flag once with all of its spellings."""
    found: dict[str, dict[str, dict[str, None]]] = {}
    for table in (known, more):
        for arity, flags in table.items():
            for words in map(str.split, flags):
                long = [word for word in words if word.startswith("--")]
                found.setdefault(arity, {}).setdefault(long[0], {}).update(dict.fromkeys((*long, *words)))
    return {
        arity: [" ".join(flags[name]) for name in sorted(flags)] for arity, flags in sorted(found.items())
    }


def as_text(table: dict[str, list[str]]) -> str:
    """The table as JSON, several flags on a line."""
    blocks = []
    for arity, flags in table.items():
        words = ", ".join(json.dumps(flag).replace(" ", "\0") for flag in flags)
        lines = textwrap.fill(words, 116, break_long_words=False, break_on_hyphens=False).replace("\0", " ")
        blocks.append(f"{json.dumps(arity)}: [\n{textwrap.indent(lines, '  ')}\n ]")
    return "{\n " + ",\n ".join(blocks) + "\n}\n"


if __name__ == "__main__":
    known = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    FILE.write_text(as_text(merged(known, installed_flags())), encoding="utf-8")
