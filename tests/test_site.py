"""The site's own text: links of the repository work on it, and what GitHub shows it shows."""

import json
import re
from pathlib import Path

import pytest
import site_pages
import site_plans
from site_pages import Addresses, linked_files, not_understood, with_links_of_the_site
from site_tables import number, plain, table

import kvferry


def test_links_lead_to_pages_of_the_site():
    page = (
        "[a](docs/cli.md#kvferry-plan) [b](CONTRIBUTING.md) [c](examples/own_cache.py) [d](https://x.org/y)"
    )
    assert with_links_of_the_site(page, "") == (
        "[a](cli.md#kvferry-plan) [b](contributing.md) [c](files/examples/own_cache.py.md) [d](https://x.org/y)"
    )
    assert with_links_of_the_site("[errors.md](errors.md#x)", "docs") == "[Errors](errors.md#x)"
    page = "[a](errors.md) [b](../README.md#x) [c](#here)\n```\n[d](../README.md)\n```\n"
    assert with_links_of_the_site(page, "docs") == (
        "[a](errors.md) [b](readme.md#x) [c](#here)\n```\n[d](../README.md)\n```\n"
    )


def test_lab_notes_are_named_and_not_on_the_site():
    page = "[docs/lab/gpu.md](lab/gpu.md) [a GPU](lab/gpu.md) [errors.md](errors.md)"
    assert with_links_of_the_site(page, "docs") == (
        "`docs/lab/gpu.md` a GPU (`docs/lab/gpu.md`) [Errors](errors.md)"
    )
    assert linked_files(page, "docs") == set()


def test_a_file_that_a_page_links_to_is_a_page():
    page = (
        "[a](../examples/own_cache.py) [b](cli.md) [c](../README.md) [d](../no-such-file) [e](https://x.org)"
    )
    assert linked_files(page, "docs") == {"examples/own_cache.py"}
    shown = site_pages.file_page("examples/own_cache.py")
    assert "```python\n" in shown
    assert (site_pages.ROOT / "examples" / "own_cache.py").read_text(encoding="utf-8") in shown


def test_what_only_github_understands_is_found():
    assert list(not_understood("1. one\n\n    two\n\n    ```\n    x\n    ```\n", "<p>fine</p>")) == []
    assert len(list(not_understood("1. one\n\n   two\n", ""))) == 1
    assert len(list(not_understood("1. one\n\n   ```\n   x\n   ```\n", ""))) == 1
    assert len(list(not_understood("", "<p>words:\n* one\n* two</p>"))) == 2
    assert len(list(not_understood("", "<p>| a | b |</p>"))) == 1
    assert list(not_understood("", "<p><code>| a |</code> is a row</p>")) == []


def test_what_a_browser_would_fetch_is_found():
    found = Addresses(
        '<a href="https://a.org/x">x</a><img src="//b.org/y"><link href="https://c.org/z"><a href="#q">'
    )
    assert (found.linked, found.fetched) == ({"https://a.org/x"}, {"//b.org/y", "https://c.org/z"})


def test_the_reference_has_every_public_name():
    page = site_pages.reference()
    for name in kvferry.__all__:
        assert f".{name}\n" in page
    for room in site_pages.REFERENCE_ROOMS:
        names = {home.rpartition(".")[2] for home in site_pages.names_of(room)}
        assert names == set(__import__(f"kvferry.{room}", fromlist=["x"]).__all__)


def test_the_page_of_proofs_has_the_table_of_the_readme():
    assert table("docs/why.md", "all 368 legal pairs") == table("README.md", "all 368 legal pairs")


def test_plots_are_those_of_the_result_files():
    pytest.importorskip("matplotlib")
    import site_pictures

    pages = [site_pages.ROOT / "README.md", *site_pages.ROOT.glob("docs/*.md")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    assert {*re.findall(r"plots/([\w-]+)\.svg", text)} == {*site_pictures.PICTURES}
    for name in site_pictures.PICTURES:
        file = site_pages.ROOT / "docs" / "plots" / f"{name}.svg"
        drawn = site_pictures.as_file(name)
        assert file.read_text(encoding="utf-8") == drawn, "run python tools/site_pictures.py"
    drawn = site_pictures.picture("peers")
    _, *rows = table("README.md", "all 368 legal pairs")
    for name, right, rejected, wrong in rows:
        assert f"{name}: correct {right}, rejected {rejected}, silently wrong {wrong}" in drawn
        assert f">{right}</text>" in drawn
    assert site_pictures.INK not in drawn


def test_result_files_say_how_they_were_measured():
    for path in sorted((site_pages.ROOT / "benchmarks" / "results").glob("*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        for key in ("title", "measured", "command", "date", "hardware", "versions", "unit"):
            assert result[key], f"{path.name}: {key}"
        assert all(len(row) == len(result["columns"]) for row in result["rows"])


def test_a_cell_is_read_without_its_marks():
    assert plain("kvferry ([how](docs/performance.md))") == "kvferry"
    assert [number(cell) for cell in ("3.1 ms", "1,024", "refused")] == [3.1, 1024, None]


def words_of(drawing: Path) -> str:
    """What a drawing of a plan says to whoever does not see it: title, verdict, who holds what."""
    (words,) = re.findall("<title.*</desc>", drawing.read_text(encoding="utf-8"), re.DOTALL)
    return str(words)


def test_the_picture_of_the_readme_is_what_its_command_draws(tmp_path):
    pytest.importorskip("jinja2")
    site_plans.draw(site_plans.FRONT_PLAN, tmp_path / "plan.svg")
    drawn, kept = words_of(tmp_path / "plan.svg"), words_of(site_pages.ROOT / "docs" / "plan.svg")
    assert drawn == kept, "run python tools/site_plans.py, and commit docs/plan.svg"


def test_every_plan_is_on_a_page_once():
    pages = "".join(path.read_text(encoding="utf-8") for path in site_pages.ROOT.glob("docs/*.md"))
    assert sorted(re.findall("<!-- plan: (.*) -->", pages)) == sorted(site_plans.PLANS)
