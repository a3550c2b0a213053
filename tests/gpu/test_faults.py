"""What ``fault`` cases wait for and what they call wrong, without engines."""

from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from tests.gpu import faults
from tests.gpu.cases import Fault, FaultCase, Setting, all_cases
from tests.gpu.faults import FAILED, Yard
from tests.gpu.pairs import Wrong
from tests.gpu.run import is_alone

RIGHT = [1, 2, 3, 4]


def yard_of(monkeypatch, outcomes: Sequence[Any], src: Any = None) -> Yard:
    """One whose loads end so, one after the other."""
    monkeypatch.setattr(faults, "prefill", lambda src, prompt: {})
    monkeypatch.setattr(faults, "AGAIN_SECONDS", 1.0)
    monkeypatch.setattr(faults, "TRY_SECONDS", 0.01 if len(outcomes) < 9 else 0.1)
    coming = iter(outcomes)
    monkeypatch.setattr(Yard, "decode", lambda self, prompt, params: next(coming))
    nobody: Any = None
    return Yard(nobody, src, nobody, 9, 9, -1, {})


@pytest.mark.parametrize(
    ("outcomes", "why"),
    [
        ([RIGHT], ""),
        ([FAILED, FAILED, RIGHT], ""),
        ([FAILED, [9]], "9.* was answered"),
        ([FAILED] * 999, "still fail after 1 s"),
    ],
)
def test_an_engine_that_goes_on_may_be_refused_for_a_while_and_says_nothing_wrong(monkeypatch, outcomes, why):
    yard = yard_of(monkeypatch, outcomes)
    with pytest.raises(Wrong, match=why) if why else nullcontext():
        faults.goes_well_again(yard, [1], RIGHT)
    if not why:
        assert yard.found["refused_after"] == len(outcomes) - 1


def test_a_first_meeting_may_take_several_tries_before_a_fault_begins(monkeypatch):
    yard = yard_of(monkeypatch, [FAILED, FAILED, RIGHT])
    yard.meet()
    assert yard.found == {"refused_at_first": 2}


def test_no_fault_begins_before_the_engines_have_met(monkeypatch):
    begun: list[str] = []
    yard: Any = SimpleNamespace(
        meet=lambda: begun.append("met"), all_back=lambda: None, serves=lambda: begun.append("serves")
    )
    monkeypatch.setattr(faults, "_yard", lambda *_: nullcontext(yard))
    nobody: Any = None
    for fault in Fault:
        monkeypatch.setitem(faults._FAULTS, fault, lambda yard: begun.append("fault"))
        faults.run_fault(nobody, FaultCase("llama", Setting(), fault), {})
    assert begun == ["met", "fault", "serves"] * len(Fault)


def test_an_expired_ticket_is_tried_when_its_blocks_are_somebody_elses(monkeypatch):
    """The null block, which every request has, is nobody's."""
    src: Any = SimpleNamespace(num_free_blocks=lambda: 9)
    yard = yard_of(monkeypatch, [FAILED], src)
    granted = iter([[[0, 5], [6]], [[0, 7], [8]], [[0, 9], [6]]])
    monkeypatch.setattr(faults, "prefill", lambda src, prompt: {"remote_block_ids": next(granted)})
    faults._FAULTS[Fault.EXPIRED](yard)
    assert yard.found == {"requests_until_reuse": 2}


def test_whoever_looks_at_free_memory_is_alone():
    alone = {case.fault for case in all_cases() if isinstance(case, FaultCase) and is_alone(case)}
    assert alone == {Fault.KILLED_BEFORE, Fault.KILLED_DURING, Fault.KILLED_AFTER}
