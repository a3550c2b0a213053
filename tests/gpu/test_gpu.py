"""``make gpu`` without a GPU and without vLLM: its table, results and report, and what counts as right."""

import importlib
import json
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.e2e import inside
from tests.e2e.devices import CPU, CUDA, Device
from tests.e2e.harness import lasting_port
from tests.gpu.__main__ import main
from tests.gpu.cases import (
    FEATURES,
    OTHER_ON_GPU,
    Case,
    ConversationCase,
    DescribeCase,
    Fault,
    FaultCase,
    LatencyCase,
    NotHere,
    PairCase,
    ReuseCase,
    ServeCase,
    Setting,
    TimeCase,
    all_cases,
)
from tests.gpu.engines import Engines, cause
from tests.gpu.machine import NoMachine, look
from tests.gpu.models import CONFIGS, make_config
from tests.gpu.moved import Moved
from tests.gpu.pairs import AT_ONCE, Row, Wrong, check_pair, check_steps, check_tokens
from tests.gpu.report import plot, text
from tests.gpu.results import Outcome, Result, Results, ResultsError, merge, read, write
from tests.gpu.run import Run, to_do
from tests.gpu.servers import Servers

CASES = all_cases()
PAIRS = [case for case in CASES if isinstance(case, PairCase)]
REUSES = [case for case in CASES if isinstance(case, ReuseCase | ConversationCase)]
MACHINE = {"device": "a GPU", "vllm": "0.32.0"}
FOREVER = float("inf")

# -- the table ---------------------------------------------------------------------------------------------


def test_names_are_names():
    assert len({case.name for case in CASES}) == len(CASES)


def test_the_pairs_that_issue_asks_for():
    families = {case.family for case in PAIRS}
    assert len(PAIRS) >= 40
    assert {
        "kimi_linear",
        "jamba",
        "mamba2",
        "qwen3_next",
        "gemma4",
        "deepseek_v3",
        "deepseek_v32",
    } <= families
    assert {(case.src.block, case.dst.block) for case in PAIRS} >= {(16, 16), (16, 64), (64, 16)}
    assert {(case.src.layout, case.dst.layout) for case in PAIRS} >= {("NHD", "HND"), ("HND", "NHD")}
    assert {case.src.dtype for case in PAIRS} == {"bfloat16", "float16"}
    assert any(case.src.has_graphs for case in PAIRS)
    assert {name for case in (*PAIRS, *REUSES) for name in case.src.features} == set(FEATURES)
    assert any(case.src.cache_dtype == "fp8" for case in PAIRS)
    drafts = {(case.family, case.src.draft) for case in PAIRS}
    assert {("deepseek_v3", "draft_model:llama-draft"), ("llama", "draft_model:deepseek_v3")} <= drafts


def test_every_family_can_be_made():
    from tests.support.vllm.tiny import FAMILIES

    drafting = {case.src.draft.split(":")[-1] for case in PAIRS if case.src.draft}
    tiny = {case.family for case in (*PAIRS, *REUSES)}
    tiny |= {case.family for case in CASES if isinstance(case, FaultCase | DescribeCase)}
    assert tiny | drafting | set(OTHER_ON_GPU.values()) <= set(FAMILIES)
    sized = {case.model for case in CASES if isinstance(case, TimeCase | LatencyCase | ServeCase)}
    assert sized == set(CONFIGS)


def test_all_faults_and_the_lengths():
    assert Counter(case.fault for case in CASES if isinstance(case, FaultCase)) == dict.fromkeys(Fault, 2)
    lengths = {n for case in CASES if isinstance(case, TimeCase) and case.model == "8b" for n in case.lengths}
    assert lengths == {128, 1024, 4096, 16384}


def test_a_setting_as_vllm_hears_it():
    setting = Setting(16, "NHD", "FLASH_ATTN", cache_dtype="fp8", has_graphs=True)
    assert setting.on(CUDA, "llama") is setting
    assert setting.args() == {
        "dtype": "bfloat16",
        "block_size": 16,
        "attention_backend": "FLASH_ATTN",
        "kv_cache_dtype": "fp8",
        "enforce_eager": False,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    }
    assert setting.env() == {"VLLM_KV_CACHE_LAYOUT": "NHD"}


