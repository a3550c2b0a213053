"""Two engines as they report themselves, for tests of what people are shown of them."""

from kvferry.cli.status.reported import ReportedDestination, ReportedSource, SeenLease, SeenLoad, SeenSource

SOURCE = ReportedSource(
    name="prefill-with-a-rather-long-name",
    host="gpu-17",
    pid=7,
    up_seconds=100.0,
    address="tcp://10.0.0.7:34683",
    ranks="4/4",
    num_offered=3,
    num_being_read=1,
    pinned_bytes=12.3 * 2**30,
    leases=(SeenLease("cmpl-0123456789abcdef-0", 32768, "decode#cae5fac399751f5c", 29.3),),
    counts={"offered": 100.0},
    byte_counts={"granted": 2.0**40},
)
DESTINATION = ReportedDestination(
    name="decode#cae5fac399751f5c",
    host="gpu-18",
    pid=8,
    up_seconds=50.0,
    rank=0,
    phases={"reading": 2, "holding": 1},
    num_reads=8,
    num_quarantined=0,
    sources=(SeenSource("prefill-with-a-rather-long-name", "tcp://10.0.0.7:34683", "met", "direct", ""),),
    loads=(SeenLoad("cmpl-0123456789abcdef-0", "prefill-with-a-rather-long-name", "reading", 0.4),),
    counts={"read direct": 10.0, "read packed": 5.0},
    byte_counts={"direct": 1000.0, "packed": 50.0},
)
