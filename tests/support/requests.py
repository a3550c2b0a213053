"""Requests as JSON, for tests that need a file."""

from __future__ import annotations

import json

from kvferry import HOLE, Request, Slack


def request_to_json(request: Request, *, slack: Slack = Slack.CLEAR) -> bytes:
    tables = {
        side: {
            group: {
                "block_ids": [None if each == HOLE else each for each in table.block_ids.tolist()],
                "first_token": table.first_token,
            }
            for group, table in by_group.items()
        }
        for side, by_group in (("src", request.src), ("dst", request.dst))
    }
    spans = {
        what: {group: [[span.start, span.stop] for span in some] for group, some in by_group.items()}
        for what, by_group in (("need", request.need), ("kept", request.kept))
    }
    return json.dumps({**tables, **spans, "slack": slack.value}).encode()
