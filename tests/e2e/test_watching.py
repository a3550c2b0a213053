"""What an operator sees: metrics, a line per load, manifests for ``kvferry plan``, refusals that say why."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.harness import KVFERRY, PROMPTS, Nursery, ferry, prefill, until
from tests.e2e.needs import needs_vllm

pytestmark = [pytest.mark.slow, *needs_vllm]


def dumping(folder: Path) -> dict:
    return {**KVFERRY, "kv_connector_extra_config": {"dump": str(folder)}}


def kvferry(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvferry", *words], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def nursery(tmp_path_factory):
    with Nursery(tmp_path_factory.mktemp("logs")) as nursery:
        yield nursery


def test_a_pair_can_be_watched_and_compared(nursery, tmp_path):
    model = nursery.make("gemma3")
    src = nursery.begin(model, dumping(tmp_path / "src"), block_size=64)
    dst = nursery.begin(model, dumping(tmp_path / "dst"), block_size=32, tensor_parallel_size=2)
    for engine in (src, dst):
        engine.wait_ready()
    for prompt in PROMPTS:
        ferry(src, dst, prompt)
    assert dst.num_loads() == 2 * len(PROMPTS), "one record per rank and request"
    lines = [line for line in dst.log.read_text().splitlines() if "kvferry: load of " in line]
    assert len(lines) == 2 * len(PROMPTS)
    account = re.compile(r" at tcp://\S+: [\d,]+ bytes in [\d,]+ runs from 1 rank, packed, in [\d.]+ ms;")
    assert all(account.search(line) for line in lines)
    assert 0 < src.num_offers() <= len(PROMPTS), "what the scheduler counts comes to the front end, too"
    (address,) = set(re.findall(r"requests can be fetched from (\S+)", src.log.read_text()))
    told = json.loads(kvferry("status", "--json").stdout)["engines"]
    readers = [one for one in told if address in [each["address"] for each in one.get("sources", ())]]
    assert [reader["ended"] for reader in readers] == [{"read packed": len(PROMPTS)}] * 2
    assert {each["state"] for reader in readers for each in reader["sources"]} == {"met"}
    (source,) = json.loads(kvferry("status", address, "--json").stdout)["engines"]
    ended = {each["labels"].get("reason"): each["value"] for each in source["figures"]}
    assert (source["ranks"], ended["read"]) == ("1/1", len(PROMPTS))
    (src_file,), (dst_file,) = ((tmp_path / side).iterdir() for side in ("src", "dst"))
    plan = kvferry("plan", str(src_file), str(dst_file), "--tokens", "300")
    assert plan.returncode == 0, plan.stdout + plan.stderr


def test_engines_that_cannot_talk_say_why_and_how_to_see_it(nursery, tmp_path):
    src = nursery.begin(nursery.make("llama"), dumping(tmp_path / "src"))
    dst = nursery.begin(nursery.make("llama-4kv"), dumping(tmp_path / "dst"))
    for engine in (src, dst):
        engine.wait_ready()
    answer = dst.ask(PROMPTS[1], params=prefill(src, PROMPTS[1]))
    assert answer.finish_reason == "error"
    told = re.compile(r"kvferry (plan \S+ \S+ --dst-rank \d+)")
    until(lambda: bool(told.search(dst.log.read_text())), "the worker has written what it was told")
    (command,) = set(told.findall(dst.log.read_text()))
    plan = kvferry(*shlex.split(command))
    assert plan.returncode == 1
    assert "head" in plan.stdout + plan.stderr
    assert dst.ask(PROMPTS[1]).finish_reason == "length", "it goes on"


def test_an_option_that_is_not_known_is_refused_by_name(nursery):
    engine = nursery.begin(
        nursery.make("llama"), {**KVFERRY, "kv_connector_extra_config": {"leese_seconds": 3}}
    )
    with pytest.raises(Exception, match="did not start"):
        engine.wait_ready()
    assert (
        "unknown leese_seconds (did you mean lease_seconds?); known are advertise" in engine.log.read_text()
    )