def test_a_setting_on_a_cpu():
    on_cpu = Setting(16).on(CPU, "llama")
    assert (on_cpu.block, on_cpu.dtype) == (32, "float32")
    assert Setting(48).on(CPU, "gemma3").block == 64
    assert Setting(64).on(CPU, "qwen3_next").dtype == "bfloat16"


def test_fp8_on_a_cpu(monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert Setting(16, cache_dtype="fp8").on(CPU, "llama").dtype == "bfloat16"
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(NotHere, match="x86-64 only"):
        Setting(16, cache_dtype="fp8").on(CPU, "llama")


@pytest.mark.parametrize(
    ("setting", "family", "why"),
    [
        (Setting(layout="NHD"), "llama", "one layout"),
        (Setting(backend="FLASH_ATTN"), "llama", "FLASH_ATTN is a GPU's"),
        (Setting(has_graphs=True), "llama", "CUDA graphs"),
        (Setting(dtype="float16"), "llama", "fp32"),
        (Setting(features=("prefix", "async")), "llama", "async: vLLM's worker for a CPU"),
        (Setting(), "jamba", "Mamba-1"),
        (Setting(features=("prefix",)), "nemotron_h", "no model with states"),
    ],
)
def test_what_a_cpu_cannot_do_says_why(setting, family, why):
    with pytest.raises(NotHere, match=why):
        setting.on(CPU, family)


@pytest.mark.parametrize("model", CONFIGS)
def test_a_configuration_is_json(tmp_path, model):
    config = json.loads((make_config(model, tmp_path, max_tokens=99) / "config.json").read_text())
    assert config["max_position_embeddings"] == 99
    assert config["architectures"]


# -- what counts as right ----------------------------------------------------------------------------------

RIGHT = [1, 2, 3, 4]
ROW = Row(100, 99, RIGHT, RIGHT, RIGHT, RIGHT, RIGHT, Moved(3, 300, {}))
OTHER = replace(ROW, ferried=[1, 2, 9, 4])


def test_equal_tokens_are_right():
    said = OTHER.ferried
    check_tokens([ROW, replace(OTHER, alone_again=said)])
    check_tokens([ROW, replace(OTHER, alone_at_once=said)])


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (
            replace(ROW, moved=Moved(3, 300, {"layers.0/k": ("ab", "cd")})),
            "other bytes than the source's in layers.0/k",
        ),
        (replace(ROW, num_external=0), "0 came by the load"),
    ],
)
def test_what_is_wrong_says_how(row, why):
    ROW.check_moved()
    with pytest.raises(Wrong, match=why):
        row.check_moved()


def test_where_engines_agree_without_a_connector_every_token_must_be_equal():
    with pytest.raises(Wrong, match="the first 2 tokens are right, and engines without a connector agree"):
        check_tokens([ROW, OTHER, ROW])


@pytest.mark.parametrize(
    "disagreeing",
    [
        replace(ROW, alone_at_src=[1, 7, 7, 7]),
        replace(ROW, alone_at_once=[1, 7, 7, 7]),
        replace(ROW, alone_again=[1, 7, 7, 7]),
    ],
)
def test_other_tokens_pass_only_where_engines_disagree_on_some_prompt_of_the_pair(disagreeing):
    """The prompt that rounds otherwise without a connector need not be the one that does with one."""
    check_tokens([disagreeing, OTHER])
    assert (OTHER.num_equal, OTHER.num_equal_without, disagreeing.num_equal_without) == (2, 4, 1)


@pytest.mark.parametrize("spoilt", [True, False])
def test_a_cell_that_differs_fails_a_pair_whatever_its_tokens(spoilt):
    """Also where engines disagree by themselves: what was moved does not round."""
    rows = [ROW, replace(ROW, alone_again=[7, 7, 7, 7], ferried=[7, 7, 7, 7])]
    if spoilt:
        rows[1] = replace(rows[1], moved=Moved(3, 300, {"layers.0/k": ("ab", "cd")}))
    with pytest.raises(Wrong, match="other bytes") if spoilt else nullcontext():
        check_pair(rows, lambda: None)


def test_a_pair_whose_control_stays_green_fails():
    def blind() -> None:
        raise Wrong("control: nothing was seen")

    with pytest.raises(Wrong, match="nothing was seen"):
        check_pair([ROW], blind)


