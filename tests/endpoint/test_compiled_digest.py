"""Digests by compiled code: numpy's numbers, for any two engines; and numpy where nothing can be compiled."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry import SpecError, plan
from kvferry.core.digest import DigestSide, digest_parts
from kvferry.core.digest_cells import CellBlocks, CellPattern, Dimension, folded_sums
from kvferry.endpoint import compiled_digest
from kvferry.endpoint.compiled_digest import CompiledSums, HostSums, compiled_sums
from kvferry.host.compiler import OFF, SETTING, NotCompiled, find_compiler
from kvferry.testing.strategies import cases, engines, requests
from tests.core.planted_faults import PAIRS, Loaded, memory_of


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> CompiledSums:
    try:
        compiler = find_compiler({})
    except NotCompiled as error:
        pytest.skip(f"{error}: compiled digests are tested where there is one")
    return compiled_sums(compiler, tmp_path_factory.mktemp("compiled"))


@settings(max_examples=60, deadline=None, suppress_health_check=[*HealthCheck])
@given(data=st.data())
def test_compiled_code_finds_the_numbers_of_numpy(compiled: CompiledSums, data: st.DataObject) -> None:
    """Any layout, block size and parallelism; memory at odd addresses, too."""
    case = data.draw(cases())
    src, dst = engines(case)
    request = data.draw(requests(src, dst, case.num_tokens, case.num_kept))
    seed, shift = data.draw(st.integers(0, 99)), data.draw(st.integers(0, 3))
    parts = digest_parts(plan(src, dst, case.dst_rank), request)
    for src_rank, some in parts.items():
        whole = {
            name: np.concatenate([values, np.zeros(4, np.uint8)])
            for name, values in memory_of(src, src_rank, np.random.default_rng(seed)).items()
        }
        memory = {name: values[shift : len(values) - 4 + shift] for name, values in whole.items()}
        sides = (
            DigestSide(src, src.rank(src_rank), request.src, memory, "src", chunk_sums)
            for chunk_sums in (None, partial(folded_sums, partial(compiled, memory)))
        )
        ours, theirs = (side.sums(some, seed=seed) for side in sides)
        assert [sums.tolist() for sums in ours] == [sums.tolist() for sums in theirs]


@pytest.mark.parametrize("pair", PAIRS)
def test_compiled_code_finds_what_arrived(compiled: CompiledSums, pair: tuple[str, str, str, int]) -> None:
    """One side by compiled code, the other by numpy: equal; and another sum for a changed bit."""
    loaded = Loaded.of(pair, np.random.default_rng(5))
    planned, request = loaded.planned, loaded.request
    rank, (part, *_) = next(iter(digest_parts(planned, request).items()))
    memory = {name: values.copy() for name, values in loaded.memory.items()}
    chunk_sums = partial(folded_sums, partial(compiled, memory))
    ours = DigestSide(planned.dst, planned.dst.rank(planned.dst_rank), request.dst, memory, "dst", chunk_sums)
    assert ours.sums([part])[0].tolist() == loaded.theirs[rank][0].tolist()
    region, where = loaded.sites[part.state]
    memory[region][where.offsets.ravel()[0]] ^= 1
    told = ours.sums([part])[0].tolist() == loaded.theirs[rank][0].tolist()
    assert told == (where.offsets.ravel()[0] not in _bytes_of_part(loaded, part.state, rank))


def _bytes_of_part(loaded: Loaded, state: str, rank: int) -> set[int]:
    """The destination bytes that a source rank sends: of a state that comes from several, only a part."""
    regions = loaded.planned.dst.rank(loaded.planned.dst_rank).regions
    name = loaded.sites[state][0]
    runs = loaded.selection.reads[rank]
    return {
        at
        for _, _, dst_region, dst_at, size in runs
        if regions[dst_region].name == name
        for at in range(dst_at, dst_at + size)
    }


def test_memory_that_is_not_there_is_not_read(compiled: CompiledSums) -> None:
    pattern = CellPattern(4, (Dimension(8, 4, False),), (), np.ones(8, np.uint64), 0, np.zeros(1, np.int64))
    memory = {"kv": np.zeros(64, np.uint8)}
    fits = CellBlocks("k", "kv", pattern, 0, 32, np.array([0, 1]))
    assert compiled(memory, [fits])[0].shape == (2, 1)
    with pytest.raises(SpecError, match=r"k: bytes \[32, 96\) are not all in region kv of 64 bytes"):
        compiled(memory, [CellBlocks("k", "kv", pattern, 0, 32, np.array([1, 2]))])


def test_code_that_finds_other_sums_is_not_used(
    compiled: CompiledSums, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = compiled_digest.source().replace("sum += keys[i]", "sum += 1 + keys[i]")
    monkeypatch.setattr(compiled_digest, "source", lambda: wrong)
    with pytest.raises(NotCompiled, match="other sums than numpy"):
        compiled_sums(find_compiler({}), tmp_path)


def test_without_a_compiler_numpy_stays_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho no such flag >&2\nexit 1\n")
    broken.chmod(0o700)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for value, why in (
        (OFF, f"{SETTING} is off"),
        ("/no/such/program", "names no program: /no/such/program"),
        (os.fspath(broken), "no such flag"),
    ):
        monkeypatch.setenv(SETTING, value)
        sums = HostSums()
        cell_sums = sums.of({"kv": np.ones(64, np.uint8)}, 1 << 30)
        sums.compiled.start().join(60)
        assert why in sums.how
        pattern = CellPattern(1, (Dimension(4, 1, False),), (), np.ones(4, np.uint64), 0, np.zeros(1, int))
        (found,) = cell_sums([CellBlocks("k", "kv", pattern, 0, 4, np.array([3]))])
        assert found.tolist() == [[4]]
