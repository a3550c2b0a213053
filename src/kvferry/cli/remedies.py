"""What to do about a finding: one sentence for each code, and for the fields that have a setting."""

from __future__ import annotations

from kvferry.errors import Code, Finding

OWN_FAULT = (
    "The engine's description of itself is wrong. A manifest of your own: correct what is named here;"
    " strides and offsets are in bytes. One that kvferry made (vLLM, `kvferry describe`): report it."
)

BY_CODE = {
    Code.VERSION: "Run kvferry of the same version on both sides.",
    Code.IDENTITY_DIFFERS: "Serve the same checkpoint, with the same settings, on both sides.",
    Code.IDENTITY_UNKNOWN: "Load weights from files, or set identity to unchecked on both engines.",
    Code.MISSING_STATE: "Serve the same model, draft model and attention backend on both sides.",
    Code.STATE_DIFFERS: "Serve the same model, with the same draft model, on both sides.",
    Code.UNKNOWN_RANK: "Ask for a rank that the engine has.",
    Code.NOT_HELD: "Give the manifests of all source ranks: a rank that holds this part is missing.",
    Code.OUT_OF_BOUNDS: OWN_FAULT,
    Code.CELLS_COLLIDE: OWN_FAULT,
    Code.VIEWS_OVERLAP: OWN_FAULT,
    Code.GAP: "Report this: kvferry has made a plan that it cannot prove.",
    Code.WRITTEN_TWICE: "Report this: kvferry has made a plan that it cannot prove.",
    Code.NOT_NEEDED: "Report this: kvferry has made a plan that it cannot prove.",
    Code.WRONG_SOURCE: "Report this: kvferry has made a plan that it cannot prove.",
    Code.TURNS_TOO_MANY: "Give both sides the same number of context parallel ranks, or turns that divide.",
    Code.TOO_MANY_RUNS: "Give both sides the same layout, and equal block sizes, so that runs get longer.",
}
"""A remedy for every code."""

WHOLE = (
    "Give both sides the same TP, block size, cache dtype and attention backend: such blocks move whole, as"
    " the backend wrote them."
)

BY_FIELD = {
    "dtype": "Give both engines the same cache dtype (vLLM: --kv-cache-dtype).",
    "encoding": "Run the same attention backend, and the same cache dtype, on both sides.",
    "tail": "Run the same attention backend on both sides.",
    "tokens_per_cell": "Give both engines the same block size: such blocks move as a whole.",
    "item_bytes": WHOLE,
    "axis shard": WHOLE,
}
"""Where a state differs in this field."""


def remedy(finding: Finding) -> str:
    """What to do about a finding.

    >>> remedy(Finding(Code.STATE_DIFFERS, "layers.0/k", "dtype", "bf16", "fp8_e4m3"))
    'Give both engines the same cache dtype (vLLM: --kv-cache-dtype).'
    """
    if finding.code is Code.STATE_DIFFERS and finding.field in BY_FIELD:
        return BY_FIELD[finding.field]
    return BY_CODE[finding.code]
