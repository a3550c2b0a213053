"""docs/cli.md: every command on it is run, and its output is what the page shows."""

import re
from pathlib import Path

import pytest

from kvferry.cli.app import COMMANDS
from kvferry.cli.options import TOPOLOGY_KEYS

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
SESSION = "\n".join(re.findall(r"^```console\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL))
EXAMPLES = [
    (command.split()[1:], shown)
    for command, shown in re.findall(r"^\$ (kvferry .*)\n((?:(?!\$ kvferry).*\n?)*)", SESSION, re.MULTILINE)
]
TIMES = re.compile(r"<?\d+(\.\d+)?(×| (ms|s|GB/s)\b)")
LEFT_OUT = "…"


def squeezed(text: str) -> list[str]:
    """The lines without what differs from run to run, and without the blanks and rules that follow it."""
    lines = (" ".join(TIMES.sub("TIME", line).split()) for line in text.splitlines())
    return [re.sub("─+", "─", line) for line in lines if line]


@pytest.fixture
def folder(cli, tmp_path, monkeypatch):
    """The files that the page makes and uses."""
    monkeypatch.chdir(tmp_path)
    (request,) = re.findall(r"^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "request.json").write_text(request)
    for argv, _ in EXAMPLES:
        if "-o" in argv:
            assert cli(*argv).code == 0


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("argv", "shown"), EXAMPLES, ids=[" ".join(argv) for argv, _ in EXAMPLES])
def test_the_output_on_the_page_is_real(cli, argv, shown):
    if argv == ["demo"] or argv[0] in ("bench", "doctor"):
        pytest.importorskip("nixl", exc_type=ImportError)
    ran = cli(*argv)
    found, expected = squeezed(ran.out + ran.err), squeezed(shown)
    if LEFT_OUT in expected:
        cut = expected.index(LEFT_OUT)
        tail = len(expected) - cut - 1
        found = [*found[:cut], LEFT_OUT, *found[len(found) - tail :]]
    assert found == expected


def test_every_command_is_on_the_page():
    assert {argv[0] for argv, _ in EXAMPLES} == COMMANDS.keys()


def test_every_option_is_on_the_page(cli):
    for command in COMMANDS:
        for option in re.findall(r"^  (?:-\w, )?(--[a-z-]+)", cli(command, "--help").out, re.MULTILINE):
            assert option in PAGE or option == "--help", f"{command} {option}"


def test_every_key_of_a_topology_is_on_the_page():
    for key, meaning in TOPOLOGY_KEYS.items():
        escaped = meaning.replace("|", "\\|")
        assert f"| `{key}` | {escaped} |" in PAGE


def keys_of(value):
    if isinstance(value, dict):
        return set(value) | {key for part in value.values() for key in keys_of(part)}
    return {key for part in value for key in keys_of(part)} if isinstance(value, list) else set()


@pytest.mark.parametrize(
    "words",
    [
        "plan --model gpt2 --src tp=2 --dst tp=3",
        "plan --model gpt2 --src tp=2 --dst dtype=fp8",
        "plan --model gpt2",
        "diff --model gpt2 tp=2 tp=3,layout=NHD",
        "models mamba2-2.7b",
        "demo --model gpt2 --src tp=1 --dst tp=1 --layers 1 --tokens 20 --requests 1",
    ],
)
def test_every_key_of_the_json_is_on_the_page(cli, words):
    if words.startswith("demo --model"):
        pytest.importorskip("nixl", exc_type=ImportError)
    answer = cli(*words.split(), "--json").answer
    named = {key for key in keys_of(answer) if key != "full" and not key.startswith("mamba (")}
    assert [key for key in sorted(named) if f"`{key}`" not in PAGE] == []
