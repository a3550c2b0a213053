"""Messages and their codec: manifests, requests and runs as JSON (for people) and msgpack (for peers).

The structs in ``manifest`` and ``request`` are the documented schema; the core does not use them. Invalid
input raises a ``SpecError`` with the place, the rule and the value.
"""

from kvferry.wire.manifest import (
    manifest_from_json,
    manifest_from_msgpack,
    manifest_to_json,
    manifest_to_msgpack,
)
from kvferry.wire.request import request_from_json, selection_to_json

__all__ = [
    "manifest_from_json",
    "manifest_from_msgpack",
    "manifest_to_json",
    "manifest_to_msgpack",
    "request_from_json",
    "selection_to_json",
]
