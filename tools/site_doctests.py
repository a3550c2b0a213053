"""For the API reference: the sessions in docstrings are shown as code, not as quotations of quotations."""

from __future__ import annotations

import re
from typing import Any

import griffe

SESSION = re.compile(r"^( *)>>> .*(?:\n.*\S.*)*", re.MULTILINE)


def fenced(docstring: str) -> str:
    """A docstring with a fence around each of its sessions.

    >>> fenced("Adds.\\n\\n>>> 1 + 1\\n2\\n\\nThat is all.").splitlines()
    ['Adds.', '', '```pycon', '>>> 1 + 1', '2', '```', '', 'That is all.']
    """
    return SESSION.sub(lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", docstring)


class Sessions(griffe.Extension):
    """Found by mkdocstrings: see mkdocs.yml."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite the docstring of whatever has been read."""
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)
