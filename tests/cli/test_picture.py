"""``--html``: what the page shows is what ``--json`` says, and no name of a stranger becomes markup."""

import itertools
import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry import lower, plan, prove, select
from kvferry.cli.asked import Asked
from kvferry.cli.engines import described_with_room
from kvferry.cli.output import num_bytes
from kvferry.cli.picture import plan_picture
from kvferry.cli.picture.bands import piece_bytes, state_rows
from kvferry.cli.picture.blocks import drawn_cells, engine_blocks
from kvferry.cli.picture.render import DARK, LIGHT
from kvferry.cli.picture.shapes import LogScale, strips
from kvferry.core.view import NOT_HELD
from kvferry.models import Topology, describe, model_named
from kvferry.testing.strategies import cases, engines, requests
from kvferry.wire.manifest import manifest_to_json

PAIRS = {
    "GQA": ("llama-3.1-70b", "tp=8", "tp=6"),
    "KDA and MLA": ("kimi-linear-48b", "tp=4,block=128", "tp=2,block=64"),
    "draft": ("deepseek-v3+kimi-k2.5-eagle3", "tp=16", "tp=8"),
    "stages": ("gpt-oss-20b", "tp=2,pp=2", "tp=4"),
}


def billed(model: str, src: str, dst: str, **asked):
    sides = (
        described_with_room(model_named(model), text, name, 4096) for text, name in ((src, "s"), (dst, "d"))
    )
    return Asked(**asked).billed_between(*sides)


