"""The examples run; and what the page for authors of engines says is true of the code."""

import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.processes import FABRICS
from kvferry.runtime import Timing
from tests.two_hosts import Host, two_hosts

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "engine.md").read_text(encoding="utf-8")


def test_two_processes():
    pytest.importorskip("nixl", exc_type=ImportError)
    example = ROOT / "examples" / "two_processes.py"
    ran = subprocess.run([sys.executable, example], capture_output=True, text=True, check=False, timeout=120)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "409600 bytes in 1600 runs; 409600 in place" in ran.stdout
    assert "the blocks of request-1 were released (read)" in ran.stdout


def own_cache(*words: object, **settings: Any) -> subprocess.Popen[str]:
    argv = [sys.executable, str(ROOT / "examples" / "own_cache.py"), *map(str, words)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings)


def move_own_cache(folder: Path, source: Host | None, reader: Host | None, **environment: str) -> str:
    """Both sides of the example, as its head tells people to start them; what the reader printed."""
    pytest.importorskip("nixl", exc_type=ImportError)
    env, ticket, secret = os.environ | environment, folder / "ticket.txt", folder / "kvferry.secret"
    words: list[object] = ["--ticket", ticket]
    listen: list[object] = []
    if source is not None:
        subprocess.run([sys.executable, "-m", "kvferry", "keygen", "-o", secret], check=True, timeout=60)
        words, listen = [*words, "--secret", secret], ["--listen", f"tcp://{source.address}:*"]
    offering = own_cache("offer", *words, *listen, env=env, preexec_fn=source and source.enter)
    assert offering.stdout
    assert offering.stdout.readline().startswith("offered at tcp://")
    fetching = own_cache("fetch", *words, env=env, preexec_fn=reader and reader.enter)
    printed, errors = fetching.communicate(timeout=120)
    assert fetching.returncode == 0, errors
    assert offering.communicate(timeout=60)[0] == "request-1 is released: read\n"
    return printed


def test_a_cache_of_ones_own_on_one_host(tmp_path):
    assert "409600 bytes in 3200 runs" in move_own_cache(tmp_path, None, None)


def test_a_cache_of_ones_own_into_two_ranks(tmp_path):
    pytest.importorskip("nixl", exc_type=ImportError)
    words = ("--ticket", tmp_path / "ticket.txt")
    offering = own_cache("offer", *words)
    assert offering.stdout
    assert offering.stdout.readline().startswith("offered at tcp://")
    ranks = [own_cache("fetch", *words, "--rank", rank, "--num-ranks", 2) for rank in range(2)]
    for fetching in ranks:
        printed, errors = fetching.communicate(timeout=120)
        assert fetching.returncode == 0, errors
        assert "loaded: 204800 bytes in 1600 runs" in printed
        assert "; 0 numbers wrong" in printed
    assert offering.communicate(timeout=60)[0] == "request-1 is released: read\n"


BETWEEN_HOSTS = {
    "default": {},
    "packed": FABRICS["tcp"],
    "nothing exposed": {"KVFERRY_EXPOSE": "nothing"},
    "a fabric that does not reach": {**FABRICS["cma"], "KVFERRY_WAY": "auto"},
}


@pytest.mark.parametrize("settings", BETWEEN_HOSTS.values(), ids=BETWEEN_HOSTS.keys())
def test_a_cache_of_ones_own_between_two_hosts(tmp_path, settings):
    with two_hosts() as (source, reader):
        printed = move_own_cache(tmp_path, source, reader, **settings)
    assert printed.splitlines()[-1] == "loaded: 409600 bytes in 3200 runs, packed; 0 numbers wrong"


def test_the_example_is_on_the_page():
    shown, *_ = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert "def prefill" in shown
    assert shown in (ROOT / "examples" / "two_processes.py").read_text(encoding="utf-8")


def test_every_knob_is_on_the_page():
    for knob in fields(Timing):
        assert f"| `{knob.name}` | {knob.default:g} |" in PAGE
