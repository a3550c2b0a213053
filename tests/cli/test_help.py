"""Help that teaches, and is quick."""

import os
import subprocess
import sys
from dataclasses import fields

import pytest

import kvferry
from kvferry.cli.app import COMMANDS
from kvferry.cli.options import TOPOLOGY_KEYS
from kvferry.models import Topology


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_examples_that_are_its_own(cli, command):
    ran = cli(command, "--help")
    assert ran.code == 0
    assert "Examples:" in ran.out
    assert f"  kvferry {command}" in ran.out
    assert max(map(len, ran.out.splitlines())) <= 80


def test_every_key_of_a_topology_is_explained(cli):
    known = {field.name for field in fields(Topology)} - {"block_of"} | {"block.GROUP"}
    assert known == TOPOLOGY_KEYS.keys()
    for command in ("plan", "describe", "demo"):
        text = " ".join(cli(command, "--help").out.split())
        assert [key for key, meaning in TOPOLOGY_KEYS.items() if f"{key} {meaning}" not in text] == []


def test_the_list_of_commands(cli):
    ran = cli("--help")
    assert ran.code == 0
    assert [name for name in COMMANDS if f"\n  {name} " not in ran.out] == []
    assert cli() == ran  # help is what a bare `kvferry` asks for
    assert cli("--version").out == f"kvferry {kvferry.__version__}\n"


def test_help_imports_no_more_than_it_needs():
    probe = (
        "import sys, kvferry.cli; kvferry.cli.main(['plan', '--help']); print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert "typer" in loaded
    assert loaded.isdisjoint(
        {"numpy", "rich.table", "kvferry.models", "kvferry.wire", "msgspec", "hypothesis"}
    )


def test_a_poor_terminal_gets_question_marks():
    argv = [sys.executable, "-m", "kvferry", "plan", "--full", "--model", "gpt2", "--src", "tp=2"]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*argv, "--dst", "tp=3"], capture_output=True, text=True, check=True, env=env)
    assert "PROVED" in done.stdout
    assert "0 ? 0" in done.stdout


def test_the_package_runs():
    done = subprocess.run(
        [sys.executable, "-m", "kvferry", "models"], capture_output=True, text=True, check=True
    )
    assert "llama-3.1-70b" in done.stdout