def test_what_differs_is_kept_with_what_it_differs_from():
    assert "answers" not in ROW.summary()
    found = replace(ROW, ferried=[1, 2, 9, 9], moved=Moved(3, 300, {"layers.0/k": ("ab", "cd")})).summary()
    assert found["num_equal"] == 2
    assert (found["answers"]["ferried"], found["answers"]["alone"]) == ([1, 2, 9, 9], RIGHT)
    assert found["differing"] == {"layers.0/k": ["ab", "cd"]}


def test_a_reference_that_is_cut_otherwise_is_no_reference():
    check_steps(100, 99, 99)
    check_steps(100, AT_ONCE, 100)
    with pytest.raises(Wrong, match=r"should compute 99 tokens in its longest step, and computed 100"):
        check_steps(100, 99, 100)
    with pytest.raises(Wrong, match="computed 37"):
        check_steps(100, AT_ONCE, 37)


class Scheduler:
    """As vLLM's has it: a step has a budget, and a lone request takes all of it."""

    def __init__(self) -> None:
        self.max_num_scheduled_tokens = 50

    def schedule(self, num_waiting: int) -> SimpleNamespace:
        tokens = min(num_waiting, self.max_num_scheduled_tokens)
        return SimpleNamespace(num_scheduled_tokens={"a": tokens} if tokens else {})


def test_steps_are_cut_by_their_budget_and_noted():
    core = SimpleNamespace(scheduler=Scheduler())
    for asked, longest in ((30, 30), (0, 40), (30, 30), (99, 40)):
        inside.step_lengths(core, asked)
        assert inside.longest_step(core) == 0
        for num_waiting in (0, 40, 3):
            core.scheduler.schedule(num_waiting)
        assert inside.longest_step(core) == longest


class FreeBlocks(list):
    """As vLLM's queue has it."""

    @property
    def num_free_blocks(self) -> int:
        return len(self)

    def popleft_n(self, number: int) -> list:
        taken, self[:] = self[:number], self[number:]
        return taken

    append_n = list.extend


def test_an_engine_that_is_asked_twice_gets_other_blocks():
    """vLLM grants first what was freed last: without a mix it gets the same, and repeats what it said."""
    pool = SimpleNamespace(free_block_queue=FreeBlocks(range(100)))
    manager = SimpleNamespace(block_pool=pool)
    inside.mix_free_blocks(SimpleNamespace(scheduler=SimpleNamespace(kv_cache_manager=manager)))
    assert set(pool.free_block_queue[:10]) != set(range(10))
    assert sorted(pool.free_block_queue) == list(range(100))


def test_on_a_gpu_another_model_has_the_widths_of_its_kernels(tmp_path):
    from tests.support.vllm.tiny import FAMILIES

    made: Any = SimpleNamespace(make=lambda family: tmp_path / family)
    for device, name in ((CPU, "deepseek_v3"), (CUDA, "deepseek_v3-wide")):
        engines = Engines(made, device, tmp_path, Servers(tmp_path))
        assert (engines.tiny("deepseek_v3").name, engines.tiny("llama").name) == (name, "llama")
    widths = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    for family in ("deepseek_v3-wide", "deepseek_v32", "kimi_linear"):
        assert [FAMILIES[family][key] for key in widths] == [512, 64, 128, 128]


def test_a_lasting_port_is_none_that_the_kernel_gives_away():
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert {lasting_port() < first_given for _ in range(50)} == {True}


def test_the_cause_of_an_engines_end():
    log = (
        "INFO all is well\n(EngineCore) ERROR ValueError: block_size 7 is odd\n"
        "RuntimeError: Engine core initialization failed. See above.\n"
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See above.\n"
    )
    assert cause(log) == "ValueError: block_size 7 is odd"
    assert cause("x\nvllm.v1.a.OddError: odd\n") == "vllm.v1.a.OddError: odd"
    assert cause("killed") == "killed"
    assert (
        cause("a\n    assert page % 2 == 0\nAssertionError\nended") == "AssertionError: assert page % 2 == 0"
    )


# -- results -----------------------------------------------------------------------------------------------


def result(name: str, ended: float = 1.0, outcome: Outcome = Outcome.PASSED) -> Result:
    return Result(name, outcome, found={"ended": ended}, ended=ended)


def test_results_come_back(tmp_path):
    path = tmp_path / "new" / "cuda.json"
    results = Results(MACHINE).plus(result("a"), result("b", outcome=Outcome.NOT_HERE))
    write(path, results)
    assert read(path) == results
    assert [file.name for file in path.parent.iterdir()] == ["cuda.json"]


