"""Every JSON example of docs/manifest.md and examples/manifests is decoded, proved, moved and checked."""

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from kvferry import Addressing, BlockTable, Manifest, Request, Slack, lower, need_of, plan, prove, select
from kvferry.testing import oracle
from kvferry.wire import (
    manifest_from_json,
    manifest_to_json,
    request_from_json,
    selection_to_json,
)

PAGE = (Path(__file__).parents[2] / "docs" / "manifest.md").read_text()
BLOCKS = re.findall(r"^```json\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
FILES = sorted((Path(__file__).parents[2] / "examples" / "manifests").glob("*.json"))
ON_PAGE = [block for block in BLOCKS if '"engine"' in block]
MANIFESTS = {
    json.loads(text)["engine"]: text.encode() for text in (*ON_PAGE, *(path.read_text() for path in FILES))
}
REQUESTS = [block.encode() for block in BLOCKS if '"need"' in block]
RUNS = (Path(__file__).parents[2] / "examples" / "manifests" / "pair" / "runs.json").read_text()
NUM_TOKENS = 15


def request_within(manifest: Manifest) -> Request:
    """A request that moves from some blocks of an engine to others of the same engine."""
    src, dst = {}, {}
    used: dict[str, int] = {}
    for group in manifest.groups:
        one_block = group.addressing is not Addressing.TABLE
        num_blocks = 1 if one_block else -(-NUM_TOKENS // group.tokens_per_block)
        ids = [
            i % group.num_blocks for i in range(used.get(group.pool, 0), used.get(group.pool, 0) + num_blocks)
        ]
        used[group.pool] = used.get(group.pool, 0) + num_blocks
        src[group.name] = BlockTable.of(ids)
        dst[group.name] = BlockTable.of([group.num_blocks - 1 - i for i in ids])
    return Request(src, dst, {group.name: need_of(group, NUM_TOKENS) for group in manifest.groups})


def test_the_page_has_every_kind_of_block():
    assert len(MANIFESTS) == 13 == len(ON_PAGE) + len(FILES)
    assert len(ON_PAGE) + len(REQUESTS) == len(BLOCKS)
    assert "examples/manifests/pair/runs.json" in PAGE
    assert [path.name for path in FILES if f"examples/manifests/{path.name}" not in PAGE] == []


@pytest.mark.parametrize("engine", MANIFESTS)
def test_a_layout_is_sound_and_moves(engine):
    manifest = manifest_from_json(MANIFESTS[engine])
    assert manifest_from_json(manifest_to_json(manifest)) == manifest
    request = request_within(manifest)
    for rank in manifest.ranks:
        made = plan(manifest, manifest, rank.rank)
        selection = select(lower(prove(made)), request)
        assert selection.total_bytes > 0
        assert oracle.check(made, request, selection) == []


def the_pair():
    made = plan(manifest_from_json(MANIFESTS["packed"]), manifest_from_json(MANIFESTS["one-rank"]), 0)
    request, slack = request_from_json(REQUESTS[0])
    return made, request, slack


def test_the_pair_gives_the_runs_of_the_example():
    made, request, slack = the_pair()
    selection = select(lower(prove(made)), request, slack=slack)
    assert slack is Slack.CLEAR
    assert oracle.check(made, request, selection) == []
    assert selection_to_json(made, selection).decode() == RUNS


def test_the_four_lines_at_the_top_print_the_runs_of_the_example(capsys):
    (lines,) = re.findall(r"^```python\n(from kvferry .*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    given = {"src_json": MANIFESTS["packed"], "dst_json": MANIFESTS["one-rank"], "request_json": REQUESTS[0]}
    exec(lines, given)
    assert capsys.readouterr().out.strip() == RUNS.strip()


def test_the_loop_on_the_page_moves_the_bytes():
    made, request, slack = the_pair()
    runs_json = selection_to_json(made, select(lower(prove(made)), request, slack=slack), indent=0)
    (loop,) = re.findall(r"^```python\n(document = .*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    src_memory = {rank: {"kv0": bytes([rank + 1]) * 1536} for rank in (0, 1)}
    dst_memory = {"kv": bytearray(b"\xff" * 3072)}
    exec(loop, {"json": json, "runs_json": runs_json, "src_memory": src_memory, "dst_memory": dst_memory})
    by_head = b"".join(bytes([rank] * 32 + [0] * 96) for rank in (1, 1, 2, 2))
    assert dst_memory["kv"] == b"\xff" * 1024 + by_head * 2 + b"\xff" * 1024


def test_the_limits_on_the_page_are_those_of_the_code():
    from kvferry.core.manifest import MAX_REGIONS
    from kvferry.wire import manifest, reading, request

    limits = (
        *(reading.MAX_JSON_ITEMS, manifest.MAX_DIGITS, manifest.MAX_AXIS_MAPS, manifest.MAX_COORDINATES),
        *(MAX_REGIONS, manifest.MAX_STATES_TIMES_RANKS, request.MAX_TOKENS, request.MAX_SPANS),
    )
    section = PAGE.partition("\nLimits: ")[2]
    words = Counter(section.replace("\n", " ").split())
    assert Counter(f"{limit:,}" for limit in limits) <= words
    assert (reading.MAX_JSON_BYTES, reading.MAX_MSGPACK_BYTES) == (64 << 20, 8 << 20)


def test_the_page_names_every_field():
    from kvferry.wire import manifest, request
    from kvferry.wire import request as runs

    for module in (manifest, request, runs):
        for name, struct in vars(module).items():
            for field in getattr(struct, "__struct_fields__", ()) if name.endswith("Doc") else ():
                if "Digit" not in name:
                    assert f"`{field}`" in PAGE, f"{name}.{field}"
