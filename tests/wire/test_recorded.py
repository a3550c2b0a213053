"""A fleet is upgraded engine by engine: what a peer of the version before ours has written is read."""

import json
from typing import get_args

import pytest
import wire_schemas

from kvferry.wire.messages import (
    OLDEST_PROTOCOL,
    PROTOCOL,
    FromAuthority,
    ToAuthority,
    decode_from_authority,
    decode_to_authority,
    encode,
)

TO = {kind.__name__ for kind in get_args(ToAuthority)}


def said_in(version):
    path = wire_schemas.RECORDED / f"messages-{version}.json"
    assert path.exists(), "a new version: run python tools/wire_schemas.py, and commit the file"
    return {name: bytes.fromhex(data) for name, data in json.loads(path.read_text(encoding="utf-8")).items()}


@pytest.mark.parametrize("version", range(OLDEST_PROTOCOL, PROTOCOL + 1))
def test_every_message_of_every_version_that_is_spoken_is_read(version):
    for name, data in said_in(version).items():
        message = decode_to_authority(data) if name in TO else decode_from_authority(data)
        assert type(message).__name__ == name


def test_every_message_of_today_is_recorded_as_it_is_written():
    """Else the next version would be tried against what nobody says."""
    recorded = said_in(PROTOCOL)
    assert recorded.keys() == TO | {kind.__name__ for kind in get_args(FromAuthority)}
    for name, data in recorded.items():
        message = decode_to_authority(data) if name in TO else decode_from_authority(data)
        assert encode(message) == data
    assert {name: data.hex() for name, data in recorded.items()} == wire_schemas.recorded(), (
        "what peers say has changed: raise the version; one that was never released: delete its files first"
    )
