"""Two engines as they report themselves, for tests of what people are shown of them."""

from typing import Any

SOURCE: dict[str, Any] = {
    "side": "source",
    "title": "source prefill-with-a-rather-long-name",
    "name": "prefill-with-a-rather-long-name",
    "host": "gpu-17",
    "pid": 7,
    "up_seconds": 100.0,
    "address": "tcp://10.0.0.7:34683",
    "ranks": "4/4",
    "num_offered": 3,
    "num_being_read": 1,
    "pinned_bytes": 12.3 * 2**30,
    "leases": [
        {
            "request_id": "cmpl-0123456789abcdef-0",
            "num_tokens": 32768,
            "reader": "decode#cae5fac399751f5c",
            "seconds_left": 29.3,
        }
    ],
    "counts": {"offered": 100.0},
    "byte_counts": {"granted": 2.0**40},
}
DESTINATION: dict[str, Any] = {
    "side": "destination",
    "title": "destination decode#cae5fac399751f5c rank 0",
    "name": "decode#cae5fac399751f5c",
    "host": "gpu-18",
    "pid": 8,
    "up_seconds": 50.0,
    "rank": 0,
    "phases": {"reading": 2, "holding": 1},
    "num_reads": 8,
    "num_quarantined": 0,
    "sources": [
        {
            "engine": "prefill-with-a-rather-long-name",
            "address": "tcp://10.0.0.7:34683",
            "state": "met",
            "way": "direct",
            "why": "",
        }
    ],
    "loads": [
        {
            "request_id": "cmpl-0123456789abcdef-0",
            "engine": "prefill-with-a-rather-long-name",
            "phase": "reading",
            "seconds": 0.4,
        }
    ],
    "counts": {"read direct": 10.0, "read packed": 5.0},
    "byte_counts": {"direct": 1000.0, "packed": 50.0},
}
