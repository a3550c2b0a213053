"""``make gpu`` on a CPU: one pair of its table, through the same code, with real engines."""

from pathlib import Path

import pytest

from tests.e2e.devices import CPU
from tests.e2e.needs import needs_vllm
from tests.gpu.cases import PREFIX, OffloadCase, Order, PairCase, ServeCase, Setting
from tests.gpu.results import Outcome, Results, read
from tests.gpu.run import Run, run_on

pytestmark = [pytest.mark.slow, *needs_vllm]

GOOD = PairCase("llama", Setting(16), Setting(64))
UNFIT = PairCase("llama", Setting(16, "NHD"), Setting(16, "HND"))


def test_a_pair_and_one_that_no_cpu_can_run(tmp_path: Path):
    """Tokens, cells and the control; and a sentence for what is not here."""
    run = Run(tmp_path / "cpu.json", Results({"device": "cpu"}))
    assert run_on(CPU, run, [GOOD, UNFIT], jobs=1, deadline=float("inf"), logs=tmp_path / "logs") == []
    good, unfit = (read(tmp_path / "cpu.json").by_case[case.name] for case in (GOOD, UNFIT))
    assert (good.outcome, good.why) == (Outcome.PASSED, "")
    assert all(prompt["is_equal"] for prompt in good.found["prompts"])
    assert good.found["control"]["states_seen"] == good.found["prompts"][0]["states"] == 8
    assert (good.found["src_blocks"], good.found["dst_blocks"]) == ([32], [64])
    assert all(prompt["num_repeated"] == prompt["num_tokens"] for prompt in good.found["prompts"])
    assert good.found["src_cuts_prompts"]
    assert good.found["dst_cuts_prompts"]
    assert (unfit.outcome, unfit.why) == (Outcome.NOT_HERE, "vLLM has one layout on a CPU")


@pytest.mark.parametrize(
    ("family", "order"), [("llama", Order.OFFLOADING_FIRST), ("gemma3", Order.KVFERRY_FIRST)]
)
def test_beside_the_offloading_connector(tmp_path: Path, family: str, order: Order):
    """vLLM's, with another worker that copies: its own needs a GPU."""
    case = OffloadCase(family, Setting(16, features=(PREFIX,)), order)
    run = Run(tmp_path / "cpu.json", Results({"device": "cpu"}))
    assert run_on(CPU, run, [case], jobs=1, deadline=float("inf"), logs=tmp_path / "logs") == []
    result = read(tmp_path / "cpu.json").by_case[case.name]
    assert (result.outcome, result.why, result.found["close"]) == (Outcome.PASSED, "", 0)


def test_servers_behind_the_proxy(tmp_path: Path):
    """Both connectors in turns; few clients and a small model, since this is a CPU."""
    case = ServeCase("8b", Setting(16), Setting(64))
    run = Run(tmp_path / "cpu.json", Results({"device": "cpu"}))
    assert run_on(CPU, run, [case], jobs=1, deadline=float("inf"), logs=tmp_path / "logs") == []
    result = read(tmp_path / "cpu.json").by_case[case.name]
    assert (result.outcome, result.why, result.found["refused"]) == (Outcome.PASSED, "", {})
    for row in result.found["serve"].values():
        assert (row["failed"], row["equal"], row["equal_under_load"]) == (0, row["sample"], row["sample"])
