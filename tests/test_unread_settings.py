"""What was set for vLLM's own connector is not ignored without a word."""

import ast
from pathlib import Path

import pytest

from kvferry.integrations.known_vllm import unread_settings

CONNECTOR = Path(__file__).parents[1] / "src" / "kvferry" / "integrations" / "vllm" / "connector.py"
HOST, PORT = "VLLM_NIXL_SIDE_CHANNEL_HOST", "VLLM_NIXL_SIDE_CHANNEL_PORT"


@pytest.mark.parametrize("names", [[HOST], [PORT], [HOST, PORT]])
def test_a_variable_that_is_not_read_is_named_with_what_is(names):
    said = unread_settings(dict.fromkeys(names, "5600"))
    assert said.startswith(f"{', '.join(names)}: set, but not read")
    assert "listen (tcp://HOST:PORT)" in said
    assert "advertise (HOST)" in said


def test_without_them_nothing_is_said():
    assert unread_settings({"VLLM_HOST_IP": "10.0.0.7", "UCX_TLS": "tcp"}) == ""


def test_the_connector_says_it_once_in_its_scheduler():
    """Read from its source: only a process with vLLM can import it."""
    (start,) = (
        node
        for node in ast.walk(ast.parse(CONNECTOR.read_bytes()))
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    )
    (branch,) = (
        node for node in ast.walk(start) if isinstance(node, ast.If) and "SCHEDULER" in ast.unparse(node.test)
    )
    assert "unread_settings(os.environ)" in "\n".join(map(ast.unparse, branch.body))
    assert ast.unparse(start).count("unread_settings") == 1
