"""What the pages tell people to type is there: commands, options, variables; what is quick is run."""

import re
import shlex
from pathlib import Path

import pytest

from kvferry.cli.app import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    path.name: path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
}
CODE, TESTS = (
    "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / folder).rglob("*.py")))
    for folder in ("src", "tests")
)
TYPED = re.compile(r"(?:^ *\$ (?:\.venv/bin/)?|`)kvferry ([a-z]+)((?: [^`\n]*)?)", re.MULTILINE)
QUICK = {"plan", "models", "keygen"}
"""Commands that take no processes, no GPU and no minutes."""
NOT_COMMANDS = {"diff", "doctor", "status", "proxy"} - COMMANDS.keys()


def typed() -> list[tuple[str, str, str]]:
    """(page, command, arguments) of whatever begins with the name of our command."""
    found = [(page, *each) for page, text in PAGES.items() for each in TYPED.findall(text)]
    return [each for each in found if each[1] not in NOT_COMMANDS]


def whole() -> list[tuple[str, list[str]]]:
    """Quick commands in running text that can be run as they stand; test_snippets.py has those in blocks."""
    lines = [
        (page, [name, *shlex.split(rest)])
        for page, text in PAGES.items()
        for name, rest in re.findall(r"(?<!`)`kvferry ([a-z]+)((?: [^`\n]*)?)`", text)
        if name in QUICK and rest
    ]
    return [
        (page, argv) for page, argv in lines if not re.search(r"…|\.json|NAME|FILE|/run/|>", " ".join(argv))
    ]


def test_every_command_and_option_on_a_page_is_there(cli):
    helps = {name: cli(name, "--help").out for name in COMMANDS}
    assert len(typed()) > 40
    for page, name, rest in typed():
        assert name in COMMANDS, f"{page}: kvferry {name}"
        for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", rest):
            assert re.search(rf"{option}\b", helps[name]), f"{page}: kvferry {name} {option}"


@pytest.mark.parametrize(("page", "argv"), whole(), ids=" ".join)
def test_a_quick_command_on_a_page_runs(cli, page, argv, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli(*argv).code in (0, 1)


def test_some_commands_are_run():
    assert "operate.md" in {page for page, _ in whole()}


def test_every_variable_on_a_page_is_read_and_every_variable_that_is_read_is_on_a_page():
    read = set(re.findall(r"\"(KVFERRY_[A-Z_]+)\"", CODE))
    named = {name for text in PAGES.values() for name in re.findall(r"\bKVFERRY_[A-Z]+(?:_[A-Z]+)*", text)}
    assert {"KVFERRY_SECRET_FILE", "KVFERRY_WAY"} <= read
    assert read - named == set()
    assert {name for name in named - read if f'"{name}"' not in TESTS} == set()


def test_requirements_are_for_contributors():
    """Whoever uses kvferry need not know which document asked for what."""
    pages = {page for page, text in PAGES.items() if re.search(r"\bR00\d\b|requirements\.md", text)}
    assert pages <= {"CONTRIBUTING.md"}