def test_the_later_result_counts(tmp_path):
    write(tmp_path / "1", Results(MACHINE).plus(result("a", 5), result("b", 1)))
    write(tmp_path / "2", Results(MACHINE).plus(result("a", 4), result("b", 2), result("c")))
    merged = merge([tmp_path / "1", tmp_path / "2"])
    assert {name: one.ended for name, one in merged.by_case.items()} == {"a": 5, "b": 2, "c": 1}


@pytest.mark.parametrize("key", ["device", "vllm"])
def test_results_of_two_machines_are_not_merged(tmp_path, key):
    write(tmp_path / "1", Results(MACHINE))
    write(tmp_path / "2", Results({**MACHINE, key: "another"}))
    with pytest.raises(ResultsError, match=f"another machine.*{key}"):
        merge([tmp_path / "1", tmp_path / "2"])


@pytest.mark.parametrize(
    "junk", ["", "{}", '{"version": 9}', '{"version": 1, "machine": {}, "results": [7]}']
)
def test_a_file_that_is_no_results(tmp_path, junk):
    (tmp_path / "junk").write_text(junk)
    with pytest.raises(ResultsError, match="junk"):
        read(tmp_path / "junk")


# -- a run -------------------------------------------------------------------------------------------------


def run_of(path: Path) -> Run:
    return Run(path, read(path) if path.exists() else Results(MACHINE), "c0ffee", say=lambda line: None)


def test_a_run_goes_on_where_it_ended(tmp_path):
    path, cases = tmp_path / "r.json", list(PAIRS[:6])
    seen: list[str] = []

    def good(case: Case, found: dict) -> None:
        seen.append(case.name)
        found["n"] = len(seen)
        if case.name == cases[4].name:
            raise KeyError("a bug")

    run_of(path).run_all(cases[:2], good, jobs=2, deadline=FOREVER)
    due = to_do(cases, read(path), again=False, again_failed=False)
    assert due == cases[2:]
    assert run_of(path).run_all(due, good, jobs=2, deadline=FOREVER) == []
    assert sorted(seen) == sorted(case.name for case in cases)
    results = read(path)
    assert results.by_case[cases[4].name].outcome is Outcome.FAILED
    assert "a bug" in results.by_case[cases[4].name].why
    assert results.by_case[cases[4].name].found["n"] > 0, "what was found before it failed is kept"
    assert {one.commit for one in results.by_case.values()} == {"c0ffee"}
    assert to_do(cases, results, again=False, again_failed=True) == [cases[4]]
    assert to_do(cases, results, again=True, again_failed=False) == cases


def test_each_result_is_kept_at_once(tmp_path):
    """A case that fails, or cannot run here, stops none of the others."""
    path, kept = tmp_path / "r.json", []

    def look_back(case: Case, found: dict) -> None:
        kept.append(len(read(path).by_case) if path.exists() else 0)
        if len(kept) == 1:
            raise Wrong("no")
        if len(kept) == 2:
            raise NotHere("never")

    run_of(path).run_all(PAIRS[:4], look_back, jobs=1, deadline=FOREVER)
    assert kept == [0, 1, 2, 3]
    outcomes = [read(path).by_case[case.name].outcome for case in PAIRS[:4]]
    assert outcomes == [Outcome.FAILED, Outcome.NOT_HERE, Outcome.PASSED, Outcome.PASSED]


def test_nothing_begins_after_the_deadline(tmp_path):
    """The clock is the test's: ten seconds of it have passed when a result is told."""
    now = [0.0]

    def tell(line: str) -> None:
        now[0] += 10

    run = Run(tmp_path / "r.json", Results(MACHINE), say=tell, clock=lambda: now[0])
    left = run.run_all(PAIRS[:5], lambda case, found: None, jobs=1, deadline=25)
    assert left == list(PAIRS[3:5])
    assert len(read(tmp_path / "r.json").by_case) == 3


def test_what_is_timed_runs_alone(tmp_path):
    times = [case for case in CASES if isinstance(case, TimeCase)][:2]
    order: list[str] = []

    def note(case: Case, found: dict) -> None:
        order.append(case.name)

    run_of(tmp_path / "r.json").run_all(
        [times[0], PAIRS[0], times[1], PAIRS[1]],
        note,
        jobs=2,
        deadline=FOREVER,
    )
    assert set(order[:2]) == {case.name for case in PAIRS[:2]}
    assert order[2:] == [case.name for case in times]


