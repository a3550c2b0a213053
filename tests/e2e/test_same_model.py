"""RB-9: two models of equal geometry, on real vLLM: refused by name at first contact, never garbage.

vLLM's own connector compares the model's name, and serves the rest.
"""

import re

import pytest

from tests.e2e.harness import KVFERRY, PROMPTS, Engine, Nursery, ferry, prefill
from tests.e2e.needs import needs_vllm
from tests.vllm.checkpoints import changed, no_last_matrix, one_row, other_weights

pytestmark = [pytest.mark.slow, *needs_vllm]

PROMPT = PROMPTS[2]


def connector(policy: str = "fail", **options) -> dict:
    return {**KVFERRY, "kv_load_failure_policy": policy, "kv_connector_extra_config": options}


@pytest.fixture(scope="module")
def nursery(tmp_path_factory):
    with Nursery(tmp_path_factory.mktemp("logs")) as nursery:
        yield nursery


@pytest.fixture(scope="module")
def llama(nursery):
    return nursery.make("llama")


@pytest.fixture(scope="module")
def src(nursery, llama):
    return nursery.start(llama, connector(), block_size=32)


def said(engine: Engine, pattern: str) -> list[str]:
    return [line for line in engine.log.read_text().splitlines() if re.search(pattern, line)]


def assert_refused(engine: Engine, src: Engine, *parts: str) -> None:
    """A request fails, the log names each part, and the engine goes on."""
    params = prefill(src, PROMPT)
    assert engine.ask(PROMPT, params=params).finish_reason == "error", engine.tail()
    for part in parts:
        assert said(engine, f"identity-(differs|unknown): {re.escape(part)}: (source|destination) has .*"), (
            engine.tail()
        )
    assert engine.ask(PROMPT).finish_reason == "length", "it goes on"


def test_the_same_files_in_another_folder_are_served(nursery, llama, src, tmp_path):
    """Another folder, another TP size: the same model."""
    dst = nursery.start(changed(llama, tmp_path / "copy"), connector(), tensor_parallel_size=2)
    assert ferry(src, dst, PROMPT).tokens == dst.ask(PROMPT).tokens == src.ask(PROMPT).tokens
    (line,) = said(dst, " met .*the same model .*rank.s. 0")[:1]
    print(line)
    for engine in (src, dst):
        (cost,) = re.findall(r"identity of the model: \d+ values in (\d+) ms", engine.log.read_text())[:1]
        print(f"{engine.name}: identity took {cost} ms of the start")
        assert int(cost) < 1000


def test_other_weights_are_refused_by_name(nursery, llama, src, tmp_path):
    """RB-9: equal geometry, equal names and shapes of all tensors, other content."""
    other = changed(llama, tmp_path / "other", weights=other_weights)
    failing = nursery.begin(other, connector("fail"), block_size=32)
    computing = nursery.begin(other, connector("recompute"), block_size=32)
    for engine in (failing, computing):
        engine.wait_ready()
    assert_refused(failing, src, "weights.content")
    own = failing.ask(PROMPT).tokens
    assert own != src.ask(PROMPT).tokens, "the models do say different things"
    answer = ferry(src, computing, PROMPT)
    assert (answer.tokens, answer.sources.external) == (own, 0)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
            "config.rope_parameters.rope_theta",
        ),
        ({"tie_word_embeddings": True, "weights": no_last_matrix}, "config.tie_word_embeddings"),
        ({"weights": one_row}, "weights.content"),
    ],
    ids=["rope", "tied", "one row"],
)
def test_another_model_is_refused_by_name(nursery, llama, src, tmp_path, change, part):
    dst = nursery.start(changed(llama, tmp_path / "other", **change), connector(), block_size=32)
    assert_refused(dst, src, part)


def test_weights_that_nobody_knows_are_refused_unless_both_accept_them(nursery, llama, src):
    """Dummy weights: nothing is loaded, unless both engines say unchecked; then the log says so."""
    unchecked = connector(identity="unchecked")
    lax_src = nursery.begin(llama, unchecked, block_size=32)
    lax = nursery.begin(llama, unchecked, load_format="dummy", block_size=32)
    strict = nursery.begin(llama, connector(), load_format="dummy", block_size=32)
    for engine in (lax_src, lax, strict):
        engine.wait_ready()
    assert ferry(lax_src, lax, PROMPT).sources.external > 0
    assert said(lax, "WARNING.* met .*the models cannot be compared completely.*weights.*dummy")
    assert_refused(strict, src, "weights")
    assert_refused(lax, src, "weights")


def test_a_text_of_the_operator_stands_for_the_model(nursery, llama, tmp_path):
    """For people who know better: what differs in files may still be the same model."""
    other = changed(llama, tmp_path / "other", use_some_flag=True)
    stated = nursery.begin(llama, connector(identity="ours, v3"), block_size=32)
    same = nursery.begin(other, connector(identity="ours, v3"), block_size=32)
    silent = nursery.begin(llama, connector(), block_size=32)
    for engine in (stated, same, silent):
        engine.wait_ready()
    assert ferry(stated, same, PROMPT).sources.external > 0
    assert_refused(silent, stated, "identity")
