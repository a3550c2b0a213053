"""The site's own text: links of the repository work on it, and what GitHub shows it shows."""

import site_pages
from site_pages import Addresses, linked_files, not_understood, with_links_of_the_site

import kvferry


def test_links_lead_to_pages_of_the_site():
    page = (
        "[a](docs/cli.md#kvferry-plan) [b](CONTRIBUTING.md) [c](examples/own_cache.py) [d](https://x.org/y)"
    )
    assert with_links_of_the_site(page, "") == (
        "[a](cli.md#kvferry-plan) [b](contributing.md) [c](files/examples/own_cache.py.md) [d](https://x.org/y)"
    )
    page = "[a](errors.md) [b](../README.md#x) [c](#here)\n```\n[d](../README.md)\n```\n"
    assert with_links_of_the_site(page, "docs") == (
        "[a](errors.md) [b](readme.md#x) [c](#here)\n```\n[d](../README.md)\n```\n"
    )


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
