"""JSON for people."""

import json

from kvferry.wire.reading import WIDTH, laid_out


def test_names_are_written_as_they_are_whatever_their_letters():
    doc = {"états": {"слой.0": ["注意" * WIDTH]}}
    text = laid_out(doc)
    assert json.loads(text) == doc
    assert text.count("\n") > 2
    assert all(name in text for name in ("états", "слой.0", "注意"))
