"""R002-13, RA-3: whatever peers say to each other changes together with the version that they compare."""

import json

import msgspec
import pytest
import wire_schemas

from kvferry.core.manifest import VERSION
from kvferry.wire.messages import PROTOCOL, Hello
from kvferry.wire.reading import Name


@pytest.mark.parametrize("name", wire_schemas.current())
def test_a_wire_structure_changes_only_with_its_version(name):
    """R002-13, RA-3, RA-9: a field more, less, or of another type under the same version fails here."""
    path = wire_schemas.FOLDER / f"{name}.json"
    assert path.exists(), "a new version: run python tools/wire_schemas.py, and commit the file"
    assert json.loads(path.read_text(encoding="utf-8")) == wire_schemas.current()[name], (
        "what peers say has changed: raise the version, then run python tools/wire_schemas.py (it says how)"
    )


def test_the_schemas_of_earlier_versions_are_kept():
    kept = {path.stem for path in wire_schemas.FOLDER.glob("*.json")}
    assert kept >= {f"messages-{version}" for version in range(1, PROTOCOL + 1)}
    assert kept >= {f"documents-{version}" for version in range(1, VERSION + 1)}


FIELDS = [("protocol", int), ("reader", Name)]


def hello(fields=FIELDS, tag="Hello", **options):
    """A struct like ``Hello``, with a change."""
    made = msgspec.defstruct("Anything", fields, frozen=True, tag=tag, **options)
    return wire_schemas.schema_of([made])


def test_the_name_of_a_class_and_its_words_are_not_on_the_wire():
    assert wire_schemas.schema_of([Hello]) == hello()


@pytest.mark.parametrize(
    "changed",
    [
        hello([*FIELDS, ("more", int, 0)]),
        hello(FIELDS[:1]),
        hello([("protocol", int), ("name", Name)]),
        hello([("protocol", int), ("reader", bytes)]),
        hello([("protocol", int), ("reader", Name, "")]),
        hello([("protocol", int), ("reader", tuple[str, ...])]),
        hello(tag="Hi"),
        hello(array_like=True),
    ],
    ids=["added", "removed", "renamed", "other type", "optional", "several", "other tag", "array"],
)
def test_every_change_of_a_structure_is_seen(changed):
    """RA-3: the smallest change of a message is another schema."""
    assert changed != hello()
