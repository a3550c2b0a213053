"""What errors and values say of themselves: short enough to be read."""

import kvferry
from kvferry import Code, Finding, Refused
from kvferry.core.sample import sample_request
from kvferry.models import Topology, describe, model_named


def test_one_dtype_that_differs_is_one_line_whatever_the_number_of_layers():
    found = [Finding(Code.STATE_DIFFERS, f"layers.{i}/k", "dtype", "bf16", "fp8") for i in range(96)]
    assert str(Refused(*found)) == (
        "state-differs: layers.0/k and 95 more states: dtype: source has bf16, destination has fp8"
    )
    assert str(Refused(*found[:2])).startswith("state-differs: layers.0/k and layers.1/k: dtype")
    assert len(Refused(*found).findings) == 96


def test_findings_that_are_too_many_to_be_shown_are_counted():
    found = [Finding(Code.GAP, f"layers.{i}/k", f"head [{j}, 9)") for j in range(10) for i in range(3)]
    assert str(Refused(*found)).splitlines()[-1] == "… and 6 more"
    assert str(Refused(*found, num_more=1000)).splitlines()[-1] == "… and 1,006 more"


def test_plans_routes_and_selections_are_printed_on_one_line():
    model = model_named("llama-3.1-70b")
    src, dst = (describe(model, Topology(tp=tp), name) for tp, name in ((4, "prefill"), (2, "decode")))
    plan = kvferry.plan(src, dst, 1)
    proof = kvferry.prove(plan)
    route = kvferry.lower(proof)
    selection = kvferry.select(route, sample_request(src, dst, 100))
    assert str(plan) == "Plan(prefill -> decode rank 1: 320 pieces of 160 states)"
    for each in (plan, proof, route, selection):
        assert "\n" not in str(each)
        assert len(str(each)) < 160