class Page(HTMLParser):
    """A page's text, its links, and the values of its totals."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def total(self, name: str) -> int:
        (value,) = [attrs["data-value"] for _, attrs in self.tags if attrs.get("id") == name]
        return int(value or "")


@pytest.fixture
def drawn(cli, tmp_path):
    """Run a command with --html, and read the page."""
    pytest.importorskip("jinja2")

    def draw(*words: object) -> tuple[str, str]:
        path = tmp_path / "it.html"
        ran = cli(*words, "--html", path)
        assert ran.code in (0, 1), ran.err
        return path.read_text(encoding="utf-8"), ran.out

    return draw


# -- the values


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_bands_are_the_flows_of_the_bill(pair):
    found = billed(*pair)
    rows = state_rows(Asked(), found)
    sums: dict[tuple[int, int], int] = {}
    for band in (band for row in rows for band in row.bands):
        sums[band.src_rank, band.dst_rank] = sums.get((band.src_rank, band.dst_rank), 0) + band.num_bytes
    assert sums == {(flow.src_rank, flow.dst_rank): flow.total_bytes for flow in found.bill.flows}
    names = [name for row in rows for name in row.names]
    assert sorted(names) == sorted(state.name for state in found.destination.states)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_the_bytes_of_pieces_are_those_of_the_selection(data):
    """Whatever the two engines are, and whatever slack is copied along."""
    case = data.draw(cases())
    src, dst = engines(case)
    request = data.draw(requests(src, dst, case.num_tokens, case.num_kept))
    route = lower(prove(plan(src, dst, case.dst_rank)), max_runs_per_block=1 << 20)
    sums: dict[int, int] = {}
    for piece, size in piece_bytes(route, request):
        assert size >= 0
        sums[piece.src_rank] = sums.get(piece.src_rank, 0) + size
    wanted = {rank: product.total_bytes for rank, product in select(route, request).products.items()}
    assert sums == wanted


def test_equal_layers_are_one_row_and_stages_are_not():
    rows = state_rows(Asked(), billed("deepseek-v3", "tp=2", "tp=1"))
    assert [(row.label, len(row.names)) for row in rows] == [("layers.{0-60}.attn/latent", 61)]
    rows = state_rows(Asked(), billed("deepseek-v3", "pp=2", "tp=1"))
    assert [len(row.names) for row in rows] == [30, 31]
    assert {row.src.sentence for row in rows} == {"whole, on one rank"}


def test_replicated_states_are_told_apart():
    latent, key, _ = state_rows(Asked(), billed("deepseek-v3+kimi-k2.5-eagle3", "tp=4", "tp=2"))
    assert (latent.src.is_replicated, latent.src.sentence) == (True, "whole on each of 4 ranks")
    assert (key.src.is_replicated, key.src.sentence) == (False, "split by head over 4 ranks")
    assert key.src.shares == {i: ((i / 4, (i + 1) / 4),) for i in range(4)}
    (row, *_) = state_rows(Asked(), billed("llama-3.1-8b", "tp=16", "tp=1"))
    assert row.src.sentence == "8 parts by head, repeated over 16 ranks"


def test_bands_are_as_thick_as_their_bytes_whatever_their_row():
    found = billed("kimi-linear-48b", "tp=4", "tp=2")
    per_byte = []
    for strip in strips(state_rows(Asked(), found), found.ranks):
        for shape in strip.bands:
            (edges,) = re.findall(r"^M(\S+) .* (\S+) \S+Z$", shape.path)
            left, right = map(float, edges)
            if right - left > 20:
                per_byte.append((right - left) / shape.band.num_bytes)
    assert len(per_byte) > 4
    assert max(per_byte) == pytest.approx(min(per_byte), rel=0.01)


def test_only_the_rank_that_was_asked_for():
    found = billed("llama-3.1-8b", "tp=4", "tp=2", dst_rank=1)
    for strip in strips(state_rows(Asked(dst_rank=1), found), found.ranks):
        assert [shape.rank for shape in strip.dst] == [1]
        assert {shape.band.dst_rank for shape in strip.bands} == {1}


@pytest.mark.parametrize(
    "engine",
    [
        "llama-3.1-8b tp=2",
        "llama-3.1-8b tp=2,layout=NHD,block=64",
        "llama-3.1-8b tp=1,kernel=4,cp=2",
        "llama-3.1-8b layout=cpu-vec",
        "gpt-oss-20b tp=2,layout=cross-layer",
        "kimi-linear-48b tp=4,block=128",
        "deepseek-v4 tp=2",
        "nemotron-h-8b tp=2,conv=DS",
    ],
)
def test_a_drawn_cell_is_where_its_words_say(engine):
    """Every held byte is drawn, and by a cell that names its token and its head."""
    model, topology = engine.split()
    manifest = describe(model_named(model), Topology.parse(topology))
    looks = {view.axes: view for view in manifest.ranks[-1].views}
    for view in looks.values():
        state = manifest.state_by_name[view.state]
        cells = list(drawn_cells(view, state.item_bytes, state.tokens_per_cell, 40, 0))
        assert len(cells) <= 40
        starts = np.zeros(1, np.int64)
        tokens = heads = np.zeros(1, np.int64)
        for name, axis in view.axes:
            offsets = axis.offsets()
            held = np.flatnonzero(offsets != NOT_HELD)
            tokens, heads = (
                np.add.outer(of, (held + axis.start) * (name == wanted)).ravel()
                for of, wanted in ((tokens, "token"), (heads, "head"))
            )
            starts = np.add.outer(starts, offsets[held]).ravel()
        drawn = np.zeros(len(starts), int)
        for cell in cells:
            inside = (starts >= cell.offset) & (starts < cell.offset + cell.num_bytes)
            for name, of, scale in (("token", tokens, state.tokens_per_cell), ("head", heads, 1)):
                if said := re.search(rf"{name}s? (\d+)(?: to (\d+))?", cell.words):
                    low, high = int(said[1]), int(said[2] or said[1])
                    mine = (of * scale >= low) & (of * scale + scale - 1 <= high)
                    assert not cell.is_whole or mine[inside].all(), cell
                    inside &= mine
            drawn += inside
        assert (drawn == 1).all()


def test_groups_that_share_a_tensor_are_drawn_on_the_same_bytes():
    (picture,) = engine_blocks(
        "source", describe(model_named("kimi-linear-48b"), Topology.parse("tp=4,block=16"))
    ).pictures
    states, full = picture.parts
    assert states.groups == ("state.0", "state.1", "state.2")
    assert [track.label.rpartition("/")[2] for track in states.tracks] == [
        "conv.q",
        "conv.k",
        "conv.v",
        "ssm",
    ]
    assert full.groups == ("full",)
    assert full.used_bytes < full.block_bytes == states.block_bytes == picture.num_bytes
    assert states.lens is not None
    assert {cell.offset for track in states.lens.tracks for cell in track.cells} >= {0, 2048, 4096}


def test_blocks_that_lie_apart_in_a_tensor_are_drawn_apart():
    """All blocks of K, then all of V: neither is drawn into the other's bytes."""
    manifest = describe(model_named("gpt2"), Topology.parse("layout=NHD-apart,blocks=10"))
    (picture,) = engine_blocks("source", manifest).pictures
    assert [part.tracks[0].label for part in picture.parts] == [
        "layers.{0-11}.attn/k",
        "layers.{0-11}.attn/v",
    ]
    assert [part.first_byte for part in picture.parts] == [0, 10 * picture.num_bytes]
    assert all(part.used_bytes == part.block_bytes for part in picture.parts)


