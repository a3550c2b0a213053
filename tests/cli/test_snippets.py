"""Snippets of the docs are run, page by page and from top to bottom, or say why not."""

import doctest
import os
import re
import shlex
import subprocess
import sys

import pytest
from snippets import LANGUAGES, OWN_TESTS, PAGES, ROOT, count, snippets, snippets_of

from tests.cli.test_docs import EXAMPLES, squeezed

SHOWN_ON_CLI_PAGE = [argv for argv, _ in EXAMPLES]


def shell(words, folder):
    """A command of the docs that is not ours, in the page's folder, where the examples are too."""
    program = sys.executable if words[0] == "python" else words[0]
    ran = subprocess.run(
        [program, *words[1:]], cwd=folder, capture_output=True, text=True, check=False, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def run_session(snippet, cli, folder, monkeypatch):
    place = f"{snippet.page}:{snippet.line}"
    for command, shown in snippet.commands():
        words = shlex.split(os.path.expandvars(command.replace("$PWD", str(folder))), comments=True)
        if words[0] == "export":
            monkeypatch.setenv(*words[1].split("=", 1))
        elif words[0].endswith("kvferry"):
            if words[1:] in SHOWN_ON_CLI_PAGE and not shown:
                continue  # run by the test of that page
            ran = cli(*words[1:])
            assert ran.code == shown.startswith("REFUSED"), f"{place}: {command}\n{ran.err}"
            assert not shown or squeezed(ran.out) == squeezed(shown), place
        else:  # what two processes print comes in either order
            assert sorted(squeezed(shell(words, folder))) == sorted(squeezed(shown)), place


@pytest.mark.parametrize("page", [page for page in PAGES if snippets(page)])
def test_the_snippets_of_a_page_work(page, cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    namespace: dict[str, object] = {}
    for snippet in snippets(page):
        if snippet.reason or snippet.own_test:
            continue
        if snippet.language == "python":
            exec(compile(snippet.text, f"{page}:{snippet.line}", "exec"), namespace)
        elif snippet.language == "pycon":
            test = doctest.DocTestParser().get_doctest(snippet.text, namespace, page, page, snippet.line)
            said: list[str] = []
            runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
            runner.run(test, out=said.append, clear_globs=False)
            assert "".join(said) == ""
            namespace |= test.globs
        else:
            run_session(snippet, cli, tmp_path, monkeypatch)


def test_a_page_with_a_test_of_its_own_is_read_by_it():
    for (page, language), test in OWN_TESTS.items():
        assert language in LANGUAGES
        assert page.removeprefix("docs/") in (ROOT / test).read_text(encoding="utf-8")
        assert any(one.own_test for one in snippets(page))


def test_a_block_is_found_with_its_reason_and_without_its_indent():
    text = (
        "1. x\n\n    <!-- not run: no GPU -->\n    ```console\n    $ a \\\n      b\n    c\n    $ d\n    ```\n"
    )
    text += "\n```json\n{}\n```\n"
    (found,) = snippets_of("page", text)
    assert (found.reason, found.line) == ("no GPU", 4)
    assert list(found.commands()) == [("a    b", "c\n"), ("d", "")]
    assert snippets_of("page", "```python\nx\n```\n")[0].reason == ""


def test_most_snippets_are_run():
    total, run, left_out = map(int, re.findall(r"\d+", count().splitlines()[0]))
    assert total == run + left_out
    assert run > 2 * left_out
