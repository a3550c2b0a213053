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
from kvferry.wire.rank_asks import FromRank, ToRank, decode_from_rank, decode_to_rank

DECODERS = {
    kind.__name__: decode
    for kinds, decode in (
        (ToAuthority, decode_to_authority),
        (FromAuthority, decode_from_authority),
        (ToRank, decode_to_rank),
        (FromRank, decode_from_rank),
    )
    for kind in get_args(kinds)
}


def read(name, data):
    return DECODERS[name](data)


def said_in(version):
    path = wire_schemas.RECORDED / f"messages-{version}.json"
    assert path.exists(), "a new version: run python tools/wire_schemas.py, and commit the file"
    return {name: bytes.fromhex(data) for name, data in json.loads(path.read_text(encoding="utf-8")).items()}


@pytest.mark.parametrize("version", range(OLDEST_PROTOCOL, PROTOCOL + 1))
def test_every_message_of_every_version_that_is_spoken_is_read(version):
    for name, data in said_in(version).items():
        message = read(name, data)
        assert type(message).__name__ == name


def test_every_message_of_today_is_recorded_as_it_is_written():
    """Else the next version would be tried against what nobody says."""
    recorded = said_in(PROTOCOL)
    assert recorded.keys() == {*DECODERS}
    for name, data in recorded.items():
        message = read(name, data)
        assert encode(message) == data
    assert {name: data.hex() for name, data in recorded.items()} == wire_schemas.recorded(), (
        "what peers say has changed: raise the version; one that was never released: delete its files first"
    )