def test_two_strides_in_one_tensor_are_drawn_on_one_scale():
    manifest = describe(model_named("kimi-linear-48b"), Topology.parse("tp=4"))
    rank = manifest.ranks[0]
    views = tuple(
        replace(view, block_stride=view.block_stride // 4) if view.group == "full" else view
        for view in rank.views
    )
    other = replace(manifest, ranks=(replace(rank, views=views),))
    picture = engine_blocks("source", other).pictures[0]
    assert sorted(picture.num_bytes // part.block_bytes for part in picture.parts) == [1, 4]


def test_a_page_of_very_many_bands_says_where_the_rest_is(drawn, monkeypatch):
    monkeypatch.setattr(plan_picture, "MOST_LINES", 40)
    text, _ = drawn("plan", "--model", "gpt2", "--src", "tp=64", "--dst", "tp=48")
    assert len(text.encode()) < 500_000
    for number in (96 - 20, 96 - 40):
        assert f"… and {number} more, which kvferry plan --json lists." in Page(text).text


def test_every_kind_of_view_is_drawn_once():
    blocks = engine_blocks("source", describe(model_named("deepseek-v4"), Topology.parse("tp=2")))
    labels = [track.label for p in blocks.pictures for part in p.parts for track in part.tracks]
    assert {label.rpartition("}.")[2] for label in labels} >= {
        "window/values",
        "attn/scales",
        "indexer/values",
    }
    assert blocks.num_more > 0
    assert sum(len(t.cells) for p in blocks.pictures for part in p.parts for t in part.tracks) <= 1000


def test_equal_times_still_have_an_axis():
    assert LogScale.of([0.01, 0.01]).ticks == (0.01, 0.1)
    assert LogScale.of([0.0]).ticks == (1.0, 10.0)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
def test_colours_can_be_told_from_what_they_lie_on(colours):
    """WCAG's AA: 4.5 for text, 3 for what is drawn."""
    texts, grounds = ("ink", "quiet", "good", "bad", "warn", "link"), ("paper", "card")
    for name, ground in itertools.product(colours, grounds):
        low, high = sorted(luminance(colours[each]) for each in (name, ground))
        contrast = (high + 0.05) / (low + 0.05)
        if name not in ("paper", "card", "line", "soft"):
            assert contrast >= (4.5 if name in texts else 3), (name, ground, contrast)


# -- the page


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_totals_are_those_of_the_json(drawn, pair):
    model, src, dst = pair
    text, out = drawn("plan", "--model", model, "--src", src, "--dst", dst, "--json")
    answer, page = json.loads(out), Page(text)
    assert page.total("total-bytes") == answer["total_bytes"]
    assert page.total("num-runs") == answer["num_runs"]
    assert page.total("zeroed-bytes") == answer["zeroed_bytes"]
    for flow in answer["flows"]:
        ranks = f"src {flow['src_rank']} dst {flow['dst_rank']}"
        assert f"{ranks} {num_bytes(flow['total_bytes'])} {flow['num_runs']:,}" in page.text
    assert all(link["link"] in page.text for link in answer["links"])
    assert len(text.encode()) < 500_000


def test_it_is_one_file_and_calls_nobody(drawn):
    text, _ = drawn("plan", "--model", "gpt2", "--src", "tp=2", "--dst", "tp=3")
    assert not re.search(r"https?:|//[a-z]|url\(|@import", text)
    loading = [attrs for _, attrs in Page(text).tags if {"src", "srcset", "data"} & attrs.keys()]
    assert loading == []
    assert all(str(attrs["href"]).startswith("#") for _, attrs in Page(text).tags if "href" in attrs)


def test_every_band_has_words_and_every_picture_a_table(drawn):
    text, _ = drawn("plan", "--model", "gpt2", "--src", "tp=2", "--dst", "tp=3")
    tags = Page(text).tags
    bands = [attrs for tag, attrs in tags if attrs.get("class") == "band"]
    assert len(bands) == 2 * 4
    assert all("sends destination rank" in str(attrs["aria-label"]) for attrs in bands)
    assert [attrs["tabindex"] for attrs in bands] == ["0", "-1", "-1", "-1"] * 2
    for landmark in ("header", "nav", "main", "footer", "h1"):
        assert [tag for tag, _ in tags].count(landmark) >= 1, landmark
    assert sum(tag == "table" for tag, _ in tags) == 2 + 3


HOSTILE = '<script>alert(1)</script>"\' onload=alert(2) x="{{ 7*7 }}'


def hostile_manifest(more: str = "") -> str:
    manifest = describe(model_named("gpt2"), Topology(tp=2), HOSTILE)
    text = manifest_to_json(replace(manifest, model=HOSTILE + more)).decode()
    return text.replace("layers.", json.dumps(HOSTILE + more)[1:-1])


@pytest.mark.parametrize("command", ["plan", "diff"])
def test_names_of_strangers_are_text(drawn, tmp_path, command):
    (tmp_path / "it.json").write_text(hostile_manifest())
    text, _ = drawn(command, tmp_path / "it.json", tmp_path / "it.json")
    page = Page(text)
    assert sum(tag == "script" for tag, _ in page.tags) == 1
    assert not any("onload" in attrs for _, attrs in page.tags)
    assert HOSTILE in "".join(page.words)
    assert "{{ 7*7 }}" in text


def test_a_sheet_for_documents_has_every_band(cli, tmp_path):
    pytest.importorskip("jinja2")
    path = tmp_path / "it.svg"
    assert cli("plan", "--model", "gpt2", "--src", "tp=2", "--dst", "tp=3", "--svg", path).code == 0
    text = path.read_text(encoding="utf-8")
    root = ElementTree.fromstring(text)
    tag = "{http://www.w3.org/2000/svg}"
    titles = [each.findtext(f"{tag}title") for each in root.iter(f"{tag}path") if each.get("class") == "band"]
    assert len(titles) == 2 * 4
    assert "source rank 1 sends destination rank 2" in str(titles[-1])
    assert "layers.{0-11}.attn/k" in str(root.findtext(f"{tag}desc"))
    # Not everything that shows a document knows these; a band would be black.
    assert not re.search(r"url\(|var\(|color-mix", text)
    assert text.replace('xmlns="http://www.w3.org/2000/svg"', "").count("://") == 0


def test_names_of_strangers_do_not_break_a_sheet(cli, tmp_path):
    pytest.importorskip("jinja2")
    (tmp_path / "it.json").write_text(hostile_manifest("\x1b[31m\x00 ]]> &"))
    ran = cli("plan", tmp_path / "it.json", tmp_path / "it.json", "--svg", tmp_path / "it.svg")
    assert ran.code == 0
    root = ElementTree.parse(tmp_path / "it.svg").getroot()
    assert not [each for each in root.iter() if str(each.tag).endswith("script")]
    assert HOSTILE in "".join(root.itertext())


def test_two_manifests_side_by_side(drawn):
    text, out = drawn("diff", "--model", "qwen3-32b", "tp=8,block=16", "tp=4,block=64,layout=NHD", "--json")
    page = Page(text)
    for each in json.loads(out)["differences"]:
        assert f"{each['what']} {each['a']} {each['b']}" in page.text
    assert page.text.index("slow") < page.text.index("What differs") < page.text.index("States, side by side")
    # Of each state what differs is marked, and nothing else.
    marked = re.findall(
        r'rowheader" scope="row">([^<]+)</th>\s*<td role="cell"><mark>', text.partition('id="states"')[2]
    )
    assert sorted(set(marked)) == ["held by", "order in memory", "tokens per block"]


def test_equal_manifests_have_no_marks(drawn):
    text, _ = drawn("diff", "--model", "gpt2", "tp=2", "tp=2")
    assert "Nothing differs, but transfers are slow" in Page(text).text
    assert "<mark>" not in text


def test_states_that_one_side_lacks_are_marked(drawn, tmp_path):
    for name in ("gpt2", "mamba2-2.7b"):
        (tmp_path / f"{name}.json").write_bytes(manifest_to_json(describe(model_named(name), Topology())))
    text, _ = drawn("diff", tmp_path / "gpt2.json", tmp_path / "mamba2-2.7b.json")
    assert "<mark>not there</mark>" in text


def test_a_refusal_says_what_to_do_first(drawn):
    text, _ = drawn("plan", "--model", "gpt2", "--src", "tp=2", "--dst", "tp=2,dtype=fp8")
    page = Page(text)
    assert page.text.index("refused") < page.text.index("What to do") < page.text.index("state-differs")
    assert "Give both engines the same cache dtype" in page.text
    assert "This pair would be proved: kvferry plan --model gpt2" in page.text
    assert not any(attrs.get("class") == "band" for _, attrs in page.tags)


def test_a_request_that_moves_nothing_has_a_page(drawn):
    words = "plan --model gpt2 --src tp=2 --dst tp=3 --tokens 16 --kept 16"
    assert "proved" in Page(drawn(*words.split())[0]).text


# -- the file


@pytest.mark.parametrize(
    ("name", "message"),
    [("it.json", "the name must end in .html"), ("no/it.html", "No such file or directory")],
)
def test_a_bad_name_is_said_before_any_work(cli, tmp_path, name, message):
    (tmp_path / "it.json").write_text("{}")
    ran = cli("plan", "--model", "gpt2", "--src", "tp=2", "--dst", "tp=3", "--html", tmp_path / name)
    assert ran.code == 2
    assert message in " ".join(ran.err.split())
    assert (tmp_path / "it.json").read_text() == "{}"


def test_a_missing_jinja_names_its_extra(cli, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    ran = cli("plan", "--model", "gpt2", "--src", "tp=2", "--dst", "tp=3", "--html", tmp_path / "it.html")
    assert ran.code == 2
    assert 'pip install ".[html]"' in " ".join(ran.err.split())
    assert list(tmp_path.iterdir()) == []


def test_the_same_plan_gives_the_same_page_and_replaces_it(drawn, tmp_path):
    words = ("plan", "--model", "gpt2", "--src", "tp=2", "--dst", "tp=3")
    assert drawn(*words)[0] == drawn(*words)[0]
    assert [path.name for path in tmp_path.iterdir()] == ["it.html"]
