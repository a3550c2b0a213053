"""RB-9: which parts of two models differ, which are equal, and which nobody can tell."""

import pytest

from kvferry import Code, Identity, SpecError
from kvferry.core.identity import MAX_PARTS, NOTHING_SAID, compare_identity, merge_identity

LLAMA = {
    "architecture": "llama",
    "config.rms_norm_eps": "1e-05",
    "config.rope_parameters.rope_theta": "500000.0",
    "weights.content": "1f2e",
    "weights.tensors": "291 tensors",
}


def without(parts, *names):
    return {name: value for name, value in parts.items() if not name.startswith(names)}


def found(findings):
    return [(each.field, each.src, each.dst) for each in findings]


def test_the_same_model_is_the_same_in_every_part():
    check = compare_identity(Identity.of(LLAMA), Identity.of(dict(reversed(LLAMA.items()))))
    assert (check.num_equal, check.differing, check.unknown) == (5, (), ())
    assert check.sentence == "the same model (5 parts of the identity equal)"


@pytest.mark.parametrize("name", LLAMA)
def test_each_part_that_differs_is_named_with_both_values(name):
    """RB-9, RA-1: nobody has to guess what a hash was about."""
    check = compare_identity(Identity.of(LLAMA), Identity.of({**LLAMA, name: "other"}))
    assert found(check.differing) == [(name, LLAMA[name], "other")]
    assert {each.code for each in check.differing} == {Code.IDENTITY_DIFFERS}
    assert check.sentence == f"the models differ in {name}"


@pytest.mark.parametrize("name", [name for name in LLAMA if name.startswith("config")])
def test_a_value_that_one_model_has_and_the_other_has_not_is_a_difference(name):
    """Rope scaling that one config sets and the other leaves out is another model."""
    less = Identity.of(without(LLAMA, name))
    assert found(compare_identity(Identity.of(LLAMA), less).differing) == [(name, LLAMA[name], "none")]
    assert found(compare_identity(less, Identity.of(LLAMA)).differing) == [(name, "none", LLAMA[name])]


def test_a_part_stands_for_all_below_it_that_is_not_known():
    dummy = Identity.of(without(LLAMA, "weights"), {"weights": "dummy"})
    for src, dst in ((dummy, Identity.of(LLAMA)), (Identity.of(LLAMA), dummy), (dummy, dummy)):
        check = compare_identity(src, dst)
        assert (check.num_equal, check.differing) == (3, ())
        why = {"weights": "no value (dummy)"}
        sides = tuple(why["weights"] if side is dummy else "" for side in (src, dst))
        assert found(check.unknown) == [("weights", *sides)]
        assert check.unknown[0].code is Code.IDENTITY_UNKNOWN


def test_what_is_known_is_compared_beside_what_is_not():
    """An offline description knows a model's architecture, and nothing else."""
    offline = Identity.of({"architecture": "mistral"}, {"": "offline"})
    check = compare_identity(offline, Identity.of(LLAMA))
    assert found(check.differing) == [("architecture", "mistral", "llama")]
    assert found(check.unknown) == [("the rest", "no value (offline)", "")]


def test_a_silent_engine_knows_nothing():
    check = compare_identity(Identity(), Identity.of(LLAMA))
    assert (check.num_equal, check.differing) == (0, ())
    assert found(check.unknown) == [("the rest", f"no value ({NOTHING_SAID})", "")]
    assert check.sentence == (
        "the models cannot be compared completely (0 parts of the identity equal):"
        f" the rest: source has no value ({NOTHING_SAID})"
    )


def test_a_draft_matters_to_a_destination_that_drafts():
    drafting = Identity.of({**LLAMA, "draft.architecture": "llama", "draft.weights.content": "aa"})
    other = Identity.of({**LLAMA, "draft.architecture": "llama", "draft.weights.content": "bb"})
    assert not compare_identity(drafting, Identity.of(LLAMA)).differing
    assert found(compare_identity(drafting, other).differing) == [("draft.weights.content", "aa", "bb")]
    assert found(compare_identity(Identity.of(LLAMA), other).differing) == [("draft", "none", "some")]


@pytest.mark.parametrize(
    ("src", "dst", "said"),
    [
        (Identity.of({"stated": "ours, v3"}), Identity.of({"stated": "ours, v3"}), []),
        (Identity.of({"stated": "ours, v3"}), Identity.of({"stated": "ours, v4"}), ["ours, v3", "ours, v4"]),
        (Identity.of({"stated": "ours, v3"}), Identity.of(LLAMA), ["ours, v3", "no text"]),
        (Identity.of(LLAMA), Identity.of({"stated": "ours, v3"}), ["no text", "ours, v3"]),
        (Identity(), Identity.of({"stated": "ours, v3"}), ["no text", "ours, v3"]),
    ],
)
def test_a_stated_identity_must_be_stated_by_both_sides_alike(src, dst, said):
    check = compare_identity(src, dst)
    assert [text for each in check.differing for text in (each.src, each.dst)] == said
    assert check.unknown == ()


def test_ranks_know_together_what_each_of_them_knows():
    whole, part = Identity.of(LLAMA), Identity.of(without(LLAMA, "weights"), {"weights": "no such folder"})
    assert merge_identity(whole, whole) == whole
    assert merge_identity(whole, part) == merge_identity(part, whole) == part


@pytest.mark.parametrize(
    ("known", "unknown", "said"),
    [
        ({"a": ""}, {}, "1 to 512 characters are allowed, got 0"),
        ({"a": "x" * 513}, {}, "got 513"),
        ({"a" * 257: "x"}, {}, "0 to 256 characters are allowed, got 257"),
        ({}, {"a": ""}, "got 0"),
        ({"a": "x"}, {"a": "y"}, "given twice"),
        ({str(i): "x" for i in range(MAX_PARTS + 1)}, {}, f"at most {MAX_PARTS} parts"),
    ],
)
def test_an_identity_is_bounded(known, unknown, said):
    with pytest.raises(SpecError, match=said):
        Identity.of(known, unknown)