# -- the report --------------------------------------------------------------------------------------------


def passed(case: Case, found: dict) -> Result:
    return Result(case.name, Outcome.PASSED, found=found, ended=1, commit="c0ffee")


def full() -> Results:
    prompt = {**ROW.summary(), "is_equal": False, "num_equal": 3, "num_equal_without_connector": 2}
    pair = {
        "prompts": [prompt],
        "control": {"states_seen": 3},
        "src_blocks": [16],
        "dst_blocks": [64, 256],
        "dtype": "bf16",
    }
    timing = next(case for case in CASES if isinstance(case, TimeCase))
    latency = next(case for case in CASES if isinstance(case, LatencyCase))
    times = {str(n): {"median_ms": 20.0 + n, "less_two_tokens_ms": float(n)} for n in (128, 4096)}
    window = {"p50_ms": 10.0, "p99_ms": 20.0}
    windows = {"alone": window, "loads": {**window, "p99_ms": 23.0}}
    fault = next(case for case in CASES if isinstance(case, FaultCase))
    describe = next(case for case in CASES if isinstance(case, DescribeCase))
    return Results(MACHINE).plus(
        passed(PAIRS[0], pair),
        Result(PAIRS[1].name, Outcome.FAILED, "100 tokens of prompt: wrong"),
        Result(PAIRS[2].name, Outcome.NOT_HERE, "no such kernel"),
        passed(timing, {"refused": {"vllm": "ValueError: no"}, "load_ms": {"kvferry": times}}),
        passed(latency, {"refused": {}, "latency": {"kvferry": windows}}),
        passed(fault, {"right": 2, "failed": 4}),
        passed(describe, {"kernels": ["FLASH_ATTN"], "states": 8}),
    )


def test_a_report_has_all_of_it():
    report = text(full(), CASES)
    for words in (
        "a GPU",
        "c0ffee",
        "3 of 4",
        "2 of 4",
        "16 -> 64+256 bf16",
        "100 tokens of prompt: wrong",
        "no such kernel",
        "4096.0 ms",
        "refused: ValueError: no",
        "1.15",
        "right: 2, failed: 4",
        "FLASH_ATTN",
    ):
        assert words in report
    assert f"{len(PAIRS)}       1       1         1 {len(PAIRS) - 3:8}" in report


def test_times_of_a_cpu_are_no_measurements():
    assert "say only that the cases run" in text(Results({"device": "cpu"}), CASES)
    assert "say only that the cases run" not in text(full(), CASES)


def test_a_report_of_nothing_yet():
    assert f"{len(PAIRS):8}\n" in text(Results(MACHINE), CASES)


def test_a_plot(tmp_path):
    pytest.importorskip("matplotlib")
    assert plot(full(), tmp_path / "plot.svg")
    assert "<svg" in (tmp_path / "plot.svg").read_text()
    assert not plot(Results(MACHINE), tmp_path / "none.svg")


def test_the_commands(tmp_path, capsys):
    first, second, whole = (tmp_path / name for name in ("1.json", "2.json", "whole.json"))
    write(first, Results(MACHINE).plus(result("fault/x")))
    write(second, Results(MACHINE).plus(result("fault/y", outcome=Outcome.FAILED)))
    assert main(["list", "--only", "pair/kimi"]) == 0
    assert capsys.readouterr().out.startswith("pair/kimi_linear/")
    assert main(["merge", str(first), str(second), "--results", str(whole)]) == 1, "a case failed"
    assert set(read(whole).by_case) == {"fault/x", "fault/y"}
    assert main(["report", "--results", str(tmp_path / "none.json")]) == 1
    assert "none.json" in capsys.readouterr().err


def test_without_vllm_it_says_so_in_a_sentence(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(NoMachine, match=r"has no torch\. Name a Python"):
        look("cuda", "python3")


def test_a_worker_on_a_gpu_teaches_itself(monkeypatch):
    """vLLM adds an empty class to it; importing that is all there is to it."""
    from tests.e2e import taught

    assert CUDA.args["worker_extension_cls"] == f"{taught.__name__}.{taught.Taught.__name__}"
    assert [name for name in vars(taught.Taught) if not name.startswith("__")] == []
    monkeypatch.setenv(inside.TEACH, "cuda")
    seen: list[Device] = []
    monkeypatch.setattr(inside, "teach", seen.append)
    importlib.reload(taught)
    assert seen == [CUDA]
