"""R000-10, R001-8: families that do not run on a CPU, in memory that vLLM's own allocator made.

vLLM groups, lays out, allocates and binds; cells are written and read through its own views; kvferry
describes, proves, and moves them over NIXL between engines that are cut differently.
"""

import importlib.util
from dataclasses import replace

import pytest

pytestmark = pytest.mark.slow
for module in ("vllm", "nixl"):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed", allow_module_level=True)

from tests.vllm.corpus import families  # noqa: E402
from tests.vllm.corpus.allocated import Cut, Worker, workers  # noqa: E402
from tests.vllm.corpus.carrying import carry  # noqa: E402

NUM_TOKENS = 300


def engine(name: str, family: str, cut: Cut) -> list[Worker]:
    """All ranks of an engine."""
    heads = tuple(families.HEADS.get(family, {}).items())
    cuts = [replace(cut, rank=rank, heads=heads) for rank in range(cut.tp)]
    return workers(getattr(families, family), cuts, name)


CASES = {
    ("kimi_linear", Cut(1), Cut(1)): [12],
    ("kimi_linear", Cut(2), Cut(1)): [130],
    ("kimi_linear", Cut(1), Cut(2)): [70, 70],
    ("kimi_linear", Cut(4), Cut(2)): [130, 130],
    ("mla_with_gqa_draft", Cut(1), Cut(1)): [20],
    ("mla_with_gqa_draft", Cut(2), Cut(1, block=128)): [615],
    ("mla_with_gqa_draft", Cut(1), Cut(2)): [315, 315],
    ("mla_with_gqa_draft", Cut(4, block=128), Cut(2)): [615, 615],
    ("gqa_with_mla_draft", Cut(1), Cut(1)): [20],
    ("gqa_with_mla_draft", Cut(2), Cut(1, block=128)): [1805],
    ("gqa_with_mla_draft", Cut(4), Cut(2, block=128)): [1805, 1805],
    ("only_mla", Cut(1), Cut(4, dcp=4)): [225, 225, 225, 225],
    ("only_mla", Cut(2, dcp=2, interleave=64), Cut(2)): [15, 15],
    ("one_head", Cut(4, dcp=2, interleave=16), Cut(2, dcp=2)): [300, 300],
    ("gemma4", Cut(1), Cut(1)): [14],
    ("gemma4", Cut(2, block=16), Cut(1, block=32)): [798],
    ("gemma4", Cut(1, block=32), Cut(2, block=16)): [418, 418],
    ("gemma4", Cut(4, block=32), Cut(2, block=32)): [1960, 1960],
    ("gemma4", Cut(1, layout="LBHNC"), Cut(2, layout="LBHNC")): [18, 18],
    ("gemma4", Cut(2, layout="BLHNC"), Cut(1, layout="LBNHC")): [1530],
    ("states", Cut(1), Cut(1)): [9],
    ("states", Cut(2), Cut(1)): [634],
    ("states", Cut(2), Cut(4)): [317, 317, 317, 317],
    ("deepseek_v32", Cut(1), Cut(1)): [30],
    ("deepseek_v32", Cut(2, block=128), Cut(1)): [30],
    ("deepseek_v32", Cut(1), Cut(2, block=128)): [30, 30],
    ("deepseek_v32", Cut(4), Cut(2)): [30, 30],
    ("deepseek_v4", Cut(1, block=256), Cut(1, block=256)): [51],
    ("deepseek_v4", Cut(2, block=256), Cut(1, block=256)): [57],
    ("deepseek_v4", Cut(4, block=256), Cut(2, block=256)): [61, 61],
}
"""What moves from where to where, and the runs that it takes each destination rank."""


@pytest.mark.parametrize(("family", "src", "dst"), CASES, ids=str)
def test_cells_arrive_where_vllm_looks_for_them(family: str, src: Cut, dst: Cut) -> None:
    """R000-10, R001-8; R002-10: several kinds that vLLM wraps into one group are among the families."""
    wrong, num_runs = carry(engine("src", family, src), engine("dst", family, dst), NUM_TOKENS)
    assert not wrong
    assert num_runs == CASES[family, src, dst]
